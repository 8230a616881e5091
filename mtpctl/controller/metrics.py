"""Metrics of the samples of one update."""

from __future__ import annotations

import statistics

from mtpctl.rollout.protocol import DEADLINE
from mtpctl.samples import Sample


def speculation(samples: list[Sample]) -> dict[str, float]:
    """`rollout/spec_*`: accepted share of the draft tokens, in all and by position, and tokens a decoding step. Empty without drafts."""
    drafted = sum(s.speculation.drafted for s in samples)
    steps = sum(s.speculation.steps for s in samples)
    if not drafted:
        return {}
    accepted = sum(s.speculation.accepted for s in samples)
    metrics = {
        "rollout/spec_accept_rate": accepted / drafted,
        "rollout/spec_drafted": float(drafted),
        "rollout/spec_accepted": float(accepted),
    }
    if steps:
        metrics["rollout/spec_accept_length"] = 1 + accepted / steps
        positions = max(len(s.speculation.accepted_by_position) for s in samples)
        for k in range(positions):
            hits = sum(s.speculation.accepted_by_position[k] for s in samples if k < len(s.speculation.accepted_by_position))
            metrics[f"rollout/spec_accept_rate_{k + 1}"] = hits / steps
    return metrics


def prefix_cache(samples: list[Sample]) -> dict[str, float]:
    """`rollout/prefix_cache_hit_rate`: share of prompt tokens that were in the engines' prefix cache. Empty without a prefix cache."""
    cached = [(sample.cached_tokens, len(sample.prompt_ids)) for sample in samples if sample.cached_tokens is not None]
    tokens = sum(length for _, length in cached)
    return {"rollout/prefix_cache_hit_rate": sum(hits for hits, _ in cached) / tokens} if tokens else {}


def reward_parts(samples: list[Sample]) -> dict[str, float]:
    """`reward/<part>`: the mean of each part over the trajectories whose reward came with it."""
    names = dict.fromkeys(name for sample in samples for name in sample.reward_parts)
    return {f"reward/{name}": statistics.fmean(s.reward_parts[name] for s in samples if name in s.reward_parts) for name in names}


def cut_share(samples: list[Sample], reason: str) -> float:
    """Share of responses that ended for `reason`. An agent's trajectory counts by its last sample."""
    return sum(sample.finish_reason == reason for sample in samples) / len(samples)


def environment_use(samples: list[Sample]) -> dict[str, float]:
    """`environment/*`: replies, seconds, errors and timeouts of the environment, means over responses. Empty without one."""
    uses = [sample.environment for sample in samples if sample.environment is not None]
    if not uses:
        return {}
    metrics = {
        "environment/turns": statistics.fmean(use.turns for use in uses),
        "environment/seconds": statistics.fmean(use.seconds for use in uses),
        "environment/errors": statistics.fmean(use.errors for use in uses),
        "environment/timeouts": statistics.fmean(use.timeouts for use in uses),
    }
    if became := sum(use.samples for use in uses):  # of agents
        metrics["environment/samples"] = became / len(uses)
        metrics["environment/rewritten"] = sum(use.rewritten for use in uses) / became
    if rewards := [sample.environment_reward for sample in samples if sample.environment_reward is not None]:
        metrics["environment/reward"] = statistics.fmean(rewards)
    return metrics


def teacher_kl(samples: list[Sample]) -> dict[str, float]:
    """`teacher/kl`: the mean over sampled tokens of the policy's log-prob less the teacher's, an estimate of the KL. Empty without one."""
    taught = [(sample, sample.teacher_logprobs) for sample in samples if sample.teacher_logprobs is not None]
    if not taught:
        return {}
    import numpy as np

    apart = 0.0
    for sample, logprobs in taught:
        mask = np.asarray(sample.loss_mask, np.float32)
        apart += float(np.dot(mask, np.asarray(sample.behaviour_logprobs) - np.asarray(logprobs)))
    return {"teacher/kl": apart / max(sum(sample.sampled for sample, _ in taught), 1)}


def of_trajectories(trajectories: list[Sample], version: int, sync_every: int = 1, ahead: int = 0) -> dict[str, float]:
    """Reward, length and staleness of one update, from its trajectories: each its last sample, with the others in `earlier`.

    Rewards and finish reasons count once per trajectory. Lengths, staleness and speculation include all samples.

    `version` was published last, `ahead` updates before this one; versions are published every `sync_every` updates. Staleness in versions
    is from the version that sampled a token to `version`. Staleness in updates adds `ahead`, and takes each version as `sync_every`
    updates, which is too many for a version that a resumed run published between two syncs.
    """
    samples = [part for trajectory in trajectories for part in trajectory.parts]
    rewards = [trajectory.reward or 0.0 for trajectory in trajectories]
    lengths = [len(s.response_ids) for s in samples]
    staleness = [version - min((span.version for span in s.version_spans), default=version) for s in samples]
    ages = [(span.end - span.start, version - span.version) for s in samples for span in s.version_spans]
    by_token = sum(tokens * age for tokens, age in ages) / max(sum(tokens for tokens, _ in ages), 1)
    partial = sum(len(s.version_spans) > 1 for s in samples)
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_fraction": cut_share(trajectories, "length"),
        "response/deadline_fraction": cut_share(trajectories, DEADLINE),
        "async/staleness_mean": sum(staleness) / len(staleness),
        "async/staleness_max": float(max(staleness)),
        "async/staleness_tokens_mean": by_token,
        "async/staleness_updates_mean": ahead + sync_every * by_token,
        "async/staleness_updates_max": float(ahead + sync_every * max(staleness)),
        "async/partial_ratio": partial / len(samples),
    }
    metrics |= teacher_kl(samples) | reward_parts(trajectories) | speculation(samples) | prefix_cache(samples)
    return metrics | environment_use(trajectories)
