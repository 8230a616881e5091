"""The rollout half of the RL stage: from prompts to complete groups in the sample buffer.

    prompt ───► admission ───► rollout ───► log-probs ───► reward ───► group complete ───► SampleBuffer

`_yield_requests` sends out as many prompts as admission allows. Each sample that comes back is scored and rewarded in its own task while
others are still being generated, and the last sample of a group completes it. A complete group is put into the buffer, with two
exceptions: a group of which a reward failed, and with dynamic sampling a group without signal (all rewards are equal, so the advantages are
zero). Such a group is dropped and replaced by another prompt's group.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.controller.metrics import BusyClock, SampleRecorder, has_signal
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.state import RunState
from mtpctl.controller.weights import AcceptanceWatch
from mtpctl.data.problems import Problem, PromptCursor
from mtpctl.environments.environment import Failures
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Outcome, Reward
from mtpctl.rollout.protocol import Generator, create_request
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.telemetry.session import Telemetry

ScoreLogprobs = Callable[[Sample], Awaitable[Sample]]
"""Fills in a sample's old log-probs while others are generated (by the log-prob server). The trainer computes missing ones."""

TeacherScore = Callable[[Sample, Problem], Awaitable[None]]
"""Fills in a teacher's log-probs of a sample of this problem."""

BATCHES_WITHOUT_SIGNAL = 20
"""The run fails if the groups of this many batches are dropped in a row."""


class Admission:
    """Bounds how many groups are sent out between two syncs, so that samples are not too stale when they are trained on.

    As with `staleness_threshold` in verl's fully asynchronous trainer: between two syncs the trainer consumes `sync_every *
    groups_per_step` groups, and with a threshold s at most (1 + s) times as many are admitted, including those in flight or waiting at the
    sync. With s = 0 every sample is generated under the latest published weights. `mtpctl.controller.rl` describes the bound on their age.
    """

    def __init__(self, groups_per_step: int, sync_every: int, threshold: float) -> None:
        self.limit = math.floor(round(groups_per_step * sync_every * (1 + threshold), 6))  # 100 * 1.15 is 114.99999999999999
        self._admitted = 0

    @property
    def has_room(self) -> bool:
        """Whether another group may be sent out before the next sync."""
        return self._admitted < self.limit

    def admit(self) -> None:
        """Count a group that is sent out."""
        assert self.has_room
        self._admitted += 1

    def release(self) -> None:
        """Stop counting a dropped group, so that another one may replace it."""
        self._admitted -= 1

    def begin_interval(self, num_pending: int, num_trained: int = 0) -> None:
        """Begin the interval after a sync, with `num_pending` groups of older weights.

        `num_trained`: groups on which the trainer was updated in this interval before the run was resumed.
        """
        self._admitted = num_pending + num_trained


