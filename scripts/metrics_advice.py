"""The usual range of each metric, and what to do outside of it: the last two columns of docs/metrics.md."""

from __future__ import annotations

from dataclasses import dataclass

from mtpctl.telemetry.names import METRICS, PATTERNS, Unit


@dataclass(frozen=True, slots=True)
class Advice:
    """`healthy`: the range in a healthy run; empty if there is none. `act`: what to do outside of it, with the recipe keys."""

    healthy: str
    act: str


ADVICE: dict[str, Advice] = {
    "reward/mean": Advice("rises", "flat: check `reward/signal_fraction` and the responses; oscillates: `rl/stability`"),
    "reward/std": Advice("above 0", "0: all rewards are equal, and nothing is learned; use other problems, or a finer reward"),
    "reward/errors": Advice("0", "read the event with the first error; fix the reward function"),
    "reward/timeouts": Advice("0", "raise `reward.timeout_s`, or make the function faster"),
    "reward/dropped": Advice("0", "fix the errors in `reward/errors`"),
    "checkpoint/copy_behind": Advice("0 or 1", "grows: the store fails (see the event), or is slower than checkpoints are written"),
    "checkpoint/copy_failures": Advice("0", "read the event with the first failure"),
    "timing_s/checkpoint_copy": Advice("below `train.checkpoint_minutes`", "raise `train.checkpoint_minutes`, or use a closer bucket"),
    "timing_s/reward": Advice("well below the time of a response", "raise `reward.workers`, or make the function `async`"),
    "timing_s/reward_wait": Advice("near 0", "raise `reward.workers`, or `async.staleness_threshold`"),
    "reward/signal_fraction": Advice(
        "0.2 to 0.8", "low: problems are too easy or too hard; use a warm start, other problems, or a larger `train.rl.group_size`"
    ),
    "rl/stability": Advice("above 0.4", "lower `train.rl.optimizer.lr` or `async.staleness_threshold`; `train.rl.old_logprobs: auto`"),
    "response/length_mean": Advice(
        "no drift to the limit", "falls to a few tokens, or grows without reward: read responses; enable `train.rl.overlong`"
    ),
    "response/truncated_fraction": Advice("below 0.1", "raise `rollout.max_tokens`, or enable `train.rl.overlong`"),
    "response/deadline_fraction": Advice("0", "raise `rollout.deadline_s`, or lower `rollout.max_in_flight`"),
    "eval/accuracy": Advice(
        "rises with the reward", "only the reward rises: the policy exploits the reward, or there are too few problems"
    ),
    "eval/unseen_accuracy": Advice(
        "rises with `eval/accuracy`", "stays behind: the model memorizes; use more, or more varied, training rows ([data](data.md))"
    ),
    "eval/reward_errors": Advice("0", "see `reward/errors`"),
    "eval/truncated_fraction": Advice("below 0.1", "raise `rollout.max_tokens`"),
    "eval/deadline_fraction": Advice("0", "raise `rollout.deadline_s`"),
    "eval/mixed_fraction": Advice(
        "0 with `evaluation.wait: true`", "high: a sync happened during the evaluation; `evaluation.wait: true`, or fewer problems"
    ),
    "eval/spec_accept_rate": Advice("as `rollout/spec_accept_rate`", "far lower: held-out problems differ from the training problems"),
    "sft/loss": Advice("falls", "flat: raise `train.sft.optimizer.lr`; rises: lower it"),
    "mtp/trunk_nll": Advice(
        "near the entropy of the samples", "far above it: the samples are not the model's, or have another `rollout.temperature`"
    ),
    "actor/entropy": Advice(
        "falls slowly, stays above 0", "collapses: raise `train.rl.clip_high` or `train.rl.entropy_coef`; grows: lower the learning rate"
    ),
    "actor/grad_norm": Advice("no jumps", "often above `optimizer.clip_grad`: lower `train.rl.optimizer.lr`"),
    "actor/ratio_mean": Advice("0.95 to 1.05", "outside: samples are too stale, or the learning rate is too high"),
    "actor/ppo_kl": Advice("below 0.05", "lower the learning rate or `train.rl.minibatches`"),
    "actor/ref_kl": Advice("grows slowly", "grows fast: raise `train.rl.kl_coef`"),
    "actor/clip_fraction_low": Advice("below 0.1", "samples are too stale: lower `async.staleness_threshold`, or the learning rate"),
    "actor/clip_fraction_high": Advice("below 0.1", "the same; 0 on policy with `minibatches: 1`"),
    "actor/gate": Advice("near 1", "low: samples are too stale, or the learning rate is too high"),
    "mtp/grad_norm": Advice("no jumps", "lower `optimizer.mtp_lr`"),
    "mtp/loss_N": Advice("falls smoothly", "flat: raise `optimizer.mtp_lr`; jumps: lower it"),
    "mtp/expected_accept_N": Advice("rises; `mtp.loss: tv` optimizes it directly", "flat: raise `optimizer.mtp_lr`"),
    "mtp/expected_accept_greedy_N": Advice(
        "", "far above `mtp/expected_accept_N`: use `rollout.speculation.draft_method: greedy`; far below: use `probabilistic`"
    ),
    "mtp/expected_rate_N": Advice(
        "within one or two points of `rollout/spec_accept_rate_N`",
        "higher than measured: the drafter is not synced, samples are stale, or `top_p` and `top_k` cut the target",
    ),
    "mtp/accept_N": Advice("rises; lower with depth", "near 0: train the head in the supervised stage"),
    "rollout/spec_accept_rate": Advice(
        "does not fall at a sync", "falls: `sync.sections` without `draft`; near 0: the head is untrained ([MTP training](mtp-training.md))"
    ),
    "rollout/spec_accept_rate_N": Advice("lower with position", "near 0 at the last: lower `rollout.speculation.num_tokens`"),
    "rollout/spec_accept_length": Advice("above 1.3", "lower: drafts do not pay off; use `rollout.speculation.auto`, or `num_tokens: 0`"),
    "rollout/spec_drafts": Advice("", "0: `auto` measured that drafts do not pay off at this load"),
    "rollout/tokens_per_s": Advice("steady", "falls as responses grow: see [async tuning](async-tuning.md#long-tails)"),
    "environment/errors": Advice("0", "fix the class and line in the event"),
    "environment/timeouts": Advice("0", "raise `rollout.deadline_s`, or make the environment faster"),
    "environment/seconds": Advice("well below the time of a response", "make its methods `async`, or its tools faster"),
    "rollout_corr/kl": Advice("grows only with staleness", "on policy above 0.01: `rollout_corr/abs_diff_same_version`"),
    "rollout_corr/abs_diff_same_version": Advice(
        "below 0.02 in bf16, 1e-4 in fp32", "`train.precision: fp32` separates rounding from bugs; `mtpctl doctor`"
    ),
    "rollout_corr/abs_diff_stale_kv": Advice(
        "grows with the learning rate", "far above `rollout_corr/abs_diff_same_version`: set `sync.kv: recompute`"
    ),
    "rollout_corr/stale_kv_fraction": Advice("", "high: responses are long compared with `async.sync_every`"),
    "rollout_corr/ppl_ratio": Advice("0.98 to 1.02", "as for `rollout_corr/abs_diff_same_version`, or samples are too stale"),
    "rollout_corr/ess": Advice("above 0.5", "lower `async.staleness_threshold`; `train.rl.correction.mode: truncate`"),
    "rollout_corr/is_mean": Advice("near 1", "samples are too stale: lower `async.staleness_threshold`"),
    "rollout_corr/masked_fraction": Advice("below 0.05", "widen `train.rl.correction`, or lower `async.staleness_threshold`"),
    "async/staleness_max": Advice("at most `async.max_staleness`", ""),
    "async/asked_again": Advice("a small share of the groups", "raise `async.max_staleness`, or limit long responses"),
    "async/trainer_idle": Advice("below 0.1", "rollout is the bottleneck: more `rollout.replicas`, speculation, fewer trainer GPUs"),
    "async/rollout_idle": Advice(
        "below 0.1", "the trainer is the bottleneck: more `train.parallel.dp`, larger `train.tokens_per_microbatch`"
    ),
    "async/overlap": Advice("above 0.8", "both idle: raise `async.staleness_threshold`, `async.partial_rollout: true`"),
    "async/buffer_groups": Advice("above 0, no growth", "always 0: the trainer waits; see `async/trainer_idle`"),
    "sync/seconds": Advice("a small part of `timing_s/step`", "raise `async.sync_every`; see [weight sync](weight-sync.md)"),
    "sync/stall_seconds": Advice("a small part of `timing_s/step`", "the same"),
    "sync/changed_share": Advice("0.005 to 0.05 in bf16", "near 1 in fp32, where `sync.delta` saves nothing: set it to false"),
    "sync/gb_per_s": Advice("near the link's bandwidth", "`mtpctl bench sync-weights` measures transports"),
    "logprob/wait_seconds": Advice("below the time of a response", "raise `logprob.replicas` or `logprob.tokens_per_batch`"),
    "logprob/late": Advice("0", "raise `logprob.replicas`"),
    "logprob/left_to_trainer": Advice("0", "raise `logprob.replicas`"),
    "moe/replay_agreement": Advice(
        "above 0.95, falls with staleness", "lower on policy: `mtpctl doctor`; see [router replay](router-replay.md)"
    ),
    "skipped": Advice("0", "lower `lr`; the run stops after `train.max_bad_steps` in a row"),
    "perf/mfu": Advice(
        "0.4 to 0.5, measured for a 7B on its own H200s", "low: larger `train.tokens_per_microbatch`, less `train.recompute`, less tp"
    ),
    "perf/memory_allocated_gib": Advice(
        "within 10% of what `mtpctl train --dry-run` prints",
        "high: smaller `train.tokens_per_microbatch`, `train.recompute`, `train.offload`",
    ),
    "timing_s/NAME": Advice("", "`step` is the whole update; start with the largest part"),
}
"""By the name of a metric, or of a pattern as `listed` returns it."""


def listed() -> list[tuple[str, Unit, str, Advice]]:
    """All metrics with unit, meaning and advice, patterns last; `N` and `NAME` are the variable parts of a pattern."""
    rows = [(name, metric.unit, metric.meaning) for name, metric in METRICS.items()]
    for pattern, _, unit, meaning in PATTERNS:
        name = pattern.pattern.replace(r"(\d+)", "N").replace(r"(.+/avg@\d+)", "NAME/avg@N").replace(r"(.+/pass@\d+)", "NAME/pass@N")
        name = name.replace(r"(.+/unseen_avg@\d+)", "NAME/unseen_avg@N")
        name = name.replace("(.+)", "NAME")
        rows.append((name, unit, meaning.format("N" if name.endswith("N") and "@" not in name else "NAME")))
    return [(name, unit, meaning, ADVICE.get(name, Advice("", ""))) for name, unit, meaning in rows]
