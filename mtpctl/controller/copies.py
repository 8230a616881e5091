"""Copies of checkpoints in object storage (`train.checkpoint_copy`): written beside training, fetched by a run that has no checkpoint."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mtpctl.checkpoint.copying import CopyWriter, fetch, newest_copy
from mtpctl.checkpoint.finding import newest
from mtpctl.checkpoint.listing import Damaged
from mtpctl.checkpoint.object_store import FIELD, ObjectStore, StoreFailed
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.recipe import yaml12
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.run_directory import RECIPE, RunDirectory

FIRST_S, MOST_S = 1.0, 60.0
"""Seconds between two tries: after the first failure, and at most."""
END_S = 300.0
"""Seconds for which a run that ends goes on trying where the store fails."""
FETCH_TRIES = 5
LOOK_S = 0.05

Tell = Callable[[str], None]


class Copies:
    """Copies checkpoints from a thread of its own, always the newest one that waits.

    A store that fails stops nothing: it is tried again, after longer and longer pauses, and `tell` gets a line when it begins to fail and
    when it is back.
    """

    def __init__(self, store: ObjectStore, run_dir: Path, keep: int, tell: Tell) -> None:
        self.store, self._tell = store, tell
        self._writer = CopyWriter(store, run_dir, keep)
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._copying: Path | None = None
        self._ending: float | None = None  # until when a store that fails is tried
        self._failed_since_told = 0  # tries
        self._failures, self._behind = 0, 0
        self._seconds: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint copies", daemon=True)
        self._thread.start()

    def take(self, checkpoint: Path) -> None:
        """Have a whole checkpoint copied, in place of one that still waits. Returns at once."""
        with self._changed:
            self._waiting = checkpoint
            self._behind += 1
            self._changed.notify_all()

    @property
    def needed(self) -> Sequence[str]:
        """Names of the checkpoints that must not be deleted: the one that is copied, and the one that waits."""
        with self._changed:
            return [path.name for path in (self._copying, self._waiting) if path is not None]

    def metrics(self) -> dict[str, float]:
        """How many checkpoints the copy lacks, the tries that failed since the last call, and the seconds of a copy that was made since."""
        with self._changed:
            found = {"checkpoint/copy_failures": float(self._failures), "checkpoint/copy_behind": float(self._behind)}
            if self._seconds is not None:
                found["timing_s/checkpoint_copy"] = self._seconds
            self._failures, self._seconds = 0, None
        return found

    async def finish(self) -> None:
        """Return once the newest checkpoint is copied, or the store has failed for `END_S`, which is told."""
        with self._changed:
            self._ending = time.monotonic() + END_S
            self._changed.notify_all()
        while self._thread.is_alive():  # `to_thread` would make a second Ctrl-C wait for it.
            await asyncio.sleep(LOOK_S)
        if self._error is not None:
            raise self._error
        if self._behind:
            self._tell(f"the newest checkpoint was not copied to {self.store.url}; start the same command again once it answers")

    def _run(self) -> None:
        try:
            while (checkpoint := self._next()) is not None:
                self._copy(checkpoint)
        except BaseException as error:  # a bug: `finish` raises it
            self._error = error

    def _next(self) -> Path | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._ending is not None)
            self._copying, self._waiting = self._waiting, None
            return self._copying

    def _copy(self, checkpoint: Path) -> None:
        """Copy it, in as many tries as it takes; one that fails gives way to a newer one that waits."""
        pause = FIRST_S
        with self._changed:
            owed = self._behind
        while True:
            began = time.monotonic()
            try:
                sent = self._writer.copy(checkpoint)
            except (StoreFailed, OSError) as error:
                self._note_failure(error)
            except Damaged as damage:
                self._give_up(f"{checkpoint.parent.parent}/{damage}; {checkpoint.name} is not copied", owed)
                return
            else:
                self._note_copied(checkpoint, sent, time.monotonic() - began, owed)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None, pause if self._ending is None else min(pause, FIRST_S))
                if self._waiting is not None or (self._ending is not None and time.monotonic() > self._ending):
                    return
            pause = min(2 * pause, MOST_S)

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            self._failed_since_told += 1
            first = self._failed_since_told == 1
        if first:
            self._tell(f"{error}; training goes on, and it is tried again")

    def _give_up(self, message: str, owed: int) -> None:
        """Report that a checkpoint is not copied, because it is damaged."""
        with self._changed:
            self._behind -= owed
            self._copying = None
        self._tell(message)

    def _note_copied(self, checkpoint: Path, sent: int, seconds: float, owed: int) -> None:
        with self._changed:
            tries, self._failed_since_told = self._failed_since_told, 0
            self._behind -= owed
            self._copying = None
            self._seconds = seconds
        if tries:
            self._tell(f"{checkpoint.name} is in {self.store.url}, after {tries} tries that failed")


def store_of(recipe: Recipe) -> ObjectStore | None:
    """The place of the recipe's copies, None where it asks for none. Raises what `ObjectStore` does."""
    return None if recipe.copy_url is None else ObjectStore(recipe.copy_url)