@dataclass(slots=True)
class RolloutCounts:
    """Counts of the rollout half since the last update.

    Attributes:
        tokens: generated tokens, including responses to held-out problems.
        dropped_groups: groups dropped because they have no signal.
        expired_groups: groups that became too old.
        group_rewards: rewards of each complete group, including groups without signal.
        reward_calls: calls of the reward function.
        reward_errors: failed calls.
        reward_timeouts: calls that timed out.
        reward_seconds: total duration of the calls.
        unrewarded_groups: groups dropped because a reward failed.
    """

    tokens: int = 0
    dropped_groups: int = 0
    expired_groups: int = 0
    group_rewards: list[list[float]] = field(default_factory=list)
    reward_calls: int = 0
    reward_errors: int = 0
    reward_timeouts: int = 0
    reward_seconds: float = 0.0
    unrewarded_groups: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one call of the reward function."""
        self.reward_calls += 1
        self.reward_errors += bool(outcome.error)
        self.reward_timeouts += outcome.timed_out
        self.reward_seconds += outcome.seconds

    def reward_means(self) -> list[float]:
        """The mean reward of each complete group, including groups without signal."""
        return [statistics.fmean(rewards) for rewards in self.group_rewards]

    def metrics(self, groups: Sequence[Group], seconds: float) -> dict[str, float]:
        """Metrics of the interval before an update on `groups`, in which responses were generated for `seconds`."""
        num_with_signal = sum(has_signal([sample.reward or 0.0 for sample in group.samples]) for group in groups)
        metrics = {
            "timing_s/reward": self.reward_seconds / max(self.reward_calls, 1),
            "reward/errors": float(self.reward_errors),
            "reward/timeouts": float(self.reward_timeouts),
            "reward/dropped": float(self.unrewarded_groups),
            "reward/signal_fraction": num_with_signal / (self.dropped_groups + len(groups)),
            "rollout/tokens_per_s": self.tokens / seconds,
            "async/asked_again": float(self.expired_groups),
        }
        if self.group_rewards:
            # With dynamic sampling, groups with equal rewards are dropped, so `reward/mean` stays near one half.
            metrics["reward/unfiltered_mean"] = statistics.fmean(itertools.chain.from_iterable(self.group_rewards))
        return metrics


class RolloutLoop:
    """Keeps the generator as busy as admission allows. `run` never returns; it raises if generation or rewarding fails.

    Attributes:
        counts: counts since the last `take_counts`.
        last_progress: when a sample last made progress (`time.monotonic`).
    """

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        generator: Generator,
        reward: Reward,
        telemetry: Telemetry,
        state: RunState,
        buffer: SampleBuffer,
        clock: BusyClock,
        score_logprobs: ScoreLogprobs | None = None,
        *,
        recorder: SampleRecorder,
        teacher: TeacherScore | None = None,
    ) -> None:
        self.recipe, self.prepared, self.generator, self.reward = recipe, prepared, generator, reward
        self.telemetry, self.state, self.buffer, self.clock, self.score_logprobs = telemetry, state, buffer, clock, score_logprobs
        self.recorder, self.teacher = recorder, teacher
        self.admission = Admission(recipe.train.rl.prompts_per_step, recipe.async_.sync_every, recipe.async_.staleness)
        backoff = recipe.train.rl.signal_backoff
        self.cursor = PromptCursor(prepared.problems.train, recipe.seed, shuffle=recipe.data.shuffle, backoff=backoff)
        if state.cursor is not None:
            self.cursor.load_state_dict(state.cursor)
            state.cursor = self.cursor.state_dict()
        self.acceptance = AcceptanceWatch()
        self.counts = RolloutCounts()
        self.last_progress = time.monotonic()
        self._admission_changed = asyncio.Event()
        self._failures = Failures()
        self._groups_dropped_in_a_row = 0
        self._last_reward_error = ""
        self._responses_in_flight = 0
        self._rewards_in_flight = 0

    def record_progress(self) -> None:
        """Postpone the deadline for progress: a sample has arrived or was scored, or the run reports that it waits."""
        self.last_progress = time.monotonic()

    def take_counts(self) -> RolloutCounts:
        """The counts since the last call."""
        counts, self.counts = self.counts, RolloutCounts()
        return counts

    def on_publish(self, version: int, num_trained: int) -> None:
        """Discard groups that are too old for `version`, which every engine has now, and admit more prompts.

        `num_trained`: see `Admission.begin_interval`.
        """
        self.counts.expired_groups += self.buffer.expire(version - self.recipe.async_.max_staleness)
        self.acceptance.begin_version(version)
        self.admission.begin_interval(self.buffer.num_pending, num_trained)
        self._admission_changed.set()

    async def run(self) -> None:
        """Send out prompts and process the responses, until cancelled."""
        # A separate task for each sample, so that no sample waits for the scores of another.
        async with asyncio.TaskGroup() as tasks, contextlib.aclosing(self.generator.generate(self._yield_requests())) as samples:
            async for sample in samples:
                self.record_progress()
                self.count_response(sample)
                if (message := self._failures.unreported(sample)) is not None:
                    self.telemetry.event("environment", message)
                tasks.create_task(self._process_sample(sample))

    # ------------------------------------------------------------------------------------------- prompt and admission

    async def _yield_requests(self) -> AsyncIterator[GenerationRequest]:
        """Requests for group after group, each as soon as it is admitted."""
        while True:
            while not self.admission.has_room:
                self._admission_changed.clear()
                await self._admission_changed.wait()
            group = self.next_group()
            self.admission.admit()
            group.version = self.state.version
            self.buffer.begin(group)
            for index in range(group.size):
                if group.unwanted.is_set():
                    break
                request = self._build_request(group, index)
                self.count_request()
                yield request

    def count_request(self) -> None:
        """Count a request to the engines. Evaluations, which run concurrently, also call it."""
        self._responses_in_flight += 1
        self.clock.set("rollout", True)

    def count_response(self, sample: Sample) -> None:
        self._responses_in_flight -= 1
        self.clock.set("rollout", self._responses_in_flight > 0)
        self.counts.tokens += sum(part.num_sampled for part in sample.trajectory)

    def next_group(self) -> Group:
        """The next group to send out: a requeued one if there is one, else one for the next prompt."""
        if self.buffer.requeued_groups:
            return self.buffer.requeued_groups.pop(0)
        problem = next(self.cursor)
        self.state.cursor = self.cursor.state_dict()
        return Group(self.cursor.drawn - 1, problem, self.recipe.train.rl.group_size)

    def _build_request(self, group: Group, index: int) -> GenerationRequest:
        seed = None
        if self.recipe.async_.deterministic:
            seed = (self.recipe.seed * 1_000_003 + group.number) * group.size + index
        request = build_request(self.recipe, self.prepared, group.problem, group_id=group.group_id, index=index, seed=seed)
        request.unwanted = group.unwanted
        return request

    # ------------------------------------------------------------------------------------------------ score and reward

    async def _process_sample(self, sample: Sample) -> None:
        """Compute log-probs and reward of a finished sample concurrently, and add it to its group. Skips samples of discarded groups."""
        problem = self.buffer.problem_of(sample)
        if problem is None:
            return
        for part in sample.trajectory:
            self._check_acceptance(part)
            # The last reply of an environment may exceed the context. The model has not read the excess, so it is removed.
            part.truncate(self.prepared.context - len(part.prompt_ids))
        _, outcome, _ = await asyncio.gather(self._score(sample), self._reward(sample, problem), self.score_by_teacher(sample, problem))
        for part in sample.trajectory:
            part.reward, part.reward_parts = outcome.reward, outcome.parts
        if outcome.reward is None:
            self._last_reward_error = outcome.error
        group = self.buffer.add(sample)
        if group is not None:
            await self._finish_group(group)

    async def _score(self, sample: Sample) -> None:
        if self.score_logprobs is not None:
            await asyncio.gather(*(self.score_logprobs(part) for part in sample.trajectory if part.response_ids))
            self.record_progress()

    async def score_by_teacher(self, sample: Sample, problem: Problem) -> None:
        """Fill in the teacher's log-probs of all samples of the trajectory, if there is a teacher."""
        if self.teacher is not None:
            await asyncio.gather(*(self.teacher(part, problem) for part in sample.trajectory if part.response_ids))
            self.record_progress()

    async def _reward(self, sample: Sample, problem: Problem) -> Outcome:
        self._rewards_in_flight += 1
        self.clock.set("reward", True)
        try:
            outcome = await self.reward(await self.prepared.decode_response(sample), problem, sample)
        finally:
            self._rewards_in_flight -= 1
            self.clock.set("reward", self._rewards_in_flight > 0)
        self.record_progress()
        self.counts.add(outcome)
        return outcome

    def _check_acceptance(self, sample: Sample) -> None:
        if (collapse := self.acceptance.observe(sample)) is not None:
            if self.recipe.sync.on_collapse == "error":
                raise RuntimeFailure(f"sync.on_collapse: {collapse}")
            self.telemetry.event("alarm", str(collapse))

    async def _finish_group(self, group: Group) -> None:
        """Put a complete group into the buffer. Drop it if a reward is missing, or dynamic sampling finds no signal in it."""
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        if len(rewards) < group.size:
            self.counts.unrewarded_groups += 1
            self.recorder.record_dropped(self.state.step + 1, group, f"no reward: {self._last_reward_error}")
            await self._drop(group, "reward.on_error", f"were dropped (the last: {self._last_reward_error}); fix the reward function")
            return
        self.counts.group_rewards.append(rewards)
        signal = has_signal(rewards)
        self.cursor.record_signal(group.problem, signal=signal)
        if self.teacher is not None or not self.recipe.train.rl.dynamic_sampling or signal:
            self._groups_dropped_in_a_row = 0
            await self.buffer.put(group)
            return
        self.counts.dropped_groups += 1
        self.recorder.record_dropped(self.state.step + 1, group, f"no signal: every reward of its group is {rewards[0]:g}")
        await self._drop(
            group,
            "train.rl.dynamic_sampling",
            f"had no signal (the last rewards were all {rewards[0]:g}); "
            "see mtpctl samples RUN --worst; use easier or harder problems or a longer train.sft, or set it to false",
        )

    async def _drop(self, group: Group, key: str, reason: str) -> None:
        """Drop a group, and admit another one. After too many in a row, raises RuntimeFailure with the key and the reason."""
        self._groups_dropped_in_a_row += 1
        if self._groups_dropped_in_a_row >= BATCHES_WITHOUT_SIGNAL * self.recipe.train.rl.prompts_per_step:
            raise RuntimeFailure(f"{key}: {self._groups_dropped_in_a_row} groups in a row {reason}")
        if await self.buffer.drop(group):
            self.admission.release()
            self._admission_changed.set()


def build_request(
    recipe: Recipe, prepared: Prepared, problem: Problem, *, group_id: str, index: int, seed: int | None
) -> GenerationRequest:
    """The request for one response to a problem, with the sampling parameters of the recipe."""
    prompt = prepared.prompt_ids(problem, recipe.data)
    sample = Sample(prompt_id=problem.prompt_id, group_id=group_id, prompt_ids=prompt, index=index)
    return create_request(recipe.rollout, sample, context=prepared.context, end_ids=prepared.end_ids, seed=seed, problem=problem)
