"""The progress of a run, and the controller's part of its checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from mtpctl.checkpoint.finding import BUFFER_FILE, RUN_FILE, check_checkpoint, find_complete_checkpoint, newest_checkpoint
from mtpctl.checkpoint.listing import Damaged, Entry, entry_of_text
from mtpctl.cluster.deadlines import await_within
from mtpctl.controller.buffer import SampleBuffer
from mtpctl.data.problems import CursorState
from mtpctl.errors import RuntimeFailure, SaveFailed, UserError
from mtpctl.recipe.train import TrainConfig
from mtpctl.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    from mtpctl.controller.copies import CheckpointCopier
    from mtpctl.controller.trainers import TrainerGroup

Report = Callable[[str], None]
ShowWait = Callable[[str], contextlib.AbstractContextManager[object]]
"""Returns a context manager that shows a message as long as the run waits in its block."""
_UNSAVED = -1
"""Value of `RunState.saved_step` after a failed checkpoint."""
RETRY_S = 10.0
"""Minimum time between attempts to write a checkpoint after a failure, in seconds."""
MAX_FAILURES, FAILURE_PERIOD_S = 3, 300.0
"""The run fails after `MAX_FAILURES` failures in a row that span at least `FAILURE_PERIOD_S` seconds."""
LAST_SAVE_S = 300.0
"""Time limit of the checkpoint of a failed stage, in seconds. The stage may have failed because the trainer hangs."""


class SavedState(TypedDict):
    """The fields of `RunState` that a checkpoint contains."""

    stage: str
    step: int
    version: int
    synced_at: int
    cursor: CursorState | None
    losses: list[float]
    ended: list[str]


def read_ended_stages(root: Path) -> list[str]:
    """The stages that had ended at the newest checkpoint under `root`. Raises UserError if all checkpoints are damaged."""
    return list(load_state(newest_checkpoint(root))["ended"])


def find_newest_version(root: Path, report: Report) -> tuple[Path | None, int]:
    """The newest checkpoint whose checksums match, and its weight version; (None, 0) without a checkpoint. Reports newer, damaged ones."""
    choice = find_complete_checkpoint(root, verify_checksums=True)
    for line in choice.lines:
        report(line)
    return choice.path, int(load_state(choice.path)["version"])


def resolve_checkpoint(text: str, *other_kinds: str, report: Report) -> tuple[Path, Path, int]:
    """Resolve `--from`, which names a checkpoint or a run. Returns the run directory, the checkpoint and its weight version.

    For a run, its newest checkpoint is used. Raises UserError for a run without a checkpoint, for a damaged checkpoint, and for any other
    path. `other_kinds`: other kinds of paths that the caller accepts, for the error message.
    """
    path = Path(text).absolute()
    if (path / RUN_FILE).is_file():
        try:
            check_checkpoint(path, verify_checksums=True)
        except Damaged as damage:
            raise UserError(f"--from: {path}/{damage}; name another checkpoint, or the run to use its newest undamaged one") from damage
        try:
            return path.parent.parent, path, int(load_state(path)["version"])
        except (KeyError, TypeError) as error:
            raise UserError(f"--from: {text} is an incomplete checkpoint; name another") from error
    recipe = RunDirectory(path).recipe
    if not recipe.is_file():
        accepted_kinds = (f"a run directory ({recipe.name})", f"a checkpoint ({RUN_FILE})", *other_kinds)
        raise UserError(f"--from: {text} is neither {' nor '.join(accepted_kinds)}")
    checkpoint, version = find_newest_version(RunDirectory(path).checkpoints, report)
    if checkpoint is None:
        raise UserError(f"--from: {text} has no checkpoint yet")
    return path, checkpoint, version


def load_resume_state(checkpoint: Path | None, train: TrainConfig) -> SavedState:
    """The state in a checkpoint, or that of a new run.

    If `train` now has more updates for the stage that ended last, the stage continues.
    """
    state = load_state(checkpoint)
    if checkpoint is not None and continues_last_stage(state["stage"], state["step"], state["ended"], train):
        state["ended"].remove(state["stage"])
    return state


def continues_last_stage(stage: str, step: int, ended: Sequence[str], train: TrainConfig) -> bool:
    """Whether `train` has more updates for the stage that ended last, unless `until_loss` may have ended it."""
    has_updates = step < getattr(train, stage).steps
    return bool(has_updates) and list(ended[-1:]) == [stage] and not (stage == "sft" and train.sft.until_loss)


def check_stages(checkpoint: Path | None, state: SavedState, stages: Sequence[str]) -> None:
    """Raise UserError if the checkpoint is within a stage that is not among `stages`, because that stage's training would be lost."""
    stage = state["stage"]
    if stage and stage not in (*state["ended"], *stages):
        raise UserError(
            f"train.stages: {checkpoint} is within {stage}, which is missing; add it, with train.{stage}.steps: {state['step']} to end it "
            "there, or use another run_dir"
        )


