"""The RL stage: rollout and training run concurrently, as two tasks of one event loop that share a buffer.

    RolloutLoop (rollout_loop.py)
    prompt ───► admission ───► rollout ───► log-probs ───► reward ───► group complete
    PromptCursor  Admission     Generator    ScoreLogprobs   Reward          │
                      ▲                                                      ▼
                      │ a new version admits more prompts               SampleBuffer
                      │                                                      │
    RlStage.publish ◄─┴── every sync_every updates ◄── update ◄──────────── batch
    Sync                                               TrainerGroup          prompts_per_step groups

`RlStage` is the lower half: it takes batches of whole groups out of the buffer, updates the trainer on them, and publishes the weights.
The engines load them without ending the responses in flight.

Staleness is bounded in two ways. `Admission` bounds the number of groups that are generated ahead (`async.staleness_threshold`). `publish`
bounds the age of a trained token: at most `async.max_staleness` versions older than the latest published version. After each sync, groups
that exceed or may exceed this bound are discarded, whether in flight or complete, and their prompts are the first to be sent out under the
new weights. If a new version would make a retried group too old, the trainer waits for that group first (`due_version` of
`SampleBuffer.wait`). So prompts whose responses always take longer than the bound are still trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from mtpctl.cluster.deadlines import finished_before
from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.controller.evaluate import Evaluator
from mtpctl.controller.hints import HintWatch, IdleWatch, StabilityWatch
from mtpctl.controller.metrics import BusyClock, SampleRecorder, trajectory_metrics
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.rollout_loop import RolloutLoop, ScoreLogprobs, TeacherScore
from mtpctl.controller.sft import count_skipped
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import RecoverTrainer, TrainerGroup, TrainerLost, no_recovery
from mtpctl.data.sets import UNNAMED
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Reward
from mtpctl.rollout.protocol import Generator
from mtpctl.telemetry.session import Telemetry

COLD_CACHE_REASON = (
    "The cache stores complete blocks only, and a short prompt has none. In models with linear attention, a block has hundreds of tokens. "
    "With drafts, the last matching block is computed again (rollout/prefix_cache_hit_rate)"
)
Sync = Callable[[int], Awaitable[dict[str, float]]]
"""Publishes the trainer's weights as a version, and waits until every target has them. Returns `sync/*`."""


