"""The catalogue of metrics: the label, unit and meaning of each name.

Names follow those of other frameworks, verl's above all, so that their dashboards and scripts work here. A metric that is not in the
catalogue is logged and shown under its own name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "seconds", "tokens/s", "nats", "tokens", "GB/s", "versions", "updates", "number"]


@dataclass(frozen=True, slots=True)
class Metric:
    """How one metric is shown. The unit `share` is a fraction of 1, shown as per cent."""

    label: str
    unit: Unit
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "number", "Mean reward of the batch's responses; an agent's trajectory counts as one response."),
    "reward/unfiltered_mean": Metric(
        "reward, unfiltered", "number", "The mean over all groups completed since the last update, including dropped ones."
    ),
    "reward/std": Metric("reward std", "number", "Standard deviation of the rewards in reward/mean."),
    "reward/errors": Metric(
        "rewards failed", "number", "Calls of the reward function that failed since the last update, late ones included."
    ),
    "reward/timeouts": Metric("rewards too late", "number", "Of these, those that took longer than reward.timeout_s."),
    "reward/dropped": Metric("left out", "number", "Groups left out for a reward that failed (reward.on_error: drop)."),
    "checkpoint/copy_behind": Metric(
        "not copied", "number", "Checkpoints written since the newest one that is in train.checkpoint_copy; 0: it has the newest."
    ),
    "checkpoint/copy_failures": Metric("failed", "number", "Tries to copy a checkpoint that failed since the last update."),
    "timing_s/checkpoint_copy": Metric("copy", "seconds", "Copying a checkpoint to train.checkpoint_copy, beside training."),
    "timing_s/reward": Metric("a reward", "seconds", "From a finished response to its reward, mean over responses."),
    "timing_s/reward_wait": Metric(
        "wait for rewards", "seconds", "Time of an update in which trainer and engines waited for rewards alone."
    ),
    "reward/signal_fraction": Metric("with signal", "share", "Groups whose rewards are not all equal."),
    "rl/stability": Metric("stability", "share", "What sampling explains of the reward's scatter about its trend; low: it swings."),
    "response/length_mean": Metric("response length", "tokens", "Mean response length."),
    "response/length_max": Metric("longest response", "tokens", "Longest response of the batch."),
    "response/truncated_fraction": Metric("cut off", "share", "Responses that reached the token limit."),
    "response/deadline_fraction": Metric("cut by time", "share", "Responses that rollout.deadline_s cut."),
    "eval/accuracy": Metric("held-out accuracy", "share", "Held-out problems whose final answer is right."),
    "eval/reward_errors": Metric("held-out rewards failed", "number", "Held-out responses whose reward failed, and counts as 0."),
    "eval/problems": Metric("held-out problems", "number", "Held-out problems that the accuracy is over."),
    "eval/length_mean": Metric("held-out length", "tokens", "Mean response length on held-out problems."),
    "eval/truncated_fraction": Metric("held-out cut off", "share", "Responses on held-out problems that reached the token limit."),
    "eval/deadline_fraction": Metric("held-out cut by time", "share", "Responses on held-out problems that rollout.deadline_s cut."),
    "eval/version": Metric("held-out version", "versions", "Weight version that the engines had when the evaluation began."),
    "eval/mixed_fraction": Metric("held-out mixed", "share", "Held-out responses with a token of another version than the first."),
    "eval/spec_accept_rate": Metric("held-out acceptance", "share", "Draft tokens accepted on held-out problems."),
    "sft/loss": Metric("SFT loss", "nats", "Cross-entropy of the supervised stage, per supervised token."),
    "actor/pg_loss": Metric("policy loss", "number", "Surrogate loss, mean over tokens, or over trajectories with aggregate: sequence."),
    "actor/entropy": Metric("entropy", "nats", "Mean entropy of the policy that is updated, at the response's tokens."),
    "actor/grad_norm": Metric("trunk", "number", "Gradient norm of the trunk, before clipping."),
    "actor/ratio_mean": Metric("ratio", "number", "Mean of new over old probability."),
    "actor/ppo_kl": Metric("KL to old", "nats", "Estimate of KL(old ‖ new) within an update."),
    "actor/ref_kl": Metric("KL to reference", "nats", "Estimate of KL(policy ‖ reference)."),
    "actor/clip_fraction_low": Metric("clipped low", "share", "Tokens whose ratio was clipped below."),
    "actor/clip_fraction_high": Metric("clipped high", "share", "Tokens whose ratio was clipped above."),
    "actor/clip_fraction_dual": Metric("dual-clipped", "share", "Tokens under the dual clip."),
    "actor/gate": Metric("soft gate", "share", "Mean gradient that SAPO's gate lets through; 1 on policy."),
    "actor/lr": Metric("learning rate", "number", "Learning rate of the trunk."),
    "mtp/grad_norm": Metric("MTP layers", "number", "Gradient norm of the MTP layers, before clipping."),
    "rollout/spec_accept_rate": Metric("drafts accepted", "share", "Draft tokens that the target accepted while generating."),
    "rollout/spec_accept_length": Metric("tokens a step", "tokens", "Tokens that one decoding step yields, the sampled one included."),
    "rollout/spec_drafts": Metric("drafts a step", "tokens", "Draft tokens a step that the engines chose (rollout.speculation.auto)."),
    "rollout/spec_drafted": Metric("drafted", "tokens", "Draft tokens proposed for the batch's responses."),
    "rollout/spec_accepted": Metric("accepted", "tokens", "Draft tokens of those that the target accepted."),
    "rollout/prefix_cache_hit_rate": Metric("prompts cached", "share", "Prompt tokens that were in vLLM's prefix cache."),
    "rollout/tokens_per_s": Metric("rollout", "tokens/s", "Response tokens a second of all engines together, held-out ones included."),
    "rollout/replicas": Metric("replicas", "number", "Rollout engines that served at the sync."),
    "teacher/kl": Metric("KL to the teacher", "nats", "Log-prob of the policy less the teacher's, mean over the tokens that it sampled."),
    "actor/teacher_kl": Metric("KL to the teacher", "nats", "KL over the teacher's candidates and all else as one, mean over tokens."),
    "environment/turns": Metric("environment replies", "number", "Replies of the environment in a response, mean over responses."),
    "environment/seconds": Metric("environment", "seconds", "Time that the environment took in a response, mean over responses."),
    "environment/errors": Metric("environment errors", "number", "Calls of the environment that failed, a response."),
    "environment/timeouts": Metric("environment too late", "number", "Calls of it that outlasted rollout.deadline_s, a response."),
    "environment/samples": Metric("samples a trajectory", "number", "Samples that an agent's trajectory became, mean over trajectories."),
    "environment/rewritten": Metric("rewritten", "share", "Share of the samples that began because the agent had changed what was said."),
    "environment/reward": Metric("environment reward", "number", "What the environment's own reward() gave, mean over responses."),
    "rollout_corr/kl": Metric("KL", "nats", "Estimate of KL(rollout ‖ trainer) at equal weights or nearly so."),
    "rollout_corr/k3": Metric("KL (k3)", "nats", "The same, by the estimator that is never negative."),
    "rollout_corr/abs_diff": Metric("|Δ log-prob|", "nats", "Mean absolute difference of trainer and rollout log-probs."),
    "rollout_corr/abs_diff_same_version": Metric("same weights", "nats", "The same, where both had the very same weights."),
    "rollout_corr/ppl_ratio": Metric("perplexity ratio", "number", "Perplexity under the trainer over that under the rollout engine."),
    "rollout_corr/chi2": Metric("chi²", "number", "Estimate of χ²(trainer ‖ rollout)."),
    "rollout_corr/ess": Metric("effective samples", "share", "Effective share of the tokens under importance weights."),
    "rollout_corr/is_mean": Metric("importance weight", "number", "Mean weight of the off-policy correction."),
    "rollout_corr/masked_fraction": Metric("masked", "share", "Tokens that the off-policy correction dropped."),
    "async/staleness_mean": Metric("mean", "versions", "Weight versions between a sample's oldest token and training, mean over samples."),
    "async/staleness_max": Metric("max", "versions", "The same, of the stalest sample."),
    "async/staleness_tokens_mean": Metric("by token", "versions", "Weight versions between sampling and training, mean over tokens."),
    "async/staleness_updates_mean": Metric("in updates", "updates", "Updates between sampling and training, mean over tokens."),
    "async/staleness_updates_max": Metric("in updates, max", "updates", "The same, of the stalest token."),
    "async/asked_again": Metric("asked again", "number", "Groups given up as older than async.max_staleness, and asked for again."),
    "async/trainer_idle": Metric("trainer idle", "share", "Time that the trainer waited for samples."),
    "async/rollout_idle": Metric("rollout idle", "share", "Time that the rollout engines had nothing to do."),
    "async/overlap": Metric("both busy", "share", "Time in which trainer and rollout engines worked at once."),
    "async/partial_ratio": Metric("partial rollouts", "share", "Responses that span more than one weight version."),
    "async/buffer_groups": Metric("groups waiting", "number", "Complete groups that wait in the sample buffer."),
    "async/version": Metric("weight version", "number", "Weight version that rollout was last given."),
    "sync/publish_seconds": Metric("export", "seconds", "Writing the weights into the version store, before the transfer."),
    "sync/seconds": Metric("weight sync", "seconds", "From the begin of a weight update to its end."),
    "sync/stall_seconds": Metric("stalled", "seconds", "Time that generation stood still for a weight update."),
    "sync/verified": Metric("tensors verified", "number", "Tensors whose checksums agreed on both ends, where they are compared."),
    "sync/gb_per_s": Metric("sync rate", "GB/s", "Weight bytes over the time of the transfer."),
    "logprob/wait_seconds": Metric("scored after", "seconds", "From a finished response to its old log-probs, mean over responses."),
    "logprob/tokens_per_s": Metric("log-prob server", "tokens/s", "Tokens over the time that log-prob replicas worked, prompts included."),
    "logprob/stall_seconds": Metric("scoring stalled", "seconds", "Time that the log-prob server stood still for weight updates."),
    "logprob/late": Metric("late scores", "number", "Answers of the log-prob server that were late, and asked for again."),
    "logprob/left_to_trainer": Metric("not scored", "number", "Responses that were late again: the trainer computes their old log-probs."),
    "moe/load_max": Metric("fullest expert", "number", "Rows of the fullest expert over the mean expert's, mean over layers; 1: even."),
    "moe/load_cv": Metric("spread of loads", "number", "Standard deviation of experts' rows over their mean, mean over layers; 0: even."),
    "moe/dropped": Metric("dropped", "share", "Rows that no expert computed; 0, since none has a limit."),
    "moe/replay_agreement": Metric(
        "own choice",
        "share",
        "Replayed experts that the trainer's routers would have chosen too (train.moe.replay).",
    ),
    "skipped": Metric("skipped", "share", "Optimizer steps of the update left out, for a loss or gradient that was not finite."),
    "perf/tokens_per_s": Metric("trainer", "tokens/s", "Tokens trained a second, prompts included."),
    "perf/mfu": Metric("MFU", "share", "Model FLOP/s of forward, backward and optimizer over the cards' bf16 peak."),
}

PATTERNS: list[tuple[re.Pattern[str], str, Unit, str]] = [
    (re.compile(r"mtp/loss_(\d+)"), "depth {}", "nats", "Loss of MTP depth {} (mtp.loss), per supervised token; 1 at most with tv."),
    (re.compile(r"mtp/accept_(\d+)"), "depth {}", "share", "Positions where MTP depth {} names the target's own first choice."),
    (
        re.compile(r"mtp/expected_accept_(\d+)"),
        "depth {}, sampled",
        "share",
        "Chance that a draft of MTP depth {} is accepted, sampled from the head, where the tokens before it are the response's own.",
    ),
    (re.compile(r"mtp/expected_accept_greedy_(\d+)"), "depth {}, greedy", "share", "The same where the head's first choice is drafted."),
    (
        re.compile(r"mtp/expected_rate_(\d+)"),
        "position {}, sampled",
        "share",
        "`rollout/spec_accept_rate_{}` to expect with draft_method: probabilistic, from the trainer's own distributions.",
    ),
    (re.compile(r"mtp/expected_rate_greedy_(\d+)"), "position {}, greedy", "share", "The same with draft_method: greedy."),
    (re.compile(r"rollout/spec_accept_rate_(\d+)"), "position {}", "share", "Decoding steps whose draft token {} was accepted."),
    (re.compile(r"eval/(.+/avg@\d+)"), "{}", "number", "Mean reward on a held-out set: {}."),
    (re.compile(r"eval/(.+/pass@\d+)"), "{}", "share", "Problems of a held-out set with a right one among k responses, estimated: {}."),
    (re.compile(r"reward/(.+)"), "{}", "number", "Mean of the part that the reward function calls {}."),
    (re.compile(r"timing_s/(.+)"), "{}", "seconds", "Seconds of an update spent in {}."),
]


def describe(name: str) -> Metric:
    """The entry of the catalogue, or one made from the name itself."""
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
    suffix = {"seconds": " s", "tokens/s": " tok/s", "tokens": " tok", "GB/s": " GB/s"}.get(unit, "")
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


def format_duration(seconds: float) -> str:
    """`8 s`, `2 min 05 s`, `3 h 07 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
