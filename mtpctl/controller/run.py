"""One run: starts the actors, runs the stages in order, and writes the last checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from pathlib import Path

from mtpctl.checkpoint.finding import BUFFER_FILE
from mtpctl.cluster.bundles import Bundles
from mtpctl.cluster.deadlines import finished_before
from mtpctl.cluster.local import Daemons
from mtpctl.cluster.process import freeze_heap
from mtpctl.controller.buffer import SampleBuffer
from mtpctl.controller.copies import CheckpointCopier, start_copier
from mtpctl.controller.elastic import ElasticRollout
from mtpctl.controller.prepare import Prepared, open_version_store
from mtpctl.controller.resume import REFERENCE, StartingPoint
from mtpctl.controller.rl import RlStage
from mtpctl.controller.scoring import OldLogprobScorer
from mtpctl.controller.services import Services, create_engine_claim, reserve_bundles, start_rewards
from mtpctl.controller.sft import SAMPLES_FILE, DraftStage, SftStage
from mtpctl.controller.state import RunState, load_state
from mtpctl.controller.status import Waits, create_status_app
from mtpctl.controller.stopping import StopHandler
from mtpctl.controller.trainers import TrainerGroup, TrainerLost, TrainerRecovery
from mtpctl.controller.weights import WeightSync
from mtpctl.environments.agents import bind_gateway, open_generator
from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.logprob.server import LogprobServer, answer_deadline
from mtpctl.plan.placement import Placement
from mtpctl.recipe.checks import cautions_of
from mtpctl.recipe.model import context_note
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import ReplicaCounts
from mtpctl.telemetry.session import Telemetry
from mtpctl.web.server import address_of, serving

ActorStartup = asyncio.Task[tuple[ReplicaPool, LogprobServer | None]]


class Run:
    """One run: starts its actors, and runs its stages in order.

    Args:
        old_logprobs_note: appended to the message about the resume; empty if the source of old log-probs has not changed.
        status_socket: bound for the status page, if there is one.
        daemons: the Ray daemons that the run has started.
        starting_point: by default that of a new run.
    """

    placement: Placement
    bundles: Bundles
    recovery: TrainerRecovery
    services: Services
    gateway_socket: socket.socket | None = None
    pool: ReplicaPool | None = None
    elastic: ElasticRollout | None = None

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        directory: RunDirectory,
        telemetry: Telemetry,
        old_logprobs_note: str = "",
        status_socket: socket.socket | None = None,
        daemons: Daemons | None = None,
        starting_point: StartingPoint | None = None,
    ) -> None:
        self.recipe, self.prepared, self.directory, self.telemetry = recipe, prepared, directory, telemetry
        self.old_logprobs_note, self.status_socket = old_logprobs_note, status_socket
        self.starting_point = starting_point or StartingPoint(None, load_state(None))
        self.waits = Waits(telemetry.waiting, directory.logs)
        self.state = RunState(directory.checkpoints, recipe.train, show_wait=self.waits.show, report=partial(telemetry.event, "checkpoint"))
        self.stop_handler = StopHandler(self.state, partial(telemetry.event, "stop"), daemons)
        self.store = open_version_store(directory.path, recipe, prepared.model.shape)
        self.reference = directory.path / REFERENCE
        self.trains_rl = "rl" in recipe.train.stages

    async def run(self) -> int | None:
        """Run all stages. Returns the number of the signal that stopped the run before the end of its last stage; else None.

        If the run is stopped within a stage, writes a checkpoint first.
        """
        if (note := context_note(self.recipe.model)) is not None:
            self.telemetry.event("model", note)
        for caution in cautions_of(self.recipe):
            self.telemetry.event("caution", caution)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self.stop_handler.handle_signals())
            self.store.claim()
            stack.callback(self.store.close)
            if self.trains_rl and (gateway_socket := bind_gateway(self.recipe.rollout)) is not None:
                self.gateway_socket = stack.enter_context(contextlib.closing(gateway_socket))
            stack.callback(asyncio.create_task(self.waits.run(), name="waits").cancel)
            if self.status_socket is not None:
                await stack.enter_async_context(serving(create_status_app(self.telemetry.live, self._replica_counts), self.status_socket))
                self.telemetry.event("start", f"status page: {address_of(self.status_socket)}")
            report_copy = partial(self.telemetry.event, "copy")
            if (copier := start_copier(self.recipe, self.directory, self.starting_point.checkpoint, report_copy)) is not None:
                self.state.copier = copier
                stack.push_async_callback(self._finish_copies, copier)
            reservation = await reserve_bundles(self.recipe, self.waits, self.state.stop_requested)
            if reservation is None:
                return self.stop_handler.number
            self.placement, self.bundles = reservation
            self.telemetry.event("start", f"placement: {self.bundles.summary()}")
            if self.recipe.train.needs_rollout and self.recipe.rollout.elastic:
                report = partial(self.telemetry.event, "rollout")
                self.elastic = ElasticRollout(self.recipe.rollout, self.directory, self.bundles, self.state, self.waits, report)
                await stack.enter_async_context(self.elastic.watch())
            trainer = TrainerGroup(self.recipe, self.placement, self.bundles)
            self.recovery = TrainerRecovery(
                self.recipe, trainer, self.state, self.telemetry, self.waits, folder=self.prepared.model.path, reference=self.reference
            )
            self.services = Services(self.recipe, self.prepared, self.placement, self.bundles, self.store, self.waits, self.telemetry)
            # The supervised stage does not need the engines, and runs while they start.
            startup_task = asyncio.create_task(self._start_actors(stack)) if self.recipe.train.needs_rollout else None
            try:
                await self._run_stages(trainer, startup_task)
            except MtpctlError:
                await self._save_after_failure(trainer)
                raise
            finally:
                if startup_task is not None and not startup_task.done():
                    startup_task.cancel()
                    await asyncio.gather(startup_task, return_exceptions=True)
            # A checkpoint is written at the end of each stage, and between stages the trainer has no optimizer.
            if self.state.stop_requested.is_set() and self.state.within_stage:
                path = await self.state.retry_while_disk_full(lambda: self.state.checkpoint_at_stop(trainer))
                result = f"checkpoint {path}" if path else "train.keep_checkpoints is 0: it cannot be resumed"
                self.telemetry.event("stop", f"stopped in {self.state.stage} at step {self.state.step}; {result}")
                return self.stop_handler.number
            remaining_stages = [stage for stage in self.recipe.train.stages if stage not in self.state.ended]
            if self.state.stop_requested.is_set() and remaining_stages:
                self.telemetry.event("stop", f"stopped at the end of {self.state.stage}; {remaining_stages[0]} has not begun")
                return self.stop_handler.number
        return None

    async def _finish_copies(self, copier: CheckpointCopier) -> None:
        with self.waits.show(f"checkpoints: copying to {copier.store.url}"):
            await copier.finish()

    async def _save_after_failure(self, trainer: TrainerGroup) -> None:
        """Write a checkpoint of a stage that has failed, if the trainer still can."""
        try:
            path = await self.state.save_after_failure(trainer)
        except (RuntimeFailure, OSError) as error:
            self.telemetry.event("stop", f"no checkpoint could be written at step {self.state.step}: {error}")
        else:
            if path is not None:
                self.telemetry.event("stop", f"failed in {self.state.stage} at step {self.state.step}; checkpoint {path}")

    async def _start_actors(self, stack: contextlib.AsyncExitStack) -> tuple[ReplicaPool, LogprobServer | None]:
        """Start the rollout engines and, if configured, the log-prob server."""
        if not (self.recipe.runs_logprob_server):
            return await self._start_rollout(stack), None
        rollout_start = asyncio.create_task(self._start_rollout(stack))
        logprob_start = asyncio.create_task(self.services.start_logprob(stack))
        try:
            return await asyncio.gather(rollout_start, logprob_start)
        finally:
            # If one start fails, the other must not continue: it would add actors to a stack that has ended.
            for task in (rollout_start, logprob_start):
                task.cancel()
            await asyncio.gather(rollout_start, logprob_start, return_exceptions=True)

    async def _start_rollout(self, stack: contextlib.AsyncExitStack) -> ReplicaPool:
        self.pool = await self.services.start_rollout(stack)
        if self.elastic is not None:
            await stack.enter_async_context(self.elastic.scale(self.pool.membership, create_engine_claim(self.placement)))
        return self.pool

    def _replica_counts(self) -> ReplicaCounts | None:
        """The counts of rollout replicas for the status page; None before they are started."""
        if self.pool is None:
            return None
        replica_range, membership = self.recipe.rollout.replica_range, self.pool.membership
        requested = replica_range.max if self.elastic is None else self.elastic.requested_replicas
        return ReplicaCounts(membership.num_serving, requested, replica_range.min, replica_range.max, membership.num_restarts)

    async def _run_stages(self, trainer: TrainerGroup, startup_task: ActorStartup | None) -> None:
        self.telemetry.event("start", f"trainer: {self.recipe.train.parallel.world_size} rank(s)")
        with self.waits.show("trainer: loading the model", "trainer rank 0"):
            try:
                counts = await trainer.build(self.prepared.model.path)
            except TrainerLost as error:
                counts = await self.recovery.recover_start(error)
        self.telemetry.event("start", f"trainer ready: {counts['parameters']:,} parameters, {counts['trained']:,} of them trained")
        checkpoint = self.starting_point.checkpoint
        self.state.load(self.starting_point.state)
        within_stage = self.state.within_stage
        if checkpoint is not None and not within_stage:
            await self._restore(trainer, checkpoint)
        for stage in self.recipe.train.stages:
            if stage in self.state.ended:
                continue
            resumed_checkpoint = checkpoint if within_stage and stage == self.state.stage else None
            self.state.begin(stage)
            has_begun = False
            while True:
                try:
                    if not has_begun:
                        await self._begin_stage(stage, trainer, resumed_checkpoint)
                    has_begun = True
                    await self._run_stage(stage, trainer, startup_task, resumed_checkpoint)
                    break
                except TrainerLost as error:
                    # Recovery has already begun the stage in the new trainer.
                    resumed_checkpoint, has_begun = await self.recovery(error, redraw_prompts=True), True
            if self.state.stop_requested.is_set():
                return

    async def _begin_stage(self, stage: str, trainer: TrainerGroup, resumed_checkpoint: Path | None) -> None:
        """Begin a stage in the trainer, or continue it from a checkpoint."""
        await self.state.retry_while_disk_full(lambda: trainer.begin_stage(stage, self.reference, resumed=resumed_checkpoint is not None))
        if resumed_checkpoint is not None:
            await self._restore(trainer, resumed_checkpoint)
            note = f"; {self.old_logprobs_note}" if stage == "rl" and self.old_logprobs_note else ""
            self.telemetry.event("resume", f"{stage} resumes after step {self.state.step}, from {resumed_checkpoint.name}{note}")

    async def _run_stage(
        self, stage: str, trainer: TrainerGroup, startup_task: ActorStartup | None, resumed_checkpoint: Path | None
    ) -> None:
        """Run a stage to its end, including its last checkpoint, or until a stop is requested.

        `resumed_checkpoint`: the checkpoint of this stage to continue from. Raises TrainerLost if the trainer is lost before the first or
        after the last update.
        """
        if stage == "sft":
            recipe, prepared, telemetry, state = self.recipe, self.prepared, self.telemetry, self.state
            await SftStage(recipe, prepared, trainer, telemetry, state, startup_task=startup_task, recover=self.recovery).run()
        elif stage == "draft":
            await self._run_draft(trainer, startup_task)
        else:
            assert startup_task is not None
            if await finished_before(startup_task, self.state.stop_requested):
                await self._run_rl(trainer, *startup_task.result(), resumed_checkpoint)
        if not self.state.stop_requested.is_set():
            self.state.ended.append(stage)
            await self.state.retry_while_disk_full(lambda: self.state.checkpoint(trainer))

    async def _run_draft(self, trainer: TrainerGroup, startup_task: ActorStartup | None) -> None:
        generator = None
        if self.recipe.train.draft.samples:
            assert startup_task is not None
            if not await finished_before(startup_task, self.state.stop_requested):
                return
            generator, _server = startup_task.result()
        stage = DraftStage(
            self.recipe,
            self.prepared,
            trainer,
            self.telemetry,
            self.state,
            recover=self.recovery,
            generator=generator,
            file=self.directory.path / SAMPLES_FILE,
        )
        await stage.run()

    async def _restore(self, trainer: TrainerGroup, checkpoint: Path) -> None:
        with self.waits.show(f"trainer: restoring {checkpoint.name}", "trainer rank 0"):
            await trainer.restore(checkpoint)

    async def _run_rl(self, trainer: TrainerGroup, rollout: ReplicaPool, server: LogprobServer | None, checkpoint: Path | None) -> None:
        recipe, prepared, event = self.recipe, self.prepared, self.telemetry.event
        scorer: OldLogprobScorer | None = None
        if server is not None:
            replay = recipe.replay(prepared.model.shape)
            scorer = OldLogprobScorer(server, recipe.rollout.temperature, answer_deadline(recipe.cluster), replay=replay)

        def service_metrics() -> dict[str, float]:
            return {"rollout/replicas": float(rollout.membership.num_serving)} | ({} if scorer is None else scorer.metrics())

        sync = WeightSync(recipe, trainer, rollout, server, self.store.root, metrics=service_metrics)

        async def recover(error: TrainerLost, *, redraw_prompts: bool = False) -> None:
            await self.recovery(error, redraw_prompts=redraw_prompts)
            await sync.reset()

        async with contextlib.AsyncExitStack() as stack:
            rewards = await start_rewards(recipe, stack, report=partial(event, "reward"), log=self.directory.logs / "reward.log")
            generator = await stack.enter_async_context(
                open_generator(
                    recipe.rollout,
                    rollout,
                    prepared.tokenizer,
                    context=prepared.context,
                    name=recipe.name,
                    report=partial(event, "agent"),
                    log=self.directory.logs / "agent.log",
                    key_file=self.directory.path / "gateway.key",
                    listener=self.gateway_socket,
                )
            )
            teacher = await self.services.start_teacher(stack, server)
            freeze_heap()
            stage = RlStage(
                recipe, prepared, trainer, generator, sync, rewards, self.telemetry, self.state, scorer, recover=recover, teacher=teacher
            )
            if self.elastic is not None:
                self.elastic.on_wait = stage.rollout.record_progress
            if checkpoint is not None and (checkpoint / BUFFER_FILE).exists():
                await stage.resume_buffer(*SampleBuffer.load(checkpoint / BUFFER_FILE))
            with self.waits.show("weights: the first sync"):
                await stage.publish()
            await stage.run()
        await sync.wait_copied()