class RlStage:
    """Runs the updates of `train.rl.steps` that are not done yet."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        trainer: TrainerGroup,
        generator: Generator,
        sync: Sync,
        rewards: Mapping[str, Reward],
        telemetry: Telemetry,
        state: RunState,
        score_logprobs: ScoreLogprobs | None = None,
        recover: RecoverTrainer = no_recovery,
        teacher: TeacherScore | None = None,
    ) -> None:
        self.recipe, self.trainer, self.generator, self.sync = recipe, trainer, generator, sync
        self.telemetry, self.state, self.recover = telemetry, state, recover
        self.buffer = SampleBuffer(ordered=recipe.async_.deterministic)
        self.clock = BusyClock()
        self.recorder = SampleRecorder(telemetry, prepared.tokenizer, recipe.telemetry.samples)
        self.rollout = RolloutLoop(
            recipe,
            prepared,
            generator,
            rewards[UNNAMED],
            telemetry,
            state,
            self.buffer,
            self.clock,
            score_logprobs,
            recorder=self.recorder,
            teacher=teacher,
        )
        self.evaluator = Evaluator(recipe, prepared, generator, rewards, telemetry, state, self.rollout, self.recorder)
        self.stability_watch = StabilityWatch(recipe)
        self.idle_watch = IdleWatch(recipe)
        self.hint_watch = HintWatch(recipe)
        self._replaying = False  # whether the trainer was restored, and must publish before it repeats updates
        self._seconds_without_updates = 0.0  # while rollout continued, since the last update
        self._rollout_task: asyncio.Task[None]
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._update_done = asyncio.Event()  # set at the end of each update
        self._updates_skipped_in_a_row = 0
        self._reported_messages = {""}  # of the engines, about their number of draft tokens; an empty one is never logged
        self._truncation_reported = False
        self._cold_cache_reported = False

    async def resume_buffer(self, complete_groups: list[Group], unfinished_groups: list[Group]) -> None:
        """Restore the groups of a checkpoint: complete ones wait for the trainer, the prompts of the others are sent out again."""
        # The teacher may have been changed or added since the checkpoint.
        scoring = (self.rollout.score_by_teacher(sample, group.problem) for group in complete_groups for sample in group.samples)
        await asyncio.gather(*scoring)
        for group in complete_groups:
            await self.buffer.put(group)
        self.buffer.requeued_groups = unfinished_groups
        self.rollout.admission.begin_interval(len(complete_groups))

    async def run(self) -> None:
        """Run rollout and training until all updates are done or a stop is requested, with held-out evaluations before and after."""
        self.state.buffer = self.buffer
        # A checkpoint is written before the evaluation of its step, so a resumed run repeats that evaluation, even if it had ended.
        if self.state.step == 0 or self.evaluator.is_due():
            await self.evaluator.start(background=True)
        try:
            await self._run_rollout_and_training()
            if self.state.step == self.recipe.train.rl.steps:
                # The evaluation in progress must end before the next version replaces its weights.
                await self.evaluator.wait()
                if self.state.synced_at != self.state.step:
                    await self.publish()
                await self.evaluator.start()
        finally:
            await self.evaluator.cancel()
            if (hint := self.idle_watch.hint()) is not None:
                self.telemetry.event("hint", hint)

    async def _run_rollout_and_training(self) -> None:
        # The rates of the first update exclude an evaluation that has ended before.
        self.clock.read_and_reset()
        self.rollout.take_counts()
        self._rollout_task = rollout = asyncio.create_task(self.rollout.run(), name="rollout")
        training = asyncio.create_task(self._run_training(), name="training")
        # The training task ends if it finishes, is stopped or fails. The rollout task ends only if it fails.
        await asyncio.wait({rollout, training}, return_when=asyncio.FIRST_COMPLETED)
        rollout_failed = rollout.done()
        rollout.cancel()
        self._update_done.clear()
        if self.state.is_updating:
            # The weights cannot be saved in the middle of an update.
            await finished_before(training, self._update_done)
        training.cancel()
        await asyncio.wait({training, rollout})
        if self._checkpoint_task is not None:
            # A checkpoint that is being written is not cancelled: `RunState.save_after_failure` publishes it.
            await asyncio.gather(self._checkpoint_task, return_exceptions=True)
        # If rollout failed first, an error of training may only be its consequence.
        tasks = (rollout, training) if rollout_failed else (training, rollout)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, Exception):
                raise error

    async def _run_training(self) -> None:
        """The training task. If the trainer is lost, rollout continues, and a new trainer repeats the updates since the newest checkpoint.

        The groups of these updates were retained, so no prompt is lost or trained on twice.
        """
        while True:
            try:
                if self._replaying:
                    await self.publish()
                return await self._run_updates()
            except TrainerLost as error:
                if self._rollout_task.done():
                    raise  # The run ends with the error of rollout.
                self.clock.set("trainer", False)
                await self.recover(error)
                self._replaying = True
                self._updates_skipped_in_a_row = 0
                # Rollout continued during the recovery, so its rates include that time.
                self._seconds_without_updates += self.clock.read_and_reset()["timing_s/step"]

    async def _run_updates(self) -> None:
        """Repeat batch, update, publish, checkpoint and evaluation until all updates are done or a stop is requested."""
        while self.state.step < self.recipe.train.rl.steps:
            groups = await self._next_batch()
            if groups is None:
                return
            self.clock.set("trainer", True)
            metrics, seconds = await self._update(groups)
            try:
                if self.state.step % self.recipe.async_.sync_every == 0:
                    metrics |= await self.publish()
            finally:
                # The row is logged even if the sync fails or is cancelled, because a checkpoint may contain this update.
                self.clock.set("trainer", False)
                metrics |= self._step_metrics(metrics, seconds, groups)
                self.telemetry.log(self.state.step, metrics, "rl")
                self.recorder.record_update(self.state.step, groups)
            # In a separate task, because a checkpoint that is cancelled halfway cannot be published.
            self._checkpoint_task = asyncio.create_task(self.state.checkpoint_if_due(self.trainer), name="checkpoint")
            await asyncio.shield(self._checkpoint_task)
            self._checkpoint_task = None
            if self.evaluator.is_due():
                await self.evaluator.start(background=True)
                if not self.evaluator.is_running:
                    # Training waited for the evaluation, so the next update's times exclude this wait. Rollout continued, so its rates
                    # include it.
                    self._seconds_without_updates += self.clock.read_and_reset()["timing_s/step"]
            else:
                await self.evaluator.raise_if_failed()

    # --------------------------------------------------------------------------------------------------------- batch

    async def _next_batch(self) -> list[Group] | None:
        """Wait for the groups of the next update. Returns None if a stop is requested first."""
        if self.state.stop_requested.is_set():
            return None
        batch_size, sync_every = self.recipe.train.rl.prompts_per_step, self.recipe.async_.sync_every
        due_version = self.state.version - self.recipe.async_.max_staleness
        # Later batches before the next sync take this many groups, so this many due groups can be left to them.
        max_deferred = (sync_every - 1 - self.state.step % sync_every) * batch_size
        wait_task = asyncio.create_task(
            self._wait_while_progressing(self.buffer.wait(batch_size, due_version=due_version, max_deferred=max_deferred))
        )
        if not await finished_before(wait_task, self.state.stop_requested):
            return None
        wait_task.result()
        groups = self.buffer.take(batch_size, self.state.step + 1)
        if not self.recipe.train.restarts_trainer:
            self.buffer.forget(self.state.step + 1)
        return groups

    async def _wait_while_progressing(self, awaitable: Awaitable[None]) -> None:
        """Wait for `awaitable` while rollout makes progress. Raises RuntimeFailure after `cluster.step_deadline_s` without progress."""
        deadline_s = self.recipe.cluster.step_deadline_s
        # The deadline starts now, not at the last response, because the trainer may have been busy since then.
        self.rollout.record_progress()
        task = asyncio.ensure_future(awaitable)
        try:
            while (remaining_s := self.rollout.last_progress + deadline_s - time.monotonic()) > 0:
                if (await asyncio.wait({task}, timeout=remaining_s))[0]:
                    return task.result()
        finally:
            task.cancel()
        ready = f"{self.buffer.num_ready} of {self.recipe.train.rl.prompts_per_step} groups"
        raise RuntimeFailure(
            f"rollout, batch of step {self.state.step + 1}: no response for {deadline_s:g} s, with {ready} ready; "
            "see logs/, or raise cluster.step_deadline_s"
        )

    # -------------------------------------------------------------------------------------------------------- update

    async def _update(self, groups: list[Group]) -> tuple[dict[str, float], float]:
        """One policy update on the groups. Returns its metrics, and the seconds that the trainer took."""
        samples = [sample for group in groups for sample in group.samples]
        trained_samples = [trained for sample in samples for trained in sample.trajectory]
        started_at = time.perf_counter()
        self.state.is_updating = True
        metrics = await self.trainer.rl_step(trained_samples, self.state.version)
        seconds = time.perf_counter() - started_at
        updates_since_sync = self.state.step - max(self.state.synced_at, 0)
        self.state.step += 1
        self.state.is_updating = False
        self._update_done.set()
        self._updates_skipped_in_a_row = count_skipped(metrics, self._updates_skipped_in_a_row, self.recipe.train.max_bad_steps)
        metrics |= trajectory_metrics(samples, self.state.version, self.recipe.async_.sync_every, updates_since_sync)
        self._warn_of_deadlines(metrics["response/deadline_fraction"], len(samples))
        self._warn_of_cold_cache(metrics)
        return metrics, seconds

    def _step_metrics(self, metrics: dict[str, float], seconds: float, groups: list[Group]) -> dict[str, float]:
        """Rates and shares over the interval that ends with this update. Removes `perf/tokens` from `metrics`. Logs warnings and hints."""
        busy_times, counts = self.clock.read_and_reset(), self.rollout.take_counts()
        self.idle_watch.observe(busy_times)
        seconds_generating, self._seconds_without_updates = busy_times["timing_s/step"] + self._seconds_without_updates, 0.0
        group_means, rollout_metrics = counts.reward_means(), counts.metrics(groups, seconds_generating)
        stability_metrics, warning = self.stability_watch.update(group_means, metrics)
        if warning is not None:
            self.telemetry.event("alarm", warning)
        for hint in self.hint_watch.update(group_means, metrics | rollout_metrics):
            self.telemetry.event("hint", hint)
        return (
            busy_times
            | rollout_metrics
            | stability_metrics
            | self.state.checkpoint_copy_metrics()
            | {
                "perf/tokens_per_s": metrics.pop("perf/tokens") / seconds,
                "async/buffer_groups": float(self.buffer.num_ready),
                "async/version": float(self.state.version),
            }
        )

    # ------------------------------------------------------------------------------------------------------- publish

    async def publish(self) -> dict[str, float]:
        """Send the trainer's weights to every target under the next version, and admit more prompts.

        A resumed run publishes the checkpoint's weights before its first update. Weights that already have a version keep it, so that the
        checkpoint's groups do not become staler.
        """
        has_new_weights = self.state.synced_at != self.state.step
        version = max(self.state.version, self.state.sent_version) + has_new_weights
        self.state.sent_version = version
        metrics = await self.sync(version)
        if self.recipe.rollout.speculation.auto:
            metrics |= await self._draft_count_metrics()
        self.state.version, self.state.synced_at = version, self.state.step
        if self._replaying:
            self._replaying = False
            self.buffer.forget(self.state.step)
            await self.buffer.restore_taken_groups()
        # Groups that were trained on since the last regular sync: zero, unless a resumed or ending stage publishes between two syncs.
        num_trained = self.state.step % self.recipe.async_.sync_every * self.recipe.train.rl.prompts_per_step
        self.rollout.on_publish(version, num_trained)
        return metrics

    async def _draft_count_metrics(self) -> dict[str, float]:
        """The mean number of draft tokens per step that the engines have selected. Logs selections that are new."""
        engine_states = await self.generator.control_speculation()
        for message in {str(state["message"]) for state in engine_states} - self._reported_messages:
            self._reported_messages.add(message)
            self.telemetry.event("rollout", message)
        return {"rollout/spec_drafts": sum(state["drafts"] for state in engine_states) / len(engine_states)} if engine_states else {}

    # ------------------------------------------------------------------------------------------------------ warnings

    def _warn_of_deadlines(self, share: float, num_responses: int) -> None:
        """Log an event for the first update with responses that the deadline truncated. Later updates only have the metric."""
        if share and not self._truncation_reported:
            self._truncation_reported = True
            deadline_s = self.recipe.rollout.deadline_s
            message = f"{round(share * num_responses)} of {num_responses} responses were truncated by rollout.deadline_s: {deadline_s:g}"
            fix = "raise it, or lower rollout.max_tokens or max_in_flight (response/deadline_fraction)"
            self.telemetry.event("rollout", f"{message}; {fix}")

    def _warn_of_cold_cache(self, metrics: Mapping[str, float]) -> None:
        """Log an event if the first update had no prefix cache hit. Later updates only have the metric."""
        is_reported, self._cold_cache_reported = self._cold_cache_reported, True
        group_size = self.recipe.train.rl.group_size
        if not is_reported and group_size > 1 and metrics.get("rollout/prefix_cache_hit_rate") == 0:
            self.telemetry.event(
                "rollout", f"no prompt token was in the prefix cache: engines compute each prompt {group_size} times. {COLD_CACHE_REASON}"
            )
