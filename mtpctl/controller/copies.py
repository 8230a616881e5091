"""Copies of checkpoints in object storage (`train.checkpoint_copy`): written during training, fetched by a run without a local one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mtpctl.checkpoint.copying import COPY_URL_FIELD, CopyWriter, fetch_run, newest_copy
from mtpctl.checkpoint.finding import newest_checkpoint
from mtpctl.checkpoint.listing import Damaged, OtherVersion
from mtpctl.cluster.object_store import ObjectStore, StoreFailed
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe import yaml12
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from mtpctl.sync import remote
from mtpctl.telemetry.run_directory import RECIPE, RunDirectory

FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
"""Initial and maximum delay between two attempts, in seconds."""
FINAL_RETRY_S = 300.0
"""How long a run that is ending retries a failing store, in seconds."""
FETCH_ATTEMPTS = 5
POLL_S = 0.05

Report = Callable[[str], None]


class CheckpointCopier:
    """Copies checkpoints in a background thread. Only the newest queued checkpoint is copied.

    If the store fails, training continues and the copy is retried with exponential backoff. `report` receives a line when the store begins
    to fail, when it recovers, and for each checkpoint that is not copied because it is damaged.
    """

    def __init__(self, store: ObjectStore, run_dir: Path, num_kept: int, report: Report) -> None:
        self.store, self._report = store, report
        self._writer = CopyWriter(store, run_dir, num_kept)
        self._changed = threading.Condition()
        self._queued_checkpoint: Path | None = None
        self._current_checkpoint: Path | None = None
        self._retry_deadline: float | None = None  # set when the run is ending
        self._failures_since_copy = 0
        self._num_failures, self._num_uncopied = 0, 0
        self._num_covered = 0  # number of uncopied checkpoints up to the one that is being copied
        self._seconds: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint copies", daemon=True)
        self._thread.start()

    def queue(self, checkpoint: Path) -> None:
        """Queue a complete checkpoint. It replaces one that is still queued. Does not block."""
        with self._changed:
            self._queued_checkpoint = checkpoint
            self._num_uncopied += 1
            self._changed.notify_all()

    @property
    def checkpoints_in_use(self) -> Sequence[str]:
        """Names of the checkpoints that must not be deleted: the one being copied, and the queued one."""
        with self._changed:
            return [path.name for path in (self._current_checkpoint, self._queued_checkpoint) if path is not None]

    def metrics(self) -> dict[str, float]:
        """Checkpoints since the newest copy, failed attempts since the last call, and the duration of a copy since then."""
        with self._changed:
            metrics = {"checkpoint/copy_failures": float(self._num_failures), "checkpoint/copy_behind": float(self._num_uncopied)}
            if self._seconds is not None:
                metrics["timing_s/checkpoint_copy"] = self._seconds
            self._num_failures, self._seconds = 0, None
        return metrics

    async def finish(self) -> None:
        """Wait until the newest checkpoint is copied. If the store fails for `FINAL_RETRY_S`, gives up and reports it."""
        with self._changed:
            self._retry_deadline = time.monotonic() + FINAL_RETRY_S
            self._changed.notify_all()
        while self._thread.is_alive():  # Polls: a join in `to_thread` would block a second Ctrl-C.
            await asyncio.sleep(POLL_S)
        if self._error is not None:
            raise self._error
        if self._num_uncopied:
            self._report(f"the newest checkpoint was not copied to {self.store.url}; start the same command again once it answers")

    def _run(self) -> None:
        try:
            while (checkpoint := self._next_checkpoint()) is not None:
                self._copy(checkpoint)
        except BaseException as error:  # a bug; `finish` raises it
            self._error = error

    def _next_checkpoint(self) -> Path | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queued_checkpoint is not None or self._retry_deadline is not None)
            self._current_checkpoint, self._queued_checkpoint = self._queued_checkpoint, None
            self._num_covered = self._num_uncopied
            return self._current_checkpoint

    def _copy(self, checkpoint: Path) -> None:
        """Copy a checkpoint. Retries unless it is damaged, a newer one is queued, or the deadline of an ending run has passed."""
        delay = FIRST_DELAY_S
        while True:
            started_at = time.monotonic()
            try:
                self._writer.copy(checkpoint)
            except (StoreFailed, OSError) as error:
                self._record_failure(error)
            except (Damaged, OtherVersion) as error:
                path = f"{checkpoint.parent.parent}/" if isinstance(error, Damaged) else ""
                self._record_result()
                return self._report(f"{path}{error}; {checkpoint.name} is not copied")
            else:
                num_failures = self._record_result(time.monotonic() - started_at)
                if num_failures:
                    self._report(f"{checkpoint.name} is in {self.store.url}, after {num_failures} failed attempts")
                return
            with self._changed:
                # Also ends at once when `finish` begins: `delay` may be minutes.
                is_ending = self._retry_deadline is not None
                if self._queued_checkpoint is None:
                    self._changed.wait(min(delay, FIRST_DELAY_S) if is_ending else delay)
                if self._queued_checkpoint is not None or (self._retry_deadline is not None and time.monotonic() > self._retry_deadline):
                    return
            delay = min(2 * delay, MAX_DELAY_S)

    def _record_failure(self, error: Exception) -> None:
        with self._changed:
            self._num_failures += 1
            self._failures_since_copy += 1
            is_first_failure = self._failures_since_copy == 1
        if is_first_failure:
            self._report(f"{error}; training continues, and the copy is retried")

    def _record_result(self, seconds: float | None = None) -> int:
        """Record a copy that took `seconds`; None if the checkpoint cannot be copied. Returns the number of failed attempts before it."""
        with self._changed:
            self._num_uncopied -= self._num_covered
            self._current_checkpoint = None
            if seconds is None:
                return 0
            num_failures, self._failures_since_copy = self._failures_since_copy, 0
            self._seconds = seconds
        return num_failures


def open_copy_store(recipe: Recipe) -> ObjectStore | None:
    """The object store for the recipe's copies; None if none is configured. Raises the errors of `ObjectStore`."""
    return None if recipe.copy_url is None else ObjectStore(recipe.copy_url, COPY_URL_FIELD)


