"""Metrics of the samples of one update."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mtpctl.controller.buffer import Group
from mtpctl.data.problems import Problem
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.rollout.protocol import DEADLINE
from mtpctl.samples import Sample
from mtpctl.telemetry.sample_log import sample_row, spread
from mtpctl.telemetry.session import Telemetry


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


# How long trainer, rollout and rewards were busy between two readings: who waited for whom.


class BusyClock:
    """Adds up the seconds in which `trainer` and `rollout` were busy, each by itself and both at once, and those of `reward` alone."""

    def __init__(self) -> None:
        self._busy = {"trainer": False, "rollout": False, "reward": False}
        self._mark = time.perf_counter()
        self._seconds = {"trainer": 0.0, "rollout": 0.0, "reward": 0.0, "both": 0.0, "reward alone": 0.0, "wall": 0.0}

    def _advance(self) -> None:
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        self._seconds["wall"] += elapsed
        for side, busy in self._busy.items():
            self._seconds[side] += elapsed * busy
        self._seconds["both"] += elapsed * (self._busy["trainer"] and self._busy["rollout"])
        self._seconds["reward alone"] += elapsed * (self._busy["reward"] and not (self._busy["trainer"] or self._busy["rollout"]))

    def set(self, side: Literal["trainer", "rollout", "reward"], busy: bool) -> None:
        """Note that one side begins or stops working."""
        self._advance()
        self._busy[side] = busy

    def read(self) -> dict[str, float]:
        """Idle shares and overlap since the last reading, `timing_s/step`, the seconds since then, and those that rewards alone took."""
        self._advance()
        wall = max(self._seconds["wall"], 1e-9)
        shares = {
            "async/trainer_idle": 1 - self._seconds["trainer"] / wall,
            "async/rollout_idle": 1 - self._seconds["rollout"] / wall,
            "async/overlap": self._seconds["both"] / wall,
            "timing_s/step": wall,
            "timing_s/reward_wait": self._seconds["reward alone"],
        }
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return shares


# Which samples of a run are kept to be read: some of each update, each evaluation, and of the groups that were dropped.


class Keeper:
    """Passes at most `count` samples of each occasion to the telemetry, as text. With a `count` of 0 it does nothing.

    Decoding so few of the samples costs less than their rewards did; writing is not done here.
    """

    def __init__(self, telemetry: Telemetry, tokenizer: Tokenizer, count: int) -> None:
        self.telemetry, self.tokenizer, self.count = telemetry, tokenizer, count
        self._dropped = (-1, 0)  # step, and how many of its samples were kept

    def updated(self, step: int, groups: Sequence[Group]) -> None:
        """Keep samples that the update `step` was made with."""
        if not self.count:
            return
        problems = {group.group_id: group.problem for group in groups}
        chosen = spread([sample for group in groups for sample in group.samples], self.count)
        decode = self.tokenizer.decode
        rows = [sample_row(each, decode, step=step, kind="update", answer=problems[each.group_id].answer) for each in chosen]
        self.telemetry.samples(rows)

    def evaluated(self, step: int, answers: Mapping[str, Iterable[tuple[Problem, list[Sample]]]]) -> None:
        """Keep answers of an evaluation after the update `step`: of each held-out set, by its name, as many."""
        for name, pairs in answers.items() if self.count else ():
            problems = [(problem, sample) for problem, samples in pairs for sample in samples]
            of = {id(sample): problem for problem, sample in problems}
            chosen = spread([sample for _, sample in problems], self.count)
            decode = self.tokenizer.decode
            rows = [sample_row(s, decode, step=step, kind="eval", answer=of[id(s)].answer, held_out=name) for s in chosen]
            self.telemetry.samples(rows)

    def dropped(self, step: int, group: Group, why: str) -> None:
        """Keep one sample of a group that was left out before the update `step`, up to `count` for each update."""
        before = self._dropped[1] if self._dropped[0] == step else 0
        if before < self.count and group.samples:
            self._dropped = (step, before + 1)
            self.telemetry.samples(
                [sample_row(group.samples[0], self.tokenizer.decode, step=step, kind="dropped", answer=group.problem.answer, note=why)]
            )