def check_copies(recipe: Recipe) -> None:
    """Check that copies can be written, and are of this run.

    Raises UserError where there is no such bucket, or the copy is another run's; EnvironmentMissing where a package is missing, the
    credentials are refused, or the store does not answer although the run has no checkpoint here that it could go on from.
    """
    store = store_of(recipe)
    if store is None:
        return
    try:
        store.check()
        text = store.read(RECIPE)
    except StoreFailed as error:
        if _has_checkpoint(RunDirectory(recipe.run_path)):
            return  # The run goes on, and says that it cannot be copied yet.
        told = f"{store.url} does not answer ({error.reason}), and may hold the checkpoint that this run goes on from"
        raise EnvironmentMissing(f"{FIELD}: {told}; start again once it does, or remove the key") from error
    if text is not None:
        name = yaml12.parse(text.decode("utf-8", errors="replace"), f"{store.url}/{RECIPE}").value
        if isinstance(name, dict) and name.get("name") != recipe.name:
            raise UserError(
                f"{FIELD}: {store.url} holds the run {name.get('name')}, not {recipe.name}; write {{name}} into it, or name another"
            )


def _has_checkpoint(directory: RunDirectory) -> bool:
    """Whether the run has a whole checkpoint."""
    try:
        return newest(directory.checkpoints) is not None
    except UserError:  # All checkpoints are damaged.
        return False


def fetch_if_lost(recipe: Recipe, tell: Tell) -> str:
    """Where the run directory has no checkpoint and the copy has one, fetch it. Returns a line that says so, empty where nothing was done.

    Raises UserError where no checkpoint of the copy is whole, EnvironmentMissing where the store fails.
    """
    store, directory = store_of(recipe), RunDirectory(recipe.run_path)
    if store is None or _has_checkpoint(directory):
        return ""
    for tries in range(1, FETCH_TRIES + 1):
        try:
            if newest_copy(store) is None:
                return ""
            began = time.monotonic()
            with RunDirectory.create(directory.path, dump_resolved(recipe)):
                name = fetch(store, directory.path, tell)
            return f"{name} was fetched from {store.url} in {time.monotonic() - began:.0f} s" if name else ""
        except StoreFailed as error:
            if tries == FETCH_TRIES:
                raise EnvironmentMissing(f"{FIELD}: {error}; start again once it answers, and what was fetched is kept") from error
            tell(f"{error}; trying again")
            time.sleep(FIRST_S * 2**tries)
    raise AssertionError("the last try returns or raises")


def copies_of(recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, tell: Tell) -> Copies | None:
    """The copies of a run, which begin with the checkpoint that it resumes from; None if the recipe has none."""
    store = store_of(recipe)
    if store is None:
        return None
    copies = Copies(store, directory.path, recipe.train.keep_checkpoints, tell)
    if checkpoint is not None:
        copies.take(checkpoint)
    return copies