def check_sync_url(recipe: Recipe) -> None:
    """Check that weight versions can be written to `sync.url`. Raises UserError, PrerequisiteMissing or StoreFailed."""
    if recipe.sync_url is not None and "rl" in recipe.train.stages:
        ObjectStore(recipe.sync_url, remote.URL_FIELD).check()


def check_copies(recipe: Recipe) -> None:
    """Check that copies can be written, and that existing ones belong to this run.

    Raises UserError if the bucket does not exist, or has copies of another run's checkpoints, and PrerequisiteMissing if the store cannot
    be used. A store that does not answer is accepted if the run has a local checkpoint.
    """
    store = open_copy_store(recipe)
    if store is None:
        return
    try:
        store.check()
        recipe_text = store.read(RECIPE)
    except StoreFailed as error:
        if _has_checkpoint(RunDirectory(recipe.run_path)):
            return  # The run starts, and reports that its checkpoints cannot be copied yet.
        problem = f"{store.url} does not answer ({error.reason}), and may have the checkpoint from which this run resumes"
        raise PrerequisiteMissing(f"{COPY_URL_FIELD}: {problem}; start again once it does, or remove the key") from error
    if recipe_text is not None:
        other_recipe = yaml12.parse(recipe_text.decode("utf-8", errors="replace"), f"{store.url}/{RECIPE}").value
        if isinstance(other_recipe, dict) and other_recipe.get("name") != recipe.name:
            problem = f"{store.url} contains the run {other_recipe.get('name')}, not {recipe.name}"
            raise UserError(f"{COPY_URL_FIELD}: {problem}; put {{name}} into the URL, or use another URL")


def _has_checkpoint(directory: RunDirectory) -> bool:
    """Whether the run has a complete checkpoint. Raises OtherVersion if another version of mtpctl saved one."""
    try:
        return newest_checkpoint(directory.checkpoints) is not None
    except OtherVersion:
        raise
    except UserError:  # all checkpoints are damaged
        return False


def fetch_if_lost(recipe: Recipe, report: Report) -> str:
    """Fetch the newest complete copied checkpoint, if the run directory has no complete one.

    Returns a message, empty if nothing was fetched. Raises UserError if none of the copies is complete, PrerequisiteMissing if the store
    fails.
    """
    store, directory = open_copy_store(recipe), RunDirectory(recipe.run_path)
    if store is None or _has_checkpoint(directory):
        return ""
    for attempt in range(1, FETCH_ATTEMPTS + 1):
        try:
            if newest_copy(store) is None:
                return ""
            started_at = time.monotonic()
            with RunDirectory.create(directory.path, dump_resolved(recipe)):
                name = fetch_run(store, directory.path, report)
            return f"{name} was fetched from {store.url} in {time.monotonic() - started_at:.0f} s" if name else ""
        except StoreFailed as error:
            if attempt == FETCH_ATTEMPTS:
                raise PrerequisiteMissing(f"{COPY_URL_FIELD}: {error}; start again once it answers; fetched files are kept") from error
            report(f"{error}; trying again")
            time.sleep(FIRST_DELAY_S * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def start_copier(recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, report: Report) -> CheckpointCopier | None:
    """Start copying for a run, first the checkpoint that it resumes from. None if the recipe configures no copies."""
    store = open_copy_store(recipe)
    if store is None:
        return None
    copier = CheckpointCopier(store, directory.path, recipe.train.keep_checkpoints, report)
    if checkpoint is not None:
        copier.queue(checkpoint)
    return copier
