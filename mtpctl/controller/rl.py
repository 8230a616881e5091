"""The RL stage: generation and training at the same time, on one event loop.

Two tasks share a buffer. `_feed` sends prompts out as far as admission allows and `_collect` takes samples back, scores
and rewards them, and puts whole groups into the buffer; the trainer's loop takes batches out, updates, and every
`sync_every` updates publishes the weights, which the generator takes in without draining.

Staleness is bounded twice: in count by admission (`staleness`), and in age by what a new version does here. No trained token is more
than `async.max_staleness` versions older than the version that the trainer has published. After each sync, groups that could only
be older are discarded, in flight or complete, and their prompts are sent out again first, under the new weights. The trainer delays
the sync that would make such a repeated group too old until it has trained on the group, so a group is normally discarded once, and a
prompt that always takes longer than the bound is trained on all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.controller.clock import BusyClock
from mtpctl.controller.evaluate import evaluate, request_of
from mtpctl.controller.metrics import of_samples
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.sft import check_applied
from mtpctl.controller.stability import StabilityWatch
from mtpctl.controller.staleness import Admission
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.data.cursor import PromptCursor
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.groups import has_signal
from mtpctl.rl.rewards import Checker
from mtpctl.rollout.protocol import Generator
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.acceptance import AcceptanceWatch
from mtpctl.telemetry.session import Telemetry

Score = Callable[[Sample], Awaitable[Sample]]
"""Fills in old log-probs beside generation: the log-prob server's call. The trainer computes what it leaves out, or all without it."""

Sync = Callable[[int], Awaitable[dict[str, float]]]
"""Publishes the trainer's weights under a version and waits until every target has them. Returns `sync/*`."""

BARREN_BATCHES = 20
"""Batches' worth of groups without signal, one after the other, after which dynamic sampling gives up."""


