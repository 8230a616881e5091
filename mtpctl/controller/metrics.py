"""Records of the RL loop: metrics of the samples of an update, statistics of groups, busy times, and some samples as text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

from mtpctl.controller.buffer import Group
from mtpctl.data.problems import Problem
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.rollout.protocol import DEADLINE, SpecStats
from mtpctl.samples import Sample
from mtpctl.telemetry.sample_log import sample_row, spaced_by_reward
from mtpctl.telemetry.session import Telemetry

MIN_REWARD_DIFFERENCE = 1e-6
"""Rewards that differ by at most this much count as equal."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group, before the overlong penalty, differ. Dynamic sampling replaces groups whose rewards are equal.

    DAPO (arXiv 2503.14476, section 3.2) requires an accuracy strictly between 0 and 1.
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) > MIN_REWARD_DIFFERENCE


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k from `n` responses of which `correct` are correct, for 1 ≤ k ≤ n.

    Chen et al. 2021 (arXiv 2107.03374), formula 1: 1 - C(n - c, k) / C(n, k), computed as a product so that no binomial overflows.
    Raises ValueError for other k.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} is undefined for {n} responses")
    if n - correct < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def pass_at_k_values(n: int) -> list[int]:
    """The values of k that are reported for n responses: powers of two, and n."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})


def mean_pass_at_k(correct_counts: Sequence[int], n: int) -> dict[int, float]:
    """pass@k averaged over problems, for each k of `pass_at_k_values(n)`. `correct_counts`: correct responses of each problem, out of n."""
    return {k: sum(pass_at_k(n, count, k) for count in correct_counts) / len(correct_counts) for k in pass_at_k_values(n)}


def speculation_metrics(samples: list[Sample]) -> dict[str, float]:
    """`rollout/spec_*`: acceptance of draft tokens, overall and by position, and tokens per decoding step. Empty without drafts."""
    stats = SpecStats()
    for sample in samples:
        stats.add(sample.speculation, len(sample.response_ids))
    if not stats.drafted:
        return {}
    metrics = {
        "rollout/spec_accept_rate": stats.accept_rate,
        "rollout/spec_drafted": float(stats.drafted),
        "rollout/spec_accepted": float(stats.accepted),
    }
    if stats.steps:
        metrics["rollout/spec_accept_length"] = stats.accept_length
        metrics |= {f"rollout/spec_accept_rate_{k}": hits / stats.steps for k, hits in enumerate(stats.accepted_by_position, 1)}
    return metrics


def prefix_cache_metrics(samples: list[Sample]) -> dict[str, float]:
    """`rollout/prefix_cache_hit_rate`: share of prompt tokens that were in the engines' prefix cache. Empty without a prefix cache."""
    token_counts = [(sample.cached_tokens, len(sample.prompt_ids)) for sample in samples if sample.cached_tokens is not None]
    tokens = sum(length for _, length in token_counts)
    return {"rollout/prefix_cache_hit_rate": sum(cached_tokens for cached_tokens, _ in token_counts) / tokens} if tokens else {}


def reward_part_metrics(samples: list[Sample]) -> dict[str, float]:
    """`reward/<part>`: the mean of each part over the trajectories whose reward has it."""
    names = dict.fromkeys(name for sample in samples for name in sample.reward_parts)
    return {
        f"reward/{name}": statistics.fmean(sample.reward_parts[name] for sample in samples if name in sample.reward_parts) for name in names
    }


def finish_reason_share(samples: list[Sample], reason: str) -> float:
    """Share of responses with this finish reason. For trajectories of agents, pass only the last sample of each."""
    return sum(sample.finish_reason == reason for sample in samples) / len(samples)


def environment_metrics(samples: list[Sample]) -> dict[str, float]:
    """`environment/*`: mean replies, seconds, errors and timeouts per response. Empty if no environment is configured."""
    all_counts = [sample.environment for sample in samples if sample.environment is not None]
    if not all_counts:
        return {}
    metrics = {
        "environment/turns": statistics.fmean(counts.turns for counts in all_counts),
        "environment/seconds": statistics.fmean(counts.seconds for counts in all_counts),
        "environment/errors": statistics.fmean(counts.errors for counts in all_counts),
        "environment/timeouts": statistics.fmean(counts.timeouts for counts in all_counts),
    }
    if num_samples := sum(counts.samples for counts in all_counts):  # only agents report samples
        metrics["environment/samples"] = num_samples / len(all_counts)
        metrics["environment/rewritten"] = sum(counts.rewritten for counts in all_counts) / num_samples
    if rewards := [sample.environment_reward for sample in samples if sample.environment_reward is not None]:
        metrics["environment/reward"] = statistics.fmean(rewards)
    return metrics


def teacher_metrics(samples: list[Sample]) -> dict[str, float]:
    """`teacher/kl`: mean of policy log-prob minus teacher log-prob over sampled tokens (a KL estimate). Empty without a teacher."""
    scored_samples = [(sample, sample.teacher_logprobs) for sample in samples if sample.teacher_logprobs is not None]
    if not scored_samples:
        return {}
    import numpy as np

    difference = 0.0
    for sample, logprobs in scored_samples:
        mask = np.asarray(sample.loss_mask, np.float32)
        difference += float(np.dot(mask, np.asarray(sample.behaviour_logprobs) - np.asarray(logprobs)))
    return {"teacher/kl": difference / max(sum(sample.num_sampled for sample, _ in scored_samples), 1)}


