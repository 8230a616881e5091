"""A pushed version on its way into the version store, beside the trainer's next update.

The version is copied from the trainer's device into host memory, which is allocated once, and pinned where there is a card. Threads
write that copy to the store; they stand by while the next version is sent, since generation is paused for that.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import torch

from mtpctl.plan.buckets import Bucket
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import BucketWriter
from mtpctl.sync.transports.shm import NAME as SHM
from mtpctl.sync.transports.shm import Writer as StoreWriter

WRITERS = 8
"""Threads that fill the store, at most: one for each `CORES_A_WRITER`."""
CORES_A_WRITER = 4
STAND_BY_S = 1.0
"""Seconds for which a thread that fills the store waits at a time for a version that is being sent."""


class HostCopy(BucketWriter):
    """Buckets in host memory, allocated once and filled anew with each version."""

    follows_stream = True

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.held: dict[tuple[str, int], torch.Tensor] = {}

    def begin(self, version: int, section: str) -> None:
        """Nothing to do: the memory is allocated."""

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        key = section, bucket.index
        if key not in self.held:
            self.held[key] = torch.empty(bucket.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        return self.held[key]

    def send(self, section: str, bucket: Bucket) -> None:
        """Nothing to do: the bucket stays in its buffer."""

    def drop_all_but(self, sections: Collection[str]) -> None:
        """Free the memory of other sections."""
        self.held = {key: copy for key, copy in self.held.items() if key[0] in sections}


class StoreWorker:
    """Writes one version at a time from `copy` to the store, in a thread."""

    def __init__(self, store: VersionStore, *, pinned: bool) -> None:
        self.store = store
        self.copy = HostCopy(pinned=pinned)
        self._thread: Thread | None = None
        self._failure: BaseException | None = None
        self._may_write = Event()
        self._may_write.set()

    def start(self, version: Manifest) -> None:
        """Write what is in `copy` as this version. `flush` comes first: there is one copy."""
        self._thread = Thread(target=self._write, args=(version,), name="version-store", daemon=True)
        self._thread.start()

    def stand_by(self) -> None:
        """Write nothing until `go_on`: cores and memory are the transfer's. Raises what writing the version before raised."""
        self._raise_failure()
        self._may_write.clear()

    def go_on(self) -> None:
        """The transfer is over."""
        self._may_write.set()

    def flush(self) -> None:
        """Return once the last version is in the store. Raises what writing it raised."""
        if self._thread is not None:
            self.go_on()
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _write(self, version: Manifest) -> None:
        try:
            folder = self.store.prepare(version.version)
            writer = StoreWriter(folder)

            def write(place: tuple[str, Bucket]) -> None:
                section, bucket = place
                writer.put(section, bucket, self.copy.held[section, bucket.index], lambda: self._may_write.wait(STAND_BY_S))

            # Fresh pages of shared memory come at the pace of one core each; writing holds no lock of the interpreter.
            with ThreadPoolExecutor(max(1, min(WRITERS, (os.cpu_count() or 1) // CORES_A_WRITER))) as pool:
                list(pool.map(write, [(section, bucket) for section, plan in version.sections.items() for bucket in plan.buckets]))
            self.store.commit(Manifest(version.version, SHM, str(folder.absolute()), version.sections, version.store))
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
