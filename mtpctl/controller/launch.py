"""Runs a recipe from start to end: checks it, starts the actors, runs the stages, handles stops, and shuts everything down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mtpctl.checkpoint.finding import BUFFER_FILE, choose_checkpoint
from mtpctl.cluster.bundles import Bundles
from mtpctl.cluster.deadlines import finished_before
from mtpctl.cluster.hosts import Host
from mtpctl.cluster.local import Daemons, check_capacity, cluster
from mtpctl.cluster.process import freeze_heap
from mtpctl.controller.buffer import SampleBuffer
from mtpctl.controller.copies import CheckpointCopier, check_copies, check_sync_url, fetch_if_lost, start_copier
from mtpctl.controller.elastic import ElasticRollout
from mtpctl.controller.prepare import Prepared, open_version_store, prepare
from mtpctl.controller.resume import REFERENCE, Start, check_random_init, find_start, old_logprobs_change, report_completed_run
from mtpctl.controller.rl import RlStage
from mtpctl.controller.scoring import OldLogprobScorer
from mtpctl.controller.services import Services, engine_claim, reserve_bundles, start_rewards
from mtpctl.controller.sft import SAMPLES_FILE, DraftStage, SftStage
from mtpctl.controller.state import RunState, check_stages, load_resume_state, load_state
from mtpctl.controller.status import Waits, status_app, status_socket
from mtpctl.controller.trainers import TrainerGroup, TrainerLost, TrainerRecovery
from mtpctl.controller.weights import WeightSync
from mtpctl.environments.agents import bind_gateway, open_generator
from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.logprob.server import LogprobServer, answer_deadline
from mtpctl.plan.placement import Placement, place
from mtpctl.recipe.checks import cautions_of
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.model import context_note
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.installed import check_engine
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.signals import StopRequested, exit_code, raise_on_stop, stop_signals
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import ReplicaCounts
from mtpctl.telemetry.session import ResumePoint, Telemetry
from mtpctl.telemetry.trackers import check_packages
from mtpctl.web.server import address_of, serving

ActorStartup = asyncio.Task[tuple[ReplicaPool, LogprobServer | None]]


def run(recipe: Recipe, *, plain: bool = False) -> int:
    """Run the recipe. Returns the exit code: 0, or the exit code for the signal that stopped the run."""
    stage_steps: dict[str, int] = {stage: getattr(recipe.train, stage).steps for stage in recipe.train.stages}
    check_copies(recipe)
    check_sync_url(recipe)
    report = partial(print, flush=True)
    fetch_note = fetch_if_lost(recipe, report)
    earlier_run = RunDirectory(recipe.run_path)
    checkpoint = choose_checkpoint(earlier_run.checkpoints, verify_checksums=False).path
    state = load_resume_state(checkpoint, recipe.train)
    if report_completed_run(recipe, earlier_run, checkpoint, state, report):
        return 0
    if recipe.train.needs_rollout:
        check_engine(recipe)
    check_packages(recipe.telemetry)
    # The hosts of a cluster, and their free resources, are known only after joining it: until then they count as unlimited.
    place(recipe, None if recipe.cluster.address is None else [Host(float("inf"), float("inf"))])
    cpus = gpus = 0.0
    if recipe.cluster.address is None:
        # No host can join a cluster that the run starts itself, so it needs room for the maximum number of engines.
        max_placement = place(recipe, engines=recipe.rollout.replica_range.max)
        cpus, gpus = max_placement.cpus, max_placement.gpus
    check_capacity(recipe.cluster, cpus=cpus, gpus=gpus)
    is_new = not recipe.run_path.exists()
    check_stages(checkpoint, state, recipe.train.stages)
    check_random_init(recipe, earlier_run)
    old_logprobs_note = old_logprobs_change(recipe, earlier_run)
    resolved_recipe = dump_resolved(recipe)
    # Actors get absolute paths: in a joined cluster they have another working directory.
    recipe = recipe.model_copy(update={"run_dir": str(recipe.run_path.absolute())})
    with RunDirectory.create(recipe.run_path, resolved_recipe) as directory, contextlib.ExitStack() as open_sockets:
        try:
            status = status_socket(recipe.telemetry)
            if status is not None:
                open_sockets.enter_context(contextlib.closing(status))
            prepared = prepare(recipe, directory.path)
            start = find_start(recipe, directory, report)
        except MtpctlError:
            if is_new:
                shutil.rmtree(directory.path)
            raise
        # Recorded last, so that a rejected recipe is not recorded as one that ran.
        changed_keys = directory.record(resolved_recipe)
        resumed = ResumePoint(start.state["stage"], start.state["step"], start.state["ended"])
        early_stages = ["sft"] if recipe.train.sft.until_loss else []
        with Telemetry(
            directory, recipe.telemetry, plain, stage_steps=stage_steps, early_stages=early_stages, resumed=resumed
        ) as telemetry:
            if changed_keys:
                telemetry.event("recipe", f"changed since the last start: {', '.join(changed_keys)}")
            if telemetry.damage_warning:
                telemetry.event("metrics", telemetry.damage_warning)
            if fetch_note:
                telemetry.event("copy", fetch_note)
            for line in start.lines:
                telemetry.event("checkpoint", line)
            for warning in prepared.warnings:
                telemetry.event("data", warning)
            with cluster(recipe.cluster, cpus=cpus, gpus=gpus, logs=directory.logs) as daemons:
                stopped_by = asyncio.run(Run(recipe, prepared, directory, telemetry, old_logprobs_note, status, daemons, start).run())
                raise_on_stop()  # The event loop has removed its signal handlers.
                if stopped_by is None:
                    telemetry.print_summary()
    return 0 if stopped_by is None else exit_code(stopped_by)


class Run:
    """One run: starts its actors, and runs its stages in order.

    Args:
        old_logprobs_note: a message for the resume event if the source of old log-probs has changed since the last session; else empty.
        status: the bound socket of the status page, if any.
        daemons: the Ray daemons that the run has started.
        start: the checkpoint that the run resumes from; by default none.
    """

    placement: Placement
    bundles: Bundles
    recovery: TrainerRecovery
    services: Services
    gateway: socket.socket | None = None
    pool: ReplicaPool | None = None
    elastic: ElasticRollout | None = None

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        directory: RunDirectory,
        telemetry: Telemetry,
        old_logprobs_note: str = "",
        status: socket.socket | None = None,
        daemons: Daemons | None = None,
        start: Start | None = None,
    ) -> None:
        self.recipe, self.prepared, self.directory, self.telemetry = recipe, prepared, directory, telemetry
        self.old_logprobs_note, self.status = old_logprobs_note, status
        self.start = start or Start(None, load_state(None))
        self.waits = Waits(telemetry.waiting, directory.logs)
        self.state = RunState(directory.checkpoints, recipe.train, show_wait=self.waits.on, report=partial(telemetry.event, "checkpoint"))
        self.stops = StopHandler(self.state, partial(telemetry.event, "stop"), daemons)
        self.store = open_version_store(directory.path, recipe, prepared.model.shape)
        self.reference = directory.path / REFERENCE
        self.trains_rl = "rl" in recipe.train.stages

    async def run(self) -> int | None:
        """Run all stages. Returns the number of the signal that stopped the run, after a checkpoint, or None."""
        if (note := context_note(self.recipe.model)) is not None:
            self.telemetry.event("model", note)
        for caution in cautions_of(self.recipe):
            self.telemetry.event("caution", caution)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self.stops.handle_signals())
            self.store.claim()
            stack.callback(self.store.close)
            if self.trains_rl and (gateway := bind_gateway(self.recipe.rollout)) is not None:
                self.gateway = stack.enter_context(contextlib.closing(gateway))
            stack.callback(asyncio.create_task(self.waits.run(), name="waits").cancel)
            if self.status is not None:
                await stack.enter_async_context(serving(status_app(self.telemetry.live, self._replica_counts), self.status))
                self.telemetry.event("start", f"status page: {address_of(self.status)}")
            report_copy = partial(self.telemetry.event, "copy")
            if (copier := start_copier(self.recipe, self.directory, self.start.checkpoint, report_copy)) is not None:
                self.state.copier = copier
                stack.push_async_callback(self._finish_copies, copier)
            reservation = await reserve_bundles(self.recipe, self.waits, self.state.stopping)
            if reservation is None:
                return self.stops.number
            self.placement, self.bundles = reservation
            self.telemetry.event("start", f"placement: {self.bundles.summary()}")
            if self.recipe.train.needs_rollout and self.recipe.rollout.elastic:
                report = partial(self.telemetry.event, "rollout")
                self.elastic = ElasticRollout(self.recipe.rollout, self.directory, self.bundles, self.state, self.waits, report)
                await stack.enter_async_context(self.elastic.watching())
            trainer = TrainerGroup(self.recipe, self.placement, self.bundles)
            self.recovery = TrainerRecovery(
                self.recipe, trainer, self.state, self.telemetry, self.waits, folder=self.prepared.model.path, reference=self.reference
            )
            self.services = Services(self.recipe, self.prepared, self.placement, self.bundles, self.store, self.waits, self.telemetry)
            # The supervised stage does not need the engines, and runs while they start.
            startup = asyncio.create_task(self._start_actors(stack)) if self.recipe.train.needs_rollout else None
            try:
                await self._run_stages(trainer, startup)
            except MtpctlError:
                await self._save_after_failure(trainer)
                raise
            finally:
                if startup is not None and not startup.done():
                    startup.cancel()
                    await asyncio.gather(startup, return_exceptions=True)
            # A stage that has ended already has its checkpoint. A trainer outside a stage has no optimizer to save.
            if self.state.stopping.is_set() and self.state.within_stage:
                path = await self.state.retry_while_disk_full(lambda: self.state.checkpoint(trainer))
                saved = f"checkpoint {path}" if path else "train.keep_checkpoints is 0: it cannot be resumed"
                self.telemetry.event("stop", f"stopped in {self.state.stage} at step {self.state.step}; {saved}")
                return self.stops.number
        return None

    async def _finish_copies(self, copier: CheckpointCopier) -> None:
        with self.waits.on(f"checkpoints: copying to {copier.store.url}"):
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
        if not (self.recipe.logprob.standalone and self.trains_rl):
            return await self._start_rollout(stack), None
        return await asyncio.gather(self._start_rollout(stack), self.services.start_logprob(stack))

    async def _start_rollout(self, stack: contextlib.AsyncExitStack) -> ReplicaPool:
        self.pool = await self.services.start_rollout(stack)
        if self.elastic is not None:
            await stack.enter_async_context(self.elastic.scaling(self.pool.membership, engine_claim(self.placement)))
        return self.pool

    def _replica_counts(self) -> ReplicaCounts | None:
        """The counts of rollout replicas for the status page; None before they are started."""
        if self.pool is None:
            return None
        bounds, membership = self.recipe.rollout.replica_range, self.pool.membership
        requested = bounds.max if self.elastic is None else self.elastic.requested
        return ReplicaCounts(membership.serving, requested, bounds.min, bounds.max, membership.restarts)

    async def _run_stages(self, trainer: TrainerGroup, startup: ActorStartup | None) -> None:
        self.telemetry.event("start", f"trainer: {self.recipe.train.parallel.world_size} rank(s)")
        with self.waits.on("trainer: loading the model", "trainer rank 0"):
            try:
                counts = await trainer.build(self.prepared.model.path)
            except TrainerLost as lost:
                counts = await self.recovery.at_start(lost)
        self.telemetry.event("start", f"trainer ready: {counts['parameters']:,} parameters, {counts['trained']:,} of them trained")
        checkpoint = self.start.checkpoint
        self.state.load(self.start.state)
        within_stage = self.state.within_stage
        if checkpoint is not None and not within_stage:
            await self._restore(trainer, checkpoint)
        for stage in self.recipe.train.stages:
            if stage in self.state.ended:
                continue
            resumed = checkpoint if within_stage and stage == self.state.stage else None
            self.state.begin(stage)
            has_begun = False
            while True:
                try:
                    if not has_begun:
                        await self._begin_stage(stage, trainer, resumed)
                    has_begun = True
                    await self._run_stage(stage, trainer, startup, resumed)
                    break
                except TrainerLost as lost:
                    resumed, has_begun = await self.recovery(lost, redraw=True), True
            if self.state.stopping.is_set():
                return

    async def _begin_stage(self, stage: str, trainer: TrainerGroup, resumed: Path | None) -> None:
        """Begin a stage in the trainer, or continue it from a checkpoint."""
        await self.state.retry_while_disk_full(lambda: trainer.begin_stage(stage, self.reference, resumed=resumed is not None))
        if resumed is not None:
            await self._restore(trainer, resumed)
            note = f"; {self.old_logprobs_note}" if stage == "rl" and self.old_logprobs_note else ""
            self.telemetry.event("resume", f"{stage} resumes after step {self.state.step}, from {resumed.name}{note}")

    async def _run_stage(self, stage: str, trainer: TrainerGroup, startup: ActorStartup | None, resumed: Path | None) -> None:
        """Run a stage to its end, including its last checkpoint, or until a stop is requested.

        `resumed`: the checkpoint within this stage to continue from. Raises TrainerLost if the trainer is lost outside an update.
        """
        if stage == "sft":
            recipe, prepared, telemetry, state = self.recipe, self.prepared, self.telemetry, self.state
            await SftStage(recipe, prepared, trainer, telemetry, state, startup_task=startup, recover=self.recovery).run()
        elif stage == "draft":
            await self._run_draft(trainer, startup)
        else:
            assert startup is not None
            if await finished_before(startup, self.state.stopping):
                await self._run_rl(trainer, *startup.result(), resumed)
        if not self.state.stopping.is_set():
            self.state.ended.append(stage)
            await self.state.retry_while_disk_full(lambda: self.state.checkpoint(trainer))

    async def _run_draft(self, trainer: TrainerGroup, startup: ActorStartup | None) -> None:
        generator = None
        if self.recipe.train.draft.samples:
            assert startup is not None
            if not await finished_before(startup, self.state.stopping):
                return
            generator, _server = startup.result()
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
        with self.waits.on(f"trainer: restoring {checkpoint.name}", "trainer rank 0"):
            await trainer.restore(checkpoint)

    async def _run_rl(self, trainer: TrainerGroup, rollout: ReplicaPool, server: LogprobServer | None, checkpoint: Path | None) -> None:
        recipe, prepared, event = self.recipe, self.prepared, self.telemetry.event
        scorer: OldLogprobScorer | None = None
        if server is not None:
            replay = recipe.replay(prepared.model.shape)
            scorer = OldLogprobScorer(server, recipe.rollout.temperature, answer_deadline(recipe.cluster), replay=replay)

        def service_metrics() -> dict[str, float]:
            return {"rollout/replicas": float(rollout.membership.serving)} | ({} if scorer is None else scorer.metrics())

        sync = WeightSync(recipe, trainer, rollout, server, self.store.root, metrics=service_metrics)

        async def recover(lost: TrainerLost, *, redraw: bool = False) -> None:
            await self.recovery(lost, redraw=redraw)
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
                    listener=self.gateway,
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
            with self.waits.on("weights: the first sync"):
                await stage.publish()
            await stage.run()
        await sync.wait_persisted()


SIGNAL_EXIT_S = 8.0
"""Time for a run to end after a second signal, in seconds. Then its process exits, and the watchdog kills the others."""
CLUSTER_EXIT_S = 45.0
"""Time for a run to end after its cluster was lost, in seconds. Ray kills processes that have missed the GCS server for 60 s."""
POLL_S = 0.5
SHOW_CURSOR = "\x1b[?25h"


class StopHandler:
    """Stops a run on a signal: the first requests a stop after the current update, the second cancels the remaining work.

    A run whose Ray cluster is lost stops as well. Its actors still answer for a while, so the trainer can write a checkpoint.

    Attributes:
        number: the signal that requested the stop.
        daemons: the Ray daemons that the run started.
    """

    number: int | None = None

    def __init__(self, state: RunState, report: Callable[[str], None], daemons: Daemons | None = None) -> None:
        self.state, self.report, self.daemons = state, report, daemons
        self._signals = stop_signals()

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the stop signals in the running event loop, and watch the cluster, while the block runs.

        If the cluster is lost, raises RuntimeFailure instead of the errors that this causes.
        """
        for signal_number in self._signals:
            asyncio.get_running_loop().add_signal_handler(signal_number, self._on_signal, signal_number)
        block_ended = threading.Event()
        threading.Thread(target=self._watch, args=(asyncio.get_running_loop(), block_ended), name="cluster", daemon=True).start()
        try:
            yield
        except MtpctlError as error:
            if (cluster_error := self._cluster_error()) is not None:
                raise cluster_error from error
            raise
        finally:
            block_ended.set()
        if (cluster_error := self._cluster_error()) is not None and self.number is None and self.state.stopping.is_set():
            raise cluster_error

    def _on_signal(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self.state.stopping.set()
            self.report("stopping after this step; another signal stops at once")
            return
        for signal_number in self._signals:
            asyncio.get_running_loop().remove_signal_handler(signal_number)
            signal.signal(signal_number, lambda number, frame: _exit(exit_code(number), "interrupted"))
        _exit_after(SIGNAL_EXIT_S, exit_code(number), "interrupted")
        # Ends the event loop, which then cancels its tasks.
        raise StopRequested(number)

    def _watch(self, loop: asyncio.AbstractEventLoop, block_ended: threading.Event) -> None:
        """Stop the run once a daemon of its cluster has ended. Runs in a thread, because calls to the lost server block the event loop."""
        while (cluster_error := self._cluster_error()) is None:
            if block_ended.wait(POLL_S):
                return
        if block_ended.is_set():
            return
        _exit_after(CLUSTER_EXIT_S, cluster_error.exit_code, f"error: {cluster_error}")
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(self._stop_after_cluster_error, cluster_error)

    def _stop_after_cluster_error(self, cluster_error: RuntimeFailure) -> None:
        self.state.stopping.set()
        self.report(f"{cluster_error}; stopping after this step")

    def _cluster_error(self) -> RuntimeFailure | None:
        """The error if a daemon of the cluster has ended."""
        problem = None if self.daemons is None else self.daemons.ended()
        return None if problem is None else RuntimeFailure(f"Ray on this machine: {problem}; start the same command again to continue")


def _exit_after(seconds: float, code: int, line: str) -> None:
    def wait_and_exit() -> None:
        time.sleep(seconds)
        _exit(code, line)

    threading.Thread(target=wait_and_exit, name="exit", daemon=True).start()


def _exit(code: int, line: str) -> None:
    """Exit at once. The watchdog ends the daemons of the process, as after SIGKILL."""
    if sys.stdout.isatty():
        os.write(1, SHOW_CURSOR.encode())
    os.write(2, f"{line}\n".encode())
    os._exit(code)