def trajectory_metrics(trajectories: list[Sample], version: int, sync_every: int = 1, updates_since_sync: int = 0) -> dict[str, float]:
    """Reward, length and staleness of one update.

    Rewards and finish reasons count once per trajectory. Lengths, staleness and speculation include all samples. Staleness in versions is
    the distance from the version that sampled a token to `version`, the latest published one. Staleness in updates counts each version as
    `sync_every` updates, and adds `updates_since_sync`, the updates since `version` was published.

    `trajectories`: the last sample of each; its field `earlier` has the previous samples.
    """
    samples = [sample for last_sample in trajectories for sample in last_sample.trajectory]
    rewards = [trajectory.reward or 0.0 for trajectory in trajectories]
    lengths = [len(sample.response_ids) for sample in samples]
    staleness = [version - min((span.version for span in sample.version_spans), default=version) for sample in samples]
    token_staleness = [(span.end - span.start, version - span.version) for sample in samples for span in sample.version_spans]
    mean_token_staleness = sum(tokens * versions for tokens, versions in token_staleness) / max(
        sum(tokens for tokens, _ in token_staleness), 1
    )
    num_partial = sum(len(sample.version_spans) > 1 for sample in samples)
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_fraction": finish_reason_share(trajectories, "length"),
        "response/deadline_fraction": finish_reason_share(trajectories, DEADLINE),
        "async/staleness_mean": sum(staleness) / len(staleness),
        "async/staleness_max": float(max(staleness)),
        "async/staleness_tokens_mean": mean_token_staleness,
        "async/staleness_updates_mean": updates_since_sync + sync_every * mean_token_staleness,
        "async/staleness_updates_max": float(updates_since_sync + sync_every * max(staleness)),
        "async/partial_ratio": num_partial / len(samples),
    }
    metrics |= teacher_metrics(samples) | reward_part_metrics(trajectories) | speculation_metrics(samples) | prefix_cache_metrics(samples)
    return metrics | environment_metrics(trajectories)


class BusyClock:
    """Measures the busy time of trainer and rollout, the time when both are busy, and the time when only rewards are computed."""

    def __init__(self) -> None:
        self._busy = {"trainer": False, "rollout": False, "reward": False}
        self._advanced_at = time.perf_counter()
        self._seconds = {"trainer": 0.0, "rollout": 0.0, "reward": 0.0, "both": 0.0, "reward alone": 0.0, "wall": 0.0}

    def _advance(self) -> None:
        now = time.perf_counter()
        elapsed, self._advanced_at = now - self._advanced_at, now
        self._seconds["wall"] += elapsed
        for component, busy in self._busy.items():
            self._seconds[component] += elapsed * busy
        self._seconds["both"] += elapsed * (self._busy["trainer"] and self._busy["rollout"])
        self._seconds["reward alone"] += elapsed * (self._busy["reward"] and not (self._busy["trainer"] or self._busy["rollout"]))

    def set(self, component: Literal["trainer", "rollout", "reward"], busy: bool) -> None:
        """Record that a component starts or stops working."""
        self._advance()
        self._busy[component] = busy

    def read_and_reset(self) -> dict[str, float]:
        """Shares of idle and of overlapping work, wall time (`timing_s/step`) and time of rewards alone, all since the last call."""
        self._advance()
        wall = max(self._seconds["wall"], 1e-9)
        times = {
            "async/trainer_idle": 1 - self._seconds["trainer"] / wall,
            "async/rollout_idle": 1 - self._seconds["rollout"] / wall,
            "async/overlap": self._seconds["both"] / wall,
            "timing_s/step": wall,
            "timing_s/reward_wait": self._seconds["reward alone"],
        }
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return times


class SampleRecorder:
    """Records samples as text: at most `count` of each update, of each evaluated set, and of the groups dropped before each update."""

    def __init__(self, telemetry: Telemetry, tokenizer: Tokenizer, count: int) -> None:
        self.telemetry, self.tokenizer, self.count = telemetry, tokenizer, count
        self._dropped = (-1, 0)  # step, and the number of samples recorded for it

    def record_update(self, step: int, groups: Sequence[Group]) -> None:
        """Record samples of the groups that the update `step` trained on."""
        if not self.count:
            return
        problems = {group.group_id: group.problem for group in groups}
        selected = spaced_by_reward([sample for group in groups for sample in group.samples], self.count)
        self._record(selected, [problems[sample.group_id] for sample in selected], step=step, kind="update")

    def record_evaluation(self, step: int, responses: Mapping[str, Sequence[tuple[Problem, list[Sample]]]]) -> None:
        """Record samples of an evaluation after the update `step`. `responses`: all responses, by name of the held-out set."""
        for name, pairs in responses.items() if self.count else ():
            problems = {id(sample): problem for problem, samples in pairs for sample in samples}
            samples = [sample for _, responses_to_problem in pairs for sample in responses_to_problem]
            selected = spaced_by_reward(samples, self.count)
            self._record(selected, [problems[id(sample)] for sample in selected], step=step, kind="eval", held_out=name)

    def record_dropped(self, step: int, group: Group, reason: str) -> None:
        """Record one sample of a group that was dropped before the update `step`, unless `count` are recorded for that step."""
        num_recorded = self._dropped[1] if self._dropped[0] == step else 0
        if num_recorded < self.count and group.samples:
            self._dropped = (step, num_recorded + 1)
            self._record(group.samples[:1], [group.problem], step=step, kind="dropped", note=reason)

    def _record(self, samples: Sequence[Sample], problems: Sequence[Problem], **fields: Any) -> None:
        decode = self.tokenizer.decode
        pairs = zip(samples, problems, strict=True)
        self.telemetry.samples([sample_row(sample, decode, answer=problem.answer, **fields) for sample, problem in pairs])
