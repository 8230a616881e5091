"""The rollout half of the RL stage: from prompts to complete groups in the sample buffer.

    prompt ───► admission ───► rollout ───► score ───► reward ───► group complete ───► SampleBuffer

`_requests` sends prompts out as far as admission allows. Each sample that comes back is processed by a task of its own: it is scored and
rewarded while other samples are still being generated, and the last sample of a group completes it. A complete group is either put into
the buffer or, without signal or with a reward that failed, dropped and replaced by another prompt's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.controller.evaluate import request_of
from mtpctl.controller.metrics import BusyClock, Keeper
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.state import RunState
from mtpctl.data.problems import Problem, PromptCursor
from mtpctl.environments.environment import Failures
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.groups import has_signal
from mtpctl.rl.rewards.function import Outcome, Reward
from mtpctl.rollout.protocol import Generator
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.acceptance import AcceptanceWatch
from mtpctl.telemetry.session import Telemetry

Score = Callable[[Sample], Awaitable[Sample]]
"""Fills in the sample's old log-probs while others are generated: the call of the log-prob server. The trainer computes missing ones."""

Teach = Callable[[Sample, Problem], Awaitable[None]]
"""Fills in a teacher's log-probs of a sample of this problem."""

BATCHES_WITHOUT_SIGNAL = 20
"""After as many batches' worth of groups in a row without signal, dynamic sampling gives up."""