def load_state(checkpoint: Path | None) -> SavedState:
    """The state in a checkpoint, or that of a new run. Raises UserError if it cannot be read."""
    if checkpoint is None:
        return SavedState(stage="", step=0, version=0, synced_at=-1, cursor=None, losses=[], ended=[])
    try:
        state: SavedState = json.loads((checkpoint / RUN_FILE).read_text())
        if not isinstance(state, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoint / RUN_FILE} is truncated or overwritten; name another checkpoint") from error
    return state


@dataclass
class RunState:
    """The progress of a run. A checkpoint contains the fields of `SavedState`.

    Attributes:
        stage: in progress, or the last one that ended.
        step: updates of `stage` so far.
        version: the latest published weight version.
        synced_at: the step (not the time) of this stage after which `version` was published; -1 before the first.
        cursor: the position in the training problems.
        losses: the latest losses of a supervised stage.
        ended: the stages that have ended.
        buffer: the stage's sample buffer, if it has one. Saved in checkpoints.
        pending_checkpoint: the checkpoint that is being written.
        is_updating: an update is in progress, so the weights may be ahead of `step`.
        weights_lost: no trainer has the weights of `step`.
        saved_step: the step of the newest checkpoint of this stage, or the step at which the stage began; `_UNSAVED` after a failure.
        sent_version: the version that was sent last, even if not every target received it. It is never reused for other weights.
        saved_at: when the newest checkpoint was written, or the stage began (`time.monotonic`).
        failure_times: when attempts to write a checkpoint failed since the last one that succeeded (`time.monotonic`).
        stop_requested: set when a stop is requested. Stages return at their next step.
        show_wait: shows the reason of a wait.
        report: logs a line.
        copier: copies published checkpoints to object storage, if configured.
    """

    root: Path
    train: TrainConfig
    stage: str = ""
    step: int = 0
    version: int = 0
    synced_at: int = -1
    cursor: CursorState | None = None
    losses: list[float] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    buffer: SampleBuffer | None = None
    pending_checkpoint: Path | None = None
    is_updating: bool = False
    weights_lost: bool = False
    saved_step: int = 0
    sent_version: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    failure_times: list[float] = field(default_factory=list)
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    show_wait: ShowWait = contextlib.nullcontext
    report: Report = lambda line: None
    copier: CheckpointCopier | None = None
    _buffer_write: asyncio.Future[Entry] | None = None
    _file_entries: dict[str, Entry] = field(default_factory=dict)
    """Sizes and checksums of the controller's files in the checkpoint that is being written."""

    @property
    def _next_path(self) -> Path:
        """The folder of a checkpoint of the current step."""
        return self.root / f"{self.stage}-{self.step:06d}{'-end' if self.stage in self.ended else ''}"

    @property
    def within_stage(self) -> bool:
        """Whether a stage has begun and not ended."""
        return bool(self.stage) and self.stage not in self.ended

    def begin(self, stage: str) -> None:
        """Begin a stage, at its first step unless the run was resumed within it."""
        if self.stage != stage:
            self.stage, self.step, self.synced_at, self.cursor, self.losses, self.buffer = stage, 0, -1, None, [], None
        self.is_updating, self.saved_step, self.saved_at = False, self.step, time.monotonic()

    def load(self, saved_state: SavedState) -> None:
        """Load the state of the checkpoint that the run resumes from."""
        for name, value in saved_state.items():
            if name in SavedState.__annotations__:
                setattr(self, name, list(value) if isinstance(value, list) else value)

    def reset_to(self, checkpoint: Path | None, *, redraw_prompts: bool) -> bool:
        """Reset the state to `checkpoint`, because the trainer was lost. The weight version is not reset.

        Returns whether the checkpoint is within this stage; if it is not, the stage begins again. `redraw_prompts`: see `RecoverTrainer`.
        """
        if self.pending_checkpoint is not None:
            shutil.rmtree(self.pending_checkpoint.with_name(f"{self.pending_checkpoint.name}.partial"), ignore_errors=True)
            self.pending_checkpoint = None
        if self._buffer_write is not None:
            # The write may fail, because its folder is removed. asyncio warns of an exception that is not retrieved.
            self._buffer_write.add_done_callback(lambda write: write.exception())
            self._buffer_write = None
        saved_state = load_resume_state(checkpoint, self.train)
        within_stage = saved_state["stage"] == self.stage and self.stage not in saved_state["ended"]
        self.step, self.losses = (saved_state["step"], saved_state["losses"]) if within_stage else (0, [])
        if redraw_prompts:
            self.cursor = saved_state["cursor"] if within_stage else None
        self.ended, self.synced_at, self.is_updating = saved_state["ended"], -1, False
        self.saved_step, self.saved_at = self.step, time.monotonic()
        return within_stage

    async def checkpoint_if_due(self, trainer: TrainerGroup) -> None:
        """Publish a checkpoint that has been written in the background, and begin the next one if it is due.

        If it cannot be written, the run continues and a later call tries again. Raises RuntimeFailure after too many failures.
        """
        try:
            await self.publish_pending(trainer, wait=False)
            if self._is_due():
                await self.checkpoint(trainer, wait=not self.train.async_save)
        except SaveFailed as failure:
            self._record_failure(failure, "training continues, and a later update writes the next checkpoint")

    def _is_due(self) -> bool:
        now = time.monotonic()
        if self.failure_times:
            return self.pending_checkpoint is None and now - self.failure_times[-1] >= RETRY_S
        is_due_by_step = self.train.checkpoint_every and self.step % self.train.checkpoint_every == 0
        is_due_by_time = self.train.checkpoint_minutes and now - self.saved_at >= 60 * self.train.checkpoint_minutes
        return bool(is_due_by_step or is_due_by_time)

    def _record_failure(self, failure: SaveFailed, consequence: str) -> None:
        """Record that a checkpoint could not be written, and report it. Raises RuntimeFailure after too many failures."""
        now = time.monotonic()
        self.pending_checkpoint, self.saved_step = None, _UNSAVED
        self.failure_times.append(now)
        num_failures, seconds = len(self.failure_times), now - self.failure_times[0]
        if num_failures >= MAX_FAILURES and seconds >= FAILURE_PERIOD_S:
            raise _give_up_error(failure, num_failures, seconds) from failure
        self.report(f"{failure}; {consequence}")

    async def checkpoint(self, trainer: TrainerGroup, *, wait: bool = True) -> Path | None:
        """Write model, optimizer, this state and the buffer as a checkpoint, and publish it as the newest one when it is complete.

        If `wait` is false, a later `publish_pending` publishes it. One checkpoint is written at a time. Returns its folder, or None if the
        recipe keeps no checkpoints. Raises SaveFailed if it cannot be written; a failure of the previous checkpoint is only reported.
        """
        if not self.train.keep_checkpoints:
            return None
        try:
            await self.publish_pending(trainer)
        except SaveFailed as failure:
            self._record_failure(failure, "the next checkpoint replaces it")
        path = self._next_path
        with self.show_wait(f"trainer: saving {path.name}"):
            folder = await trainer.begin_save(path)
        # State and buffer are snapshots of this moment; rollout continues while the buffer is written.
        state_json = json.dumps({name: getattr(self, name) for name in SavedState.__annotations__})
        async with self._write_or_abandon(trainer, path):
            (folder / RUN_FILE).write_text(state_json)
        self._file_entries = {RUN_FILE: entry_of_text(state_json)}
        if self.buffer is not None:
            self._buffer_write = asyncio.ensure_future(asyncio.to_thread(self.buffer.snapshot_writer(folder / BUFFER_FILE)))
        self.pending_checkpoint, self.saved_step = path, self.step
        if wait:
            await self.publish_pending(trainer)
        # The interval starts after the write: otherwise a large model, whose checkpoints take minutes, would only write checkpoints.
        self.saved_at = time.monotonic()
        return path

    async def checkpoint_at_stop(self, trainer: TrainerGroup) -> Path | None:
        """Write the checkpoint of a run that stops. Returns and raises like `checkpoint`.

        If the run stops before a resumed RL stage has read its buffer, the checkpoint that it resumed from is kept: another one of the same
        step would lack the buffer.
        """
        path = self._next_path
        if self.buffer is None and self.step == self.saved_step and self.pending_checkpoint is None and path.is_dir():
            return path
        return await self.checkpoint(trainer)

    async def retry_while_disk_full[T](self, save: Callable[[], Awaitable[T]]) -> T:
        """Call `save`, and retry while the disk is full. Raises RuntimeFailure after `FAILURE_PERIOD_S`."""
        started_at, num_attempts = time.monotonic(), 0
        while True:
            try:
                return await save()
            except SaveFailed as failure:
                self.pending_checkpoint, self.saved_step, num_attempts = None, _UNSAVED, num_attempts + 1
                if time.monotonic() - started_at + RETRY_S > FAILURE_PERIOD_S:
                    raise _give_up_error(failure, num_attempts, FAILURE_PERIOD_S) from failure
                if num_attempts == 1:
                    retries = f"every {RETRY_S:.0f} seconds for {FAILURE_PERIOD_S / 60:.0f} minutes"
                    self.report(f"{failure}; free disk space: the checkpoint is written again {retries}")
                await asyncio.sleep(RETRY_S)

    @contextlib.asynccontextmanager
    async def _write_or_abandon(self, trainer: TrainerGroup, path: Path) -> AsyncIterator[None]:
        """Write the controller's part of a checkpoint in the block. If that fails, abandons the trainer's part and raises SaveFailed."""
        try:
            yield
        except OSError as error:
            self.pending_checkpoint, self.saved_step = None, _UNSAVED
            await trainer.abandon_save()
            raise SaveFailed(f"checkpoint {path} was not written: {error.strerror}") from error

    def checkpoint_copy_metrics(self) -> dict[str, float]:
        """Metrics of the copies of checkpoints since the last call; empty if the recipe configures no copies."""
        return {} if self.copier is None else self.copier.metrics()

    async def save_after_failure(self, trainer: TrainerGroup) -> Path | None:
        """Write a checkpoint of a stage that has failed.

        Returns None if there was no update since the newest checkpoint, if the trainer is within an update or its weights are lost, or if
        the recipe keeps no checkpoints. A checkpoint that is being written is published, unless the weights are lost.

        Raises RuntimeFailure if the trainer does not write it within `LAST_SAVE_S`.
        """
        if not self.within_stage or self.weights_lost:
            return None
        if self.is_updating or self.step == self.saved_step:
            await await_within(self.publish_pending(trainer), LAST_SAVE_S, "checkpoint")
            return None
        return await await_within(self.checkpoint(trainer), LAST_SAVE_S, "checkpoint")

    async def publish_pending(self, trainer: TrainerGroup, *, wait: bool = True) -> None:
        """Wait for the checkpoint that is being written, and publish it; if `wait` is false, only if it is complete. Raises SaveFailed."""
        if self.pending_checkpoint is None:
            return
        if self._buffer_write is not None:
            if not wait and not self._buffer_write.done():
                return
            buffer_write, self._buffer_write = self._buffer_write, None
            async with self._write_or_abandon(trainer, self.pending_checkpoint):
                self._file_entries[BUFFER_FILE] = await buffer_write
        with self.show_wait(f"trainer: writing {self.pending_checkpoint.name}"):
            is_complete = await trainer.finish_save(wait=wait, entries=self._file_entries)
        if is_complete:
            path, step = self.pending_checkpoint, self.saved_step
            checkpoints_in_use = [] if self.copier is None else self.copier.checkpoints_in_use
            await trainer.publish_checkpoint(path, self.train.keep_checkpoints, checkpoints_in_use)
            if self.copier is not None:
                self.copier.queue(path)
            self.pending_checkpoint, self.failure_times = None, []
            if self.buffer is not None:
                self.buffer.forget(step)  # The samples of updates up to this step are not needed again.


def _give_up_error(failure: SaveFailed, num_attempts: int, seconds: float) -> RuntimeFailure:
    return RuntimeFailure(
        f"{failure}; {num_attempts} attempts in {seconds / 60:.0f} minutes failed; free space and start the same command again"
    )