class RlStage:
    """Runs `train.rl.steps` updates, from wherever `state` says."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        trainer: TrainerGroup,
        generator: Generator,
        sync: Sync,
        checker: Checker,
        telemetry: Telemetry,
        state: RunState,
        score: Score | None = None,
    ) -> None:
        self.recipe, self.prepared, self.trainer, self.generator = recipe, prepared, trainer, generator
        self.sync, self.checker, self.telemetry, self.state, self.score = sync, checker, telemetry, state, score
        rl, asynchronous = recipe.train.rl, recipe.async_
        self.buffer = SampleBuffer(ordered=asynchronous.deterministic)
        self.admission = Admission(rl.prompts_per_step, asynchronous.sync_every, asynchronous.staleness)
        self.cursor = PromptCursor(prepared.problems.train, recipe.seed, shuffle=recipe.data.shuffle)
        self.clock = BusyClock()
        self.acceptance = AcceptanceWatch()
        self.stability = StabilityWatch(recipe)
        self._gate, self._updated = asyncio.Event(), asyncio.Event()
        self._dropped = 0
        self._asked_again = 0
        self._barren = 0
        self._generated = 0
        self._progress = time.monotonic()
        self._rewards: list[list[float]] = []  # of each group since the last update, dropped ones included
        self._told = {""}
        self._cuts_told = False
        if state.cursor is not None:
            self.cursor.load_state_dict(state.cursor)

    async def resume_buffer(self, complete: list[Group], again: list[Group]) -> None:
        """Take up groups that a checkpoint kept: complete ones wait for the trainer, the others are asked for anew."""
        for group in complete:
            await self.buffer.put(group)
        self.buffer.again = again
        self.admission.synced(len(complete))

    async def run(self) -> None:
        """All updates that are left, with held-out evaluations before and after."""
        self.state.buffer = self.buffer
        problems = self.prepared.problems
        if seen := problems.seen_in(self.recipe.train.stages):
            told = f"{seen} of {len(problems.evaluation)} held-out problems are trained on too: accuracy on them is what is remembered"
            self.telemetry.event("data", f"{told}; remove them from data.path or data.sft_path")
        # A run that was resumed may have ended in the evaluation that was due, or it is logged twice, of the same weights.
        if self.state.step == 0 or self._evaluation_due():
            await self._evaluate()
        rollout = asyncio.create_task(self._collect(), name="rollout")
        training = asyncio.create_task(self._train(), name="training")
        # Whichever ends first ends the stage: training by being done or stopped, either of them by failing.
        await asyncio.wait({rollout, training}, return_when=asyncio.FIRST_COMPLETED)
        rollout.cancel()
        await self._end_update(training)
        training.cancel()
        for error in await asyncio.gather(training, rollout, return_exceptions=True):
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, Exception):
                raise error
        if self.state.step == self.recipe.train.rl.steps:
            if self.state.synced_at != self.state.step:
                await self.publish()
            await self._evaluate()

    async def _end_update(self, training: asyncio.Task[None]) -> None:
        """Wait for the update under way, if any: without it no checkpoint could be taken of a stage whose rollout has failed."""
        self._updated.clear()
        if self.state.updating and not training.done():
            updated = asyncio.create_task(self._updated.wait())
            await asyncio.wait({training, updated}, return_when=asyncio.FIRST_COMPLETED)
            updated.cancel()

    # ------------------------------------------------------------------------------------------------------- rollout

    async def _feed(self) -> AsyncIterator[GenerationRequest]:
        while True:
            while not self.admission.open:
                self._gate.clear()
                await self._gate.wait()
            group = self._next_group()
            self.admission.admit()
            group.version = self.state.version
            self.buffer.begin(group)
            self.clock.set("rollout", True)
            for index in range(group.size):
                if group.unwanted.is_set():
                    break
                yield self._request(group, index)

    def _next_group(self) -> Group:
        if self.buffer.again:
            return self.buffer.again.pop(0)
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

    async def _collect(self) -> None:
        # Scoring runs beside generation: one task a sample, so that no sample waits for another one's scores.
        async with asyncio.TaskGroup() as taken, contextlib.aclosing(self.generator.generate(self._feed())) as samples:
            async for sample in samples:
                self._progress = time.monotonic()
                self._generated += sum(sample.loss_mask)
                taken.create_task(self._take(sample))

    async def _take(self, sample: Sample) -> None:
        if self.buffer.wants(sample):
            await self._score_and_add(sample)
        self.clock.set("rollout", self.buffer.pending > self.buffer.ready)

    async def _score_and_add(self, sample: Sample) -> None:
        if (collapse := self.acceptance.take(sample)) is not None:
            if self.recipe.sync.on_collapse == "error":
                raise RuntimeFailure(f"sync.on_collapse: {collapse}")
            self.telemetry.event("alarm", str(collapse))
        # An environment's last answer may reach beyond the context. Nothing came after it, and no model reads that far.
        sample.cut(self.prepared.context - len(sample.prompt_ids))
        if self.score is not None and sample.response_ids:
            sample = await self.score(sample)
            self._progress = time.monotonic()
        group = self.buffer.add(sample)
        if group is not None:
            await self._complete(group)

    async def _complete(self, group: Group) -> None:
        for sample in group.samples:
            text = self.prepared.tokenizer.decode(sample.response_ids)
            sample.reward = await asyncio.to_thread(self.checker, text, group.problem.answer)
            self._progress = time.monotonic()
        if group.unwanted.is_set():
            return
        rewards = [s.reward or 0.0 for s in group.samples]
        self._rewards.append(rewards)
        if self.recipe.train.rl.dynamic_sampling and not has_signal(rewards):
            self._dropped += 1
            self._barren += 1
            if self._barren >= BARREN_BATCHES * self.recipe.train.rl.prompts_per_step:
                raise RuntimeFailure(
                    f"train.rl.dynamic_sampling: {self._barren} groups in a row had no signal (the last rewards were all {rewards[0]:g}); "
                    "take easier or harder problems or a longer train.sft, or set it to false"
                )
            if await self.buffer.drop(group):
                self.admission.drop()
                self._gate.set()
            return
        self._barren = 0
        await self.buffer.put(group)

    # ------------------------------------------------------------------------------------------------------ training

    async def _train(self) -> None:
        rl, bad = self.recipe.train.rl, 0
        self.clock.read()
        while self.state.step < rl.steps:
            groups = await self._batch()
            if groups is None:
                return
            samples = [sample for group in groups for sample in group.samples]
            began = time.perf_counter()
            self.clock.set("trainer", True)
            self.state.updating = True
            metrics = await self.trainer.call("rl_step", samples, self.state.version)
            updated = time.perf_counter()
            bad = check_applied(metrics, bad, self.recipe.train.max_bad_steps)
            metrics |= of_samples(samples, self.state.version, self.recipe.async_.sync_every, self._ahead())
            self._tell_of_cuts(metrics["response/deadline_fraction"], len(samples))
            self.state.step += 1
            self.state.updating = False
            self._updated.set()
            if self.state.step % self.recipe.async_.sync_every == 0:
                metrics |= await self.publish()
            self.clock.set("trainer", False)
            metrics |= self._step_metrics(metrics, updated - began, groups)
            self.telemetry.log(self.state.step, metrics, "rl")
            await self.state.checkpoint_if_due(self.trainer)
            if self._evaluation_due():
                await self._evaluate()
                # Evaluations are timed on their own; neither their time nor what was generated in it counts as an update's.
                self.clock.read()
                self._generated = 0

    def _tell_of_cuts(self, share: float, responses: int) -> None:
        """Once a run: from then on the metric tells."""
        if share and not self._cuts_told:
            self._cuts_told = True
            cut = f"{round(share * responses)} of {responses} responses were cut by rollout.deadline_s: {self.recipe.rollout.deadline_s:g}"
            self.telemetry.event("rollout", f"{cut}; raise it, or lower rollout.max_tokens or max_in_flight (response/deadline_fraction)")

    async def _batch(self) -> list[Group] | None:
        """The next batch; None where a stop is asked for first."""
        if self.state.stopping.is_set():
            return None
        count, every = self.recipe.train.rl.prompts_per_step, self.recipe.async_.sync_every
        # What the other batches until the next sync have room for can still wait.
        later = (every - 1 - self.state.step % every) * count
        batch = asyncio.create_task(self.buffer.take(count, due=self.state.version - self.recipe.async_.max_staleness, later=later))
        stop = asyncio.create_task(self.state.stopping.wait())
        try:
            await self._while_progressing({batch, stop})
        except BaseException:
            # One that was complete at that very moment is in no checkpoint yet.
            if batch.done() and not batch.cancelled() and batch.exception() is None:
                self.buffer.give_back(batch.result())
            batch.cancel()
            raise
        finally:
            stop.cancel()
        if not batch.done():
            batch.cancel()
            return None
        # Groups that were taken are in no checkpoint: they are trained on, even where a stop came at the same moment.
        return await batch

    async def _while_progressing(self, awaited: set[asyncio.Task[Any]]) -> None:
        """Wait for one of these, for as long as responses keep coming in and being rewarded.

        Raises RuntimeFailure where nothing does for `cluster.step_deadline_s`.
        """
        deadline = self.recipe.cluster.step_deadline_s
        self._progress = time.monotonic()  # what came in while the trainer was at work is not waited for
        while (left := self._progress + deadline - time.monotonic()) > 0:
            if (await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED))[0]:
                return
        ready, wanted = self.buffer.ready, self.recipe.train.rl.prompts_per_step
        raise RuntimeFailure(
            f"rollout, batch of step {self.state.step + 1}: no response for {deadline:g} s, with {ready} of {wanted} groups ready; "
            "look into logs/, or raise cluster.step_deadline_s"
        )

    async def publish(self) -> dict[str, float]:
        """Send the trainer's weights to every target under the next version, and let more prompts out.

        Weights that have a version already, since a run is resumed with them, go out under that: groups that waited got no staler.
        """
        version = self.state.version + (self.state.synced_at != self.state.step)
        metrics = await self.sync(version)
        if self.recipe.rollout.speculation.auto:
            metrics |= await self._drafts()
        self.state.version, self.state.synced_at = version, self.state.step
        self._asked_again += self.buffer.expire(version - self.recipe.async_.max_staleness)
        self.acceptance.synced(self.state.version)
        self.admission.synced(self.buffer.pending, self._trained_since_due())
        self._gate.set()
        return metrics

    def _ahead(self) -> int:
        """Updates of this stage since the weights that were published."""
        return self.state.step - max(self.state.synced_at, 0)

    def _trained_since_due(self) -> int:
        """Groups that were trained on since a sync was due: some only where a run that was resumed between two of them syncs."""
        return self.state.step % self.recipe.async_.sync_every * self.recipe.train.rl.prompts_per_step

    async def _drafts(self) -> dict[str, float]:
        """How many draft tokens a step the engines chose, and what they say where one changed its mind."""
        states = await self.generator.speculate()
        for told in {state["told"] for state in states} - self._told:
            self._told.add(told)
            self.telemetry.event("rollout", told)
        return {"rollout/spec_drafts": sum(state["drafts"] for state in states) / len(states)} if states else {}

    def _step_metrics(self, metrics: dict[str, float], seconds: float, groups: list[Group]) -> dict[str, float]:
        shares = self.clock.read()
        wall = shares["timing_s/step"]
        generated, self._generated = self._generated, 0
        dropped, self._dropped = self._dropped, 0
        again, self._asked_again = self._asked_again, 0
        rewards, self._rewards = self._rewards, []
        if rewards:
            # Dynamic sampling keeps groups between all wrong and all right, so `reward/mean` hardly leaves one half.
            shares["reward/unfiltered_mean"] = statistics.fmean(itertools.chain.from_iterable(rewards))
        steady, warning = self.stability.take([statistics.fmean(group) for group in rewards], metrics)
        if warning is not None:
            self.telemetry.event("alarm", warning)
        shares |= steady
        signal = sum(has_signal([sample.reward or 0.0 for sample in group.samples]) for group in groups)
        return shares | {
            "perf/tokens_per_s": metrics.pop("perf/tokens") / seconds,
            "rollout/tokens_per_s": generated / wall,
            "reward/signal_fraction": signal / (dropped + len(groups)),
            "async/buffer_groups": float(self.buffer.ready),
            "async/asked_again": float(again),
            "async/version": float(self.state.version),
        }

    def _evaluation_due(self) -> bool:
        """Whether one belongs between the update before and the next one."""
        every = self.recipe.train.eval_every
        return bool(every) and self.state.step % every == 0 and self.state.step < self.recipe.train.rl.steps

    async def _evaluate(self) -> None:
        """Held-out accuracy of the published weights, logged at the current step; nothing without held-out problems."""
        began = time.perf_counter()
        if metrics := await evaluate(self.recipe, self.prepared, self.generator, self.checker):
            metrics["timing_s/evaluation"] = time.perf_counter() - began
            if cut := round(metrics["eval/deadline_fraction"] * metrics["eval/problems"]):
                told = f"{cut} of {metrics['eval/problems']:g} held-out responses were cut by rollout.deadline_s"
                self.telemetry.event("eval", f"{told}: {self.recipe.rollout.deadline_s:g}, and count as they are; raise it")
            self.telemetry.log(self.state.step, metrics, "rl")