@dataclass(slots=True)
class RolloutCounts:
    """What the rollout half did since the last update.

    `tokens` that were generated, held-out responses included, groups that dynamic sampling `dropped`, groups that `expired` as too old,
    and the `rewards` of each complete group, dropped ones included. Of the calls of the reward function their number (`rewarded`), the
    `errors`, `timeouts` among them, and the `seconds` of all; `unrewarded`: groups that were left out for a reward that failed.
    """

    tokens: int = 0
    dropped: int = 0
    expired: int = 0
    rewards: list[list[float]] = field(default_factory=list)
    rewarded: int = 0
    errors: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    unrewarded: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one call of the reward function."""
        self.rewarded += 1
        self.errors += bool(outcome.error)
        self.timeouts += outcome.timed_out
        self.seconds += outcome.seconds

    def reward_metrics(self) -> dict[str, float]:
        """What rewards took, and how many failed."""
        return {
            "timing_s/reward": self.seconds / max(self.rewarded, 1),
            "reward/errors": float(self.errors),
            "reward/timeouts": float(self.timeouts),
            "reward/dropped": float(self.unrewarded),
        }


class RolloutLoop:
    """Keeps the generator busy as far as admission allows. `run` never ends by itself; it raises where generation or rewarding fails.

    `counts` is what it did since the last `take_counts`, `last_progress` when a sample last got further, on the clock of
    `time.monotonic`.
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
        score: Score | None = None,
        *,
        keeper: Keeper,
        teach: Teach | None = None,
    ) -> None:
        self.recipe, self.prepared, self.generator, self.reward = recipe, prepared, generator, reward
        self.telemetry, self.state, self.buffer, self.clock, self.score = telemetry, state, buffer, clock, score
        self.keeper, self.teach = keeper, teach
        self.admission = Admission(recipe.train.rl.prompts_per_step, recipe.async_.sync_every, recipe.async_.staleness)
        self.cursor = PromptCursor(prepared.problems.train, recipe.seed, shuffle=recipe.data.shuffle)
        if state.cursor is not None:
            self.cursor.load_state_dict(state.cursor)
        self.acceptance = AcceptanceWatch()
        self.counts = RolloutCounts()
        self.last_progress = time.monotonic()
        self._admission_changed = asyncio.Event()
        self._failures = Failures()
        self._without_signal = 0  # groups in a row
        self._generating = 0  # responses
        self._rewarding = 0

    def progressed(self) -> None:
        """Note that generation goes on, or that it waits for something that the run shows: it is not stuck."""
        self.last_progress = time.monotonic()

    def take_counts(self) -> RolloutCounts:
        """What was counted since the last call."""
        taken, self.counts = self.counts, RolloutCounts()
        return taken

    def published(self, version: int, trained: int) -> None:
        """Every engine has weight version `version` now: discard groups that are too old for it, and admit more prompts.

        `trained`: groups that were trained on already in the interval between two syncs that this version belongs to.
        """
        self.counts.expired += self.buffer.expire(version - self.recipe.async_.max_staleness)
        self.acceptance.synced(version)
        self.admission.synced(self.buffer.pending, trained)
        self._admission_changed.set()

    async def run(self) -> None:
        """Send prompts out and process what comes back, until cancelled."""
        # Each sample has its own task, so that none waits for the scores of another one.
        async with asyncio.TaskGroup() as tasks, contextlib.aclosing(self.generator.generate(self._requests())) as samples:
            async for sample in samples:
                self.progressed()
                self.answered(sample)
                if (failure := self._failures.first(sample)) is not None:
                    self.telemetry.event("environment", failure)
                tasks.create_task(self._process(sample))

    # ------------------------------------------------------------------------------------------- prompt and admission

    async def _requests(self) -> AsyncIterator[GenerationRequest]:
        """Requests for group after group, each as soon as it is admitted."""
        while True:
            while not self.admission.open:
                self._admission_changed.clear()
                await self._admission_changed.wait()
            group = self.next_group()
            self.admission.admit()
            group.version = self.state.version
            self.buffer.begin(group)
            for index in range(group.size):
                if group.unwanted.is_set():
                    break
                request = self._request(group, index)
                self.asked()
                yield request

    def asked(self) -> None:
        """Note that the engines are asked for one response more; an evaluation beside training asks the same engines."""
        self._generating += 1
        self.clock.set("rollout", True)

    def answered(self, sample: Sample) -> None:
        """Note that one of these has come."""
        self._generating -= 1
        self.clock.set("rollout", self._generating > 0)
        self.counts.tokens += sum(part.sampled for part in sample.parts)

    def next_group(self) -> Group:
        """The group to send out next: one that was discarded or left unfinished before, else one of the next prompt."""
        if self.buffer.requeued:
            return self.buffer.requeued.pop(0)
        problem = next(self.cursor)
        self.state.cursor = self.cursor.state_dict()
        return Group(self.cursor.drawn - 1, problem, self.recipe.train.rl.group_size)

    def _request(self, group: Group, index: int) -> GenerationRequest:
        seed = None
        if self.recipe.async_.deterministic:
            seed = (self.recipe.seed * 1_000_003 + group.number) * group.size + index
        request = request_of(self.recipe, self.prepared, group.problem, group_id=group.group_id, index=index, seed=seed)
        request.unwanted = group.unwanted
        return request

    # ------------------------------------------------------------------------------------------------ score and reward

    async def _process(self, sample: Sample) -> None:
        """Take a finished sample through scoring and rewarding, both at once, into its group; pass on the group that it completes."""
        problem = self.buffer.problem_of(sample)
        if problem is None:
            return
        for part in sample.parts:
            self._check_acceptance(part)
            # The last answer of an environment may reach beyond the context. The model has not read it, and cannot be trained on it.
            part.cut(self.prepared.context - len(part.prompt_ids))
        sample, outcome, _ = await asyncio.gather(self._scored(sample), self._rewarded(sample, problem), self.taught(sample, problem))
        for part in sample.parts:
            part.reward, part.reward_parts = outcome.reward, outcome.parts
        group = self.buffer.add(sample)
        if group is not None:
            await self._complete(group, outcome)

    async def _scored(self, sample: Sample) -> Sample:
        if self.score is None:
            return sample
        parts = [part for part in sample.parts if part.response_ids]
        await asyncio.gather(*(self.score(part) for part in parts))
        self.progressed()
        return sample

    async def taught(self, sample: Sample, problem: Problem) -> None:
        """Have the teacher fill in what it thinks of all samples of the trajectory, where there is a teacher."""
        if self.teach is not None:
            await asyncio.gather(*(self.teach(part, problem) for part in sample.parts if part.response_ids))
            self.progressed()

    async def _rewarded(self, sample: Sample, problem: Problem) -> Outcome:
        self._rewarding += 1
        self.clock.set("reward", True)
        try:
            outcome = await self.reward(await self.prepared.text_of(sample), problem, sample)
        finally:
            self._rewarding -= 1
            self.clock.set("reward", self._rewarding > 0)
        self.progressed()
        self.counts.add(outcome)
        return outcome

    def _check_acceptance(self, sample: Sample) -> None:
        if (collapse := self.acceptance.take(sample)) is not None:
            if self.recipe.sync.on_collapse == "error":
                raise RuntimeFailure(f"sync.on_collapse: {collapse}")
            self.telemetry.event("alarm", str(collapse))

    async def _complete(self, group: Group, last: Outcome) -> None:
        """Put a complete group into the buffer. Drop it where dynamic sampling finds no signal in it, or a reward is missing."""
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        if len(rewards) < group.size:
            self.counts.unrewarded += 1
            self.keeper.dropped(self.state.step + 1, group, f"no reward: {last.error}")
            await self._drop(
                group, f"reward.on_error: {{}} groups in a row were left out (the last: {last.error}); fix the reward function"
            )
            return
        self.counts.rewards.append(rewards)
        if self.teach is not None or not self.recipe.train.rl.dynamic_sampling or has_signal(rewards):
            self._without_signal = 0
            await self.buffer.put(group)
            return
        self.counts.dropped += 1
        self.keeper.dropped(self.state.step + 1, group, f"no signal: every reward of its group is {rewards[0]:g}")
        await self._drop(
            group,
            f"train.rl.dynamic_sampling: {{}} groups in a row had no signal (the last rewards were all {rewards[0]:g}); "
            "read why with mtpctl samples RUN --worst; take easier or harder problems or a longer train.sft, or set it to false",
        )

    async def _drop(self, group: Group, told: str) -> None:
        """Replace a group by another prompt's. Raises RuntimeFailure, with the number of groups in `told`, where it was one of many."""
        self._without_signal += 1
        if self._without_signal >= BATCHES_WITHOUT_SIGNAL * self.recipe.train.rl.prompts_per_step:
            raise RuntimeFailure(told.replace("{}", str(self._without_signal)))
        if await self.buffer.drop(group):
            self.admission.drop()
            self._admission_changed.set()


