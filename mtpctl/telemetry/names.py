"""The catalog of metrics: label, unit and meaning of each name.

Names follow other frameworks, mainly verl, so their dashboards and scripts can be reused. A metric that is not in the catalog is logged and
shown under its own name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "seconds", "tokens/s", "nats", "tokens", "GB/s", "versions", "updates", "GiB", "number"]


@dataclass(frozen=True, slots=True)
class Metric:
    """How one metric is shown. The unit `share` is a fraction of 1, shown in percent."""

    label: str
    unit: Unit
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "number", "Mean reward of the batch; an agent's trajectory counts as one response."),
    "reward/unfiltered_mean": Metric(
        "reward, unfiltered", "number", "Mean reward of all groups completed since the last update, including dropped ones."
    ),
    "reward/std": Metric("reward std", "number", "Standard deviation of the rewards in reward/mean."),
    "reward/errors": Metric(
        "rewards failed", "number", "Calls of the reward function that failed since the last update, late ones included."
    ),
    "reward/timeouts": Metric("reward timeouts", "number", "Failed calls that exceeded reward.timeout_s."),
    "reward/dropped": Metric("dropped", "number", "Groups dropped because a reward failed (reward.on_error: drop)."),
    "checkpoint/copy_behind": Metric(
        "not copied", "number", "Checkpoints written since the newest one in train.checkpoint_copy; 0: the copy is current."
    ),
    "checkpoint/copy_failures": Metric("failed", "number", "Failed attempts to copy a checkpoint since the last update."),
    "timing_s/checkpoint_copy": Metric("copy", "seconds", "Copying a checkpoint to train.checkpoint_copy during training."),
    "timing_s/reward": Metric("reward", "seconds", "From a finished response to its reward, mean over responses."),
    "timing_s/reward_wait": Metric(
        "wait for rewards", "seconds", "Time of an update in which trainer and engines waited only for rewards."
    ),
    "reward/signal_fraction": Metric("with signal", "share", "Groups whose rewards are not all equal."),
    "rl/stability": Metric(
        "stability", "share", "Share of the reward's variation around its trend that sampling noise explains; low: it oscillates."
    ),
    "response/length_mean": Metric("response length", "tokens", "Mean response length."),
    "response/length_max": Metric("longest response", "tokens", "Longest response of the batch."),
    "response/truncated_fraction": Metric("truncated", "share", "Responses that reached the token limit."),
    "response/deadline_fraction": Metric("timed out", "share", "Responses truncated by rollout.deadline_s."),
    "eval/accuracy": Metric(
        "held-out accuracy",
        "share",
        "Mean score on held-out problems: the part `correct` of the reward, else the reward. If scores are 0 or 1, the share of correct "
        "responses.",
    ),
    "eval/unseen_accuracy": Metric(
        "held-out, unseen", "share", "eval/accuracy for prompts that no training row has; logged if training rows have some of the prompts."
    ),
    "eval/unseen_problems": Metric("unseen problems", "number", "Number of held-out problems whose prompt no training row has."),
    "eval/reward_errors": Metric("held-out rewards failed", "number", "Held-out responses whose reward failed and counts as 0."),
    "eval/problems": Metric("held-out problems", "number", "Number of held-out problems in the accuracy."),
    "eval/length_mean": Metric("held-out length", "tokens", "Mean response length on held-out problems."),
    "eval/truncated_fraction": Metric("held-out truncated", "share", "Responses on held-out problems that reached the token limit."),
    "eval/deadline_fraction": Metric("held-out timed out", "share", "Responses on held-out problems truncated by rollout.deadline_s."),
    "eval/version": Metric("held-out version", "versions", "Weight version of the engines at the start of the evaluation."),
    "eval/mixed_fraction": Metric(
        "held-out mixed", "share", "Held-out responses with a token of another weight version than eval/version."
    ),
    "eval/spec_accept_rate": Metric("held-out acceptance", "share", "Accepted draft tokens on held-out problems."),
    "sft/loss": Metric("SFT loss", "nats", "Cross-entropy of the supervised stage, per supervised token."),
    "mtp/trunk_nll": Metric("trunk NLL", "nats", "Cross-entropy of the frozen trunk in the stage draft, per sampled token."),
    "actor/pg_loss": Metric("policy loss", "number", "Surrogate loss: mean over tokens, or over trajectories with aggregate: sequence."),
    "actor/entropy": Metric("entropy", "nats", "Mean entropy of the updated policy over response tokens."),
    "actor/grad_norm": Metric("trunk", "number", "Gradient norm of the trunk, before clipping."),
    "actor/ratio_mean": Metric("ratio", "number", "Mean of new over old probability."),
    "actor/ppo_kl": Metric("KL to old", "nats", "Estimate of KL(old ‖ new) within an update."),
    "actor/ref_kl": Metric("KL to reference", "nats", "Estimate of KL(policy ‖ reference)."),
    "actor/clip_fraction_low": Metric("clipped low", "share", "Tokens whose ratio was clipped below."),
    "actor/clip_fraction_high": Metric("clipped high", "share", "Tokens whose ratio was clipped above."),
    "actor/clip_fraction_dual": Metric("dual-clipped", "share", "Tokens under the dual clip."),
    "actor/gate": Metric("soft gate", "share", "Mean value of SAPO's gate; 1 on policy."),
    "actor/lr": Metric("learning rate", "number", "Learning rate of the trunk."),
    "mtp/grad_norm": Metric("MTP layers", "number", "Gradient norm of the MTP layers, before clipping."),
    "rollout/spec_accept_rate": Metric("drafts accepted", "share", "Draft tokens accepted by the target during generation."),
    "rollout/spec_accept_length": Metric("tokens per step", "tokens", "Tokens per decoding step, including the sampled one."),
    "rollout/spec_drafts": Metric("drafts per step", "tokens", "Draft tokens per step selected by rollout.speculation.auto."),
    "rollout/spec_drafted": Metric("drafted", "tokens", "Draft tokens proposed for the batch's responses."),
    "rollout/spec_accepted": Metric("accepted", "tokens", "Draft tokens accepted by the target for the batch's responses."),
    "rollout/prefix_cache_hit_rate": Metric("prompts cached", "share", "Prompt tokens found in vLLM's prefix cache."),
    "rollout/tokens_per_s": Metric("rollout", "tokens/s", "Response tokens per second of all engines, including held-out problems."),
    "rollout/replicas": Metric("replicas", "number", "Rollout engines in service at the sync."),
    "teacher/kl": Metric("KL to the teacher", "nats", "Log-prob of the policy minus the teacher's, mean over sampled tokens."),
    "actor/teacher_kl": Metric(
        "KL to the teacher", "nats", "KL over the teacher's candidates, with all other tokens as one; mean over tokens."
    ),
    "environment/turns": Metric("environment replies", "number", "Replies of the environment per response, mean."),
    "environment/seconds": Metric("environment", "seconds", "Time of the environment per response, mean."),
    "environment/errors": Metric("environment errors", "number", "Failed calls of the environment per response."),
    "environment/timeouts": Metric(
        "environment timeouts", "number", "Calls of the environment that exceeded rollout.deadline_s, per response."
    ),
    "environment/samples": Metric("samples per trajectory", "number", "Samples per agent trajectory, mean."),
    "environment/rewritten": Metric("rewritten", "share", "Samples that started because the agent changed earlier messages."),
    "environment/reward": Metric("environment reward", "number", "Result of the environment's own reward(), mean over responses."),
    "rollout_corr/kl": Metric("KL", "nats", "Estimate of KL(rollout ‖ trainer) at equal or nearly equal weights."),
    "rollout_corr/k3": Metric("KL (k3)", "nats", "Estimate of KL(rollout ‖ trainer) with the non-negative estimator k3."),
    "rollout_corr/abs_diff": Metric("|Δ log-prob|", "nats", "Mean absolute difference between trainer and rollout log-probs."),
    "rollout_corr/abs_diff_same_version": Metric(
        "same weights", "nats", "rollout_corr/abs_diff for tokens with identical weights on both sides."
    ),
    "rollout_corr/abs_diff_stale_kv": Metric(
        "stale KV cache", "nats", "rollout_corr/abs_diff for tokens sampled on a KV cache of older weights (sync.kv: keep)."
    ),
    "rollout_corr/stale_kv_fraction": Metric("stale KV cache", "share", "Trained tokens that were sampled with a cache of older weights."),
    "rollout_corr/ppl_ratio": Metric("perplexity ratio", "number", "Perplexity under the trainer over that under the rollout engine."),
    "rollout_corr/chi2": Metric("chi²", "number", "Estimate of χ²(trainer ‖ rollout)."),
    "rollout_corr/ess": Metric("effective samples", "share", "Effective sample size under importance weights, as a share of the tokens."),
    "rollout_corr/is_mean": Metric("importance weight", "number", "Mean weight of the off-policy correction."),
    "rollout_corr/masked_fraction": Metric("masked", "share", "Tokens dropped by the off-policy correction."),
    "async/staleness_mean": Metric("mean", "versions", "Weight versions between a sample's oldest token and training, mean over samples."),
    "async/staleness_max": Metric("max", "versions", "Weight versions between the oldest token of the stalest sample and training."),
    "async/staleness_tokens_mean": Metric("by token", "versions", "Weight versions between sampling and training, mean over tokens."),
    "async/staleness_updates_mean": Metric("in updates", "updates", "Updates between sampling and training, mean over tokens."),
    "async/staleness_updates_max": Metric("in updates, max", "updates", "Updates between sampling and training of the stalest token."),
    "async/asked_again": Metric("regenerated", "number", "Groups older than async.max_staleness, which are generated again."),
    "async/trainer_idle": Metric("trainer idle", "share", "Time in which the trainer waits for samples."),
    "async/rollout_idle": Metric("rollout idle", "share", "Time in which the rollout engines are idle."),
    "async/overlap": Metric("both busy", "share", "Time in which trainer and rollout engines both work."),
    "async/partial_ratio": Metric("partial rollouts", "share", "Responses that span more than one weight version."),
    "async/buffer_groups": Metric("groups waiting", "number", "Complete groups in the sample buffer."),
    "async/version": Metric("weight version", "number", "Newest weight version of the rollout engines."),
    "sync/publish_seconds": Metric("export", "seconds", "Writing the weights into the version store, before the transfer."),
    "sync/seconds": Metric("weight sync", "seconds", "Duration of a weight update."),
    "sync/stall_seconds": Metric("stalled", "seconds", "Time in which a weight update stalls generation."),
    "sync/verified": Metric("tensors verified", "number", "Tensors with equal checksums on both ends, if verified."),
    "sync/gb_per_s": Metric("sync rate", "GB/s", "Sent bytes divided by the transfer time."),
    "sync/changed_share": Metric("changed weights", "share", "Elements that changed since the previous version, with sync.delta."),
    "sync/changed_share_target": Metric("changed in the trunk", "share", "sync/changed_share of the section target."),
    "sync/changed_share_draft": Metric("changed in MTP layers", "share", "sync/changed_share of the section draft."),
    "sync/changed_share_adapter": Metric("changed in the adapter", "share", "sync/changed_share of the section adapter."),
    "logprob/wait_seconds": Metric("scored after", "seconds", "From a finished response to its old log-probs, mean over responses."),
    "logprob/tokens_per_s": Metric("log-prob server", "tokens/s", "Tokens per second of busy log-prob replicas, prompts included."),
    "logprob/stall_seconds": Metric("scoring stalled", "seconds", "Time in which weight updates stall the log-prob server."),
    "logprob/late": Metric("late scores", "number", "Requests to the log-prob server that timed out and were retried."),
    "logprob/left_to_trainer": Metric("not scored", "number", "Responses that timed out twice: the trainer computes their old log-probs."),
    "moe/load_max": Metric(
        "fullest expert", "number", "Tokens of the fullest expert divided by the mean, averaged over layers; 1: balanced."
    ),
    "moe/load_cv": Metric(
        "spread of loads", "number", "Standard deviation of tokens per expert divided by the mean, averaged over layers; 0: balanced."
    ),
    "moe/dropped": Metric("dropped", "share", "Tokens that no expert computed; always 0, because experts have no capacity limit."),
    "moe/replay_agreement": Metric(
        "replay agreement", "share", "Replayed experts that the trainer's routers select too (train.moe.replay)."
    ),
    "skipped": Metric("skipped", "share", "Optimizer steps skipped because the loss or gradient was not finite."),
    "perf/tokens_per_s": Metric("trainer", "tokens/s", "Trained tokens per second, prompts included."),
    "perf/mfu": Metric("MFU", "share", "Model FLOPs of forward and backward, divided by the time of an update and the GPUs' bf16 peak."),
    "perf/memory_allocated_gib": Metric(
        "memory in use", "GiB", "Peak memory of the trainer's tensors since its start, on the GPU that has the most."
    ),
    "perf/memory_reserved_gib": Metric(
        "memory reserved", "GiB", "Peak memory that the trainer's PyTorch holds on a GPU, unused blocks included; others cannot use it."
    ),
}

PATTERNS: list[tuple[re.Pattern[str], str, Unit, str]] = [
    (
        re.compile(r"mtp/loss_(\d+)"),
        "depth {}",
        "nats",
        "Loss of MTP depth {} (mtp.loss) per supervised token; at most 1 with tv and e2e_tv.",
    ),
    (re.compile(r"mtp/accept_(\d+)"), "depth {}", "share", "Positions at which MTP depth {} predicts the target's most likely token."),
    (
        re.compile(r"mtp/expected_accept_(\d+)"),
        "depth {}, sampled",
        "share",
        "Probability that a draft sampled from MTP depth {} is accepted, given the response's preceding tokens.",
    ),
    (
        re.compile(r"mtp/expected_accept_greedy_(\d+)"),
        "depth {}, greedy",
        "share",
        "Probability that the most likely token of MTP depth {} is accepted as the draft, given the response's preceding tokens.",
    ),
    (
        re.compile(r"mtp/expected_rate_(\d+)"),
        "position {}, sampled",
        "share",
        "Expected `rollout/spec_accept_rate_{}` with draft_method: probabilistic, from the trainer's distributions.",
    ),
    (
        re.compile(r"mtp/expected_rate_greedy_(\d+)"),
        "position {}, greedy",
        "share",
        "Expected `rollout/spec_accept_rate_{}` with draft_method: greedy.",
    ),
    (re.compile(r"rollout/spec_accept_rate_(\d+)"), "position {}", "share", "Decoding steps in which draft token {} is accepted."),
    (re.compile(r"eval/(.+/avg@\d+)"), "{}", "number", "Mean reward on a held-out set: {}."),
    (
        re.compile(r"eval/(.+/unseen_avg@\d+)"),
        "{}",
        "number",
        "Mean reward on a held-out set, for problems whose prompt no training row has: {}.",
    ),
    (
        re.compile(r"eval/(.+/pass@\d+)"),
        "{}",
        "share",
        "Estimated share of problems with a correct response among k, on a held-out set: {}.",
    ),
    (re.compile(r"reward/(.+)"), "{}", "number", "Mean of the reward part {}."),
    (re.compile(r"timing_s/(.+)"), "{}", "seconds", "Time of an update in {}."),
]


def describe(name: str) -> Metric:
    """The entry of the catalog, or one derived from the name."""
    if name in METRICS:
        return METRICS[name]
    for pattern, label, unit, meaning in PATTERNS:
        if match := pattern.fullmatch(name):
            text = match[1].replace("_", " ")
            return Metric(label.format(text), unit, meaning.format(text))
    return Metric(name, "number", "")


def format_value(value: float, unit: Unit) -> str:
    """A rounded number with its unit: 0.412 share → `41.2%`, 5123 tokens/s → `5.12k tok/s`."""
    if not math.isfinite(value):
        return "–"
    if unit == "share":
        return f"{100 * value:.1f}%"
    suffix = {"seconds": " s", "tokens/s": " tok/s", "tokens": " tok", "GB/s": " GB/s", "GiB": " GiB"}.get(unit, "")
    return f"{compact(value)}{suffix}"


def compact(value: float) -> str:
    """Two or three significant digits, with k, M, G above a thousand and powers of ten below 1/1000."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.9995:
            return f"{_rounded(value / limit)}{letter}"
    return _rounded(value)


def _rounded(value: float) -> str:
    size = abs(value)
    decimals = sum(size < limit for limit in (99.95, 9.995, 0.9995, 0.00995))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a text table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def format_duration(seconds: float) -> str:
    """`8 s`, `2 min 05 s`, `3 h 07 min`."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"
