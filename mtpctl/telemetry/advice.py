"""The usual range of a metric, and what to do outside of it: the last columns of docs/metrics.md.

`healthy` is empty where no range holds for runs in general; such a metric is read as a curve.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtpctl.telemetry.names import METRICS, PATTERNS, Unit


@dataclass(frozen=True, slots=True)
class Advice:
    """The range of a healthy run, and what to do outside of it, with the recipe keys that matter."""

    healthy: str
    act: str


ADVICE: dict[str, Advice] = {
    "reward/mean": Advice("rises", "flat: look at `reward/signal_fraction` and at responses; swings: `rl/stability`"),
    "reward/std": Advice("above 0", "0: all responses get the same, and nothing is learned; other problems, or a finer reward"),
    "reward/errors": Advice("0", "read the event that names the first; fix the reward function"),
    "reward/timeouts": Advice("0", "raise `reward.timeout_s`, or make the function faster"),
    "reward/dropped": Advice("0", "fix what `reward/errors` counts"),
    "checkpoint/copy_behind": Advice("0 or 1", "grows: the store fails, as an event says, or is slower than checkpoints are written"),
    "checkpoint/copy_failures": Advice("0", "read the event that names the first"),
    "timing_s/checkpoint_copy": Advice("below `train.checkpoint_minutes`", "raise `train.checkpoint_minutes`, or take a nearer bucket"),
    "timing_s/reward": Advice("well below a response's time", "raise `reward.workers`, or make the function `async`"),
    "timing_s/reward_wait": Advice("near 0", "raise `reward.workers`; raise `async.staleness_threshold`, so that others wait less"),
    "reward/signal_fraction": Advice(
        "0.2 to 0.8", "low: problems too easy or too hard; a warm start, other problems, a larger `train.rl.group_size`"
    ),
    "rl/stability": Advice("above 0.4", "lower `train.rl.optimizer.lr` or `async.staleness_threshold`; `train.rl.old_logprobs: auto`"),
    "response/length_mean": Advice(
        "no drift to the limit", "falls to a few tokens or grows without reward: look at responses; `train.rl.overlong`"
    ),
    "response/truncated_fraction": Advice("below 0.1", "raise `rollout.max_tokens`, or switch `train.rl.overlong` on"),
    "response/deadline_fraction": Advice("0", "raise `rollout.deadline_s`, or lower `rollout.max_in_flight`"),
    "eval/accuracy": Advice("rises with the reward", "reward rises alone: the policy exploits the checker, or there are few problems"),
    "eval/reward_errors": Advice("0", "as for `reward/errors`"),
    "eval/truncated_fraction": Advice("below 0.1", "raise `rollout.max_tokens`"),
    "eval/deadline_fraction": Advice("0", "raise `rollout.deadline_s`"),
    "eval/mixed_fraction": Advice(
        "0 with `evaluation.wait: true`", "high: a sync met the evaluation; `evaluation.wait: true`, or fewer problems"
    ),
    "eval/spec_accept_rate": Advice("as `rollout/spec_accept_rate`", "far lower: held-out problems are unlike those of training"),
    "sft/loss": Advice("falls", "flat: raise `train.sft.optimizer.lr`; rises: lower it"),
    "actor/entropy": Advice(
        "falls slowly, stays above 0", "collapses: raise `train.rl.clip_high` or `train.rl.entropy_coef`; grows: lower the learning rate"
    ),
    "actor/grad_norm": Advice("no jumps", "often above `optimizer.clip_grad`: lower `train.rl.optimizer.lr`"),
    "actor/ratio_mean": Advice("0.95 to 1.05", "farther off: samples too stale, or the learning rate too high"),
    "actor/ppo_kl": Advice("below 0.05", "lower the learning rate or `train.rl.minibatches`"),
    "actor/ref_kl": Advice("grows slowly", "grows fast: raise `train.rl.kl_coef`"),
    "actor/clip_fraction_low": Advice("below 0.1", "samples too stale: lower `async.staleness_threshold`, or the learning rate"),
    "actor/clip_fraction_high": Advice("below 0.1", "the same; it is 0 on policy with `minibatches: 1`"),
    "actor/gate": Advice("near 1", "low: samples too stale, or the learning rate too high"),
    "mtp/grad_norm": Advice("no jumps", "lower `optimizer.mtp_lr`"),
    "mtp/loss_N": Advice("falls smoothly", "flat: raise `optimizer.mtp_lr`; jumps: lower it"),
    "mtp/expected_accept_N": Advice("rises; `mtp.loss: tv` raises it directly", "flat: raise `optimizer.mtp_lr`"),
    "mtp/expected_accept_greedy_N": Advice(
        "", "far above the line before it: `rollout.speculation.draft_method: greedy` is the better one here, far below: `probabilistic`"
    ),
    "mtp/expected_rate_N": Advice(
        "within a point or two of `rollout/spec_accept_rate_N` as drafted",
        "above what is served: the drafter is not synced, samples are stale, or `top_p` and `top_k` cut the target",
    ),
    "mtp/accept_N": Advice("rises, and lower with each depth", "near 0: train the head in the supervised stage"),
    "rollout/spec_accept_rate": Advice(
        "does not fall at a sync", "falls: `sync.sections` without `draft`; near 0: the head is untrained ([MTP training](mtp-training.md))"
    ),
    "rollout/spec_accept_rate_N": Advice("lower with each position", "near 0 at the last: lower `rollout.speculation.num_tokens`"),
    "rollout/spec_accept_length": Advice("above 1.3", "lower: drafts do not pay; `rollout.speculation.auto`, or `num_tokens: 0`"),
    "rollout/spec_drafts": Advice("", "0: drafts do not pay at this load, which `auto` has measured"),
    "rollout/tokens_per_s": Advice("steady", "falls with longer responses: the tail; see [async tuning](async-tuning.md#long-tails)"),
    "environment/errors": Advice("0", "the event names class and line; fix it"),
    "environment/timeouts": Advice("0", "raise `rollout.deadline_s`, or make the environment faster"),
    "environment/seconds": Advice("well below a response's time", "make its methods `async`, or its tool faster"),
    "rollout_corr/kl": Advice("grows with staleness alone", "on policy above 0.01: `rollout_corr/abs_diff_same_version`"),
    "rollout_corr/abs_diff_same_version": Advice(
        "below 0.02 in bf16, 1e-4 in fp32", "`train.precision: fp32` tells precision from a bug; `mtpctl doctor`"
    ),
    "rollout_corr/ppl_ratio": Advice("0.98 to 1.02", "as for the line above, or samples too stale"),
    "rollout_corr/ess": Advice("above 0.5", "lower `async.staleness_threshold`; `train.rl.correction.mode: truncate`"),
    "rollout_corr/is_mean": Advice("near 1", "samples too stale: lower `async.staleness_threshold`"),
    "rollout_corr/masked_fraction": Advice("below 0.05", "widen `train.rl.correction`, or lower `async.staleness_threshold`"),
    "async/staleness_max": Advice("at most `async.max_staleness`", ""),
    "async/asked_again": Advice("a small share of the groups", "raise `async.max_staleness`, or shorten the tail"),
    "async/trainer_idle": Advice("below 0.1", "rollout is the bottleneck: more `rollout.replicas`, speculation, fewer trainer cards"),
    "async/rollout_idle": Advice(
        "below 0.1", "the trainer is the bottleneck: more `train.parallel.dp`, larger `train.tokens_per_microbatch`"
    ),
    "async/overlap": Advice("above 0.8", "both idle: raise `async.staleness_threshold`, `async.partial_rollout: true`"),
    "async/buffer_groups": Advice("above 0, no growth", "always 0: the trainer waits; see `async/trainer_idle`"),
    "sync/seconds": Advice("a small part of `timing_s/step`", "raise `async.sync_every`; see [weight sync](weight-sync.md)"),
    "sync/stall_seconds": Advice("a small part of `timing_s/step`", "the same"),
    "sync/gb_per_s": Advice("near the link's", "`mtpctl bench sync-weights` measures transports"),
    "logprob/wait_seconds": Advice("below a response's time", "raise `logprob.replicas` or `logprob.tokens_per_batch`"),
    "logprob/late": Advice("0", "raise `logprob.replicas`"),
    "logprob/left_to_trainer": Advice("0", "raise `logprob.replicas`"),
    "moe/replay_agreement": Advice(
        "above 0.95, falls with staleness",
        "lower on policy: `mtpctl doctor`; see [router replay](router-replay.md)",
    ),
    "skipped": Advice("0", "lower `lr`; after `train.max_bad_steps` in a row the run stops"),
    "perf/mfu": Advice(
        "0.4 to 0.5, as measured for a 7B on H200s of its own", "low: larger `train.tokens_per_microbatch`, less `train.recompute`, less tp"
    ),
    "timing_s/NAME": Advice("", "`step` is the whole update; the largest part is where to begin"),
}
"""By the name of a metric, or by that of a pattern as `listed` gives it."""


def listed() -> list[tuple[str, Unit, str, Advice]]:
    """Every metric of the catalogue with unit, meaning and advice, patterns after the metrics; `N` and `NAME` stand for what varies."""
    rows = [(name, metric.unit, metric.meaning) for name, metric in METRICS.items()]
    for pattern, _, unit, meaning in PATTERNS:
        name = pattern.pattern.replace(r"(\d+)", "N").replace(r"(.+/avg@\d+)", "NAME/avg@N").replace(r"(.+/pass@\d+)", "NAME/pass@N")
        name = name.replace("(.+)", "NAME")
        rows.append((name, unit, meaning.format("N" if name.endswith("N") and "@" not in name else "NAME")))
    return [(name, unit, meaning, ADVICE.get(name, Advice("", ""))) for name, unit, meaning in rows]