# Admission: how many prompts may be sent out before the next weight sync, so that responses are not too stale when they are trained on.
#
# The bound is that of `staleness_threshold` in verl's fully asynchronous trainer. Between two syncs the trainer consumes
# `sync_every * groups_per_step` groups. With a threshold of s, at most (1 + s) times as many are admitted, including those that were in
# flight or waiting at the sync. With s = 0 nothing is generated ahead: every sample is generated under the weights that train on it. This
# bounds how many samples are stale. How old a single sample can get has a bound of its own (`mtpctl.controller.rl`).


class Admission:
    """Counts the groups that were admitted between two syncs. For use in one event loop; not thread-safe."""

    def __init__(self, groups_per_step: int, sync_every: int, threshold: float) -> None:
        self.limit = math.floor(groups_per_step * sync_every * (1 + threshold))
        self._admitted = 0

    @property
    def open(self) -> bool:
        """Whether another group may be sent out before the next sync."""
        return self._admitted < self.limit

    def admit(self) -> None:
        """Count a group that is sent out."""
        assert self.open
        self._admitted += 1

    def drop(self) -> None:
        """Count one group less: it has no signal, and another one is sent out in its place."""
        self._admitted -= 1

    def synced(self, pending: int, trained: int = 0) -> None:
        """Begin the interval after a sync, in which `pending` groups of older weights are in flight or wait to be trained on.

        `trained`: groups of this interval that were trained on already, where a resumed run begins within it.
        """
        self._admitted = pending + trained
