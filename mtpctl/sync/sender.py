"""The senders of weight updates: `Publisher` for transport `shm`, and `Sender` for the pushing transports `ipc` and `nccl`.

A `Publisher` writes a version into the store of this host, and receivers read it at their own pace. A `Sender` is the trainer rank from
which all receivers get their buckets. Its methods follow the states of a `WeightUpdate`: `announce` plans the version and names the group
that receivers join; `send` packs and sends while they receive; `persist` exports the version again into host memory while generation
continues, and threads write that copy to the store. Until they are done, the newest version in the store is the previous one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Unpack

import torch
from torch.distributed import TCPStore

from mtpctl.cluster.rendezvous import host_store
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.packing import Checksums, Export, Packer, PackingOptions, spec_of
from mtpctl.sync.protocol import Manifest, SyncError
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import BucketWriter, PushWriter, Sent, open_writer
from mtpctl.sync.transports.control import Address, Control
from mtpctl.sync.transports.shm import NAME as SHM
from mtpctl.sync.transports.shm import Writer

WRITERS = 8
"""Maximum number of threads that write to the store. There is one per `CORES_A_WRITER` CPU cores."""
CORES_A_WRITER = 4
PAUSE_S = 1.0
"""Seconds that a writing thread waits before each piece while a version is being sent."""


class Publisher(Packer):
    """Publishes versions into a `VersionStore` on this host."""

    def __init__(self, store: VersionStore, **options: Unpack[PackingOptions]) -> None:
        super().__init__(**options)
        self.store = store

    def publish(self, export: Export, version: int, *, checksums: bool = False) -> Manifest:
        """Pack and publish one version. Receivers see the previous version until this returns.

        Unless `plan` or `plan_from` was called, the first export is held in memory to plan from it; later ones stream. With `checksums`,
        the checksum of each tensor is included for receivers to compare.

        Raises VersionConflict unless `version` is newer, PlanMismatch if the export differs from the plan, and EnvironmentMissing if the
        store is full. A failed version is deleted.
        """
        tensors = self.cast(export)
        if not self.plans:
            exported = list(tensors)
            self.plan((spec_of(name, tensor) for name, tensor in exported), _tied(exported))
            tensors = iter(exported)
        folder = self.store.prepare(version)
        try:
            sums = self.pack(version, tensors, Writer(folder), checksums=checksums)
            address = str(Path(folder).absolute())
            manifest = Manifest(version, SHM, address, self.section_plans(sums), str(self.store.root.absolute()))
            self.store.commit(manifest)
        except BaseException:
            self.store.discard(version)
            raise
        return manifest


def _tied(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Names of tensors that share the memory of another tensor, each with that tensor's name."""
    owners: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors:
        owner = owners.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if owner != name and tensor.numel():
            tied[name] = owner
    return tied


class Sender(Packer):
    """Sends versions over `transport` from tensors on `device`, and persists them in `store`."""

    def __init__(
        self,
        store: VersionStore,
        transport: str,
        device: torch.device | str,
        *,
        deadline_s: float = 120.0,
        host: str = "",
        **options: Unpack[PackingOptions],
    ) -> None:
        super().__init__(**options)
        self.store, self.transport, self.device, self.deadline_s = store, transport, torch.device(device), deadline_s
        self._host = host
        self._rendezvous: TCPStore | None = None
        self._groups = 0
        self._members: tuple[str, ...] = ()
        self._writer: PushWriter | None = None
        self._announced: Manifest | None = None
        self._store_worker = StoreWorker(store, pinned=self.device.type == "cuda")

    def announce(self, version: int, members: list[str], checksums: Checksums | None = None) -> Manifest:
        """Plan `version` for receivers of these names, one per rank. Call `plan_from` first; its checksums are included.

        If the receivers differ from the last version's, or that transfer failed, they get a new group. Raises the error of persisting
        the previous version, if any.
        """
        self._store_worker.pause()
        writer = self._writer_for(tuple(members))
        address = str(writer.control.address)
        self._announced = Manifest(version, self.transport, address, self.section_plans(checksums or {}), str(self.store.root.absolute()))
        return self._announced

    def send(self, export: Export) -> Sent:
        """Pack and send the announced version. `export` yields section after section, in the order of the plan.

        Raises SyncError if a receiver fails, and PlanMismatch if the export differs from the plan. Either ends the group.
        """
        writer, announced = self._current()
        try:
            self.pack(announced.version, self.cast(export), writer)
            return writer.finish()
        except BaseException as error:
            self._abandon(writer, f"the sender of the weights gave up: {error}")
            raise
        finally:
            self._store_worker.resume()

    def persist(self, export: Export) -> None:
        """Copy the sent version into host memory, and start writing it to the store. The weights may change once this returns.

        There is only one such copy, so this waits until the previous version is written.
        """
        announced = self._announced
        assert announced is not None, "announce comes first"
        self._store_worker.flush()
        # Sections that are sent only once (the base weights of an adapter) no longer need a copy.
        self._store_worker.copy.retain(self.next_sections)
        self.pack(announced.version, self.cast(export), self._store_worker.copy)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._store_worker.start(announced)

    def flush(self) -> None:
        """Wait until the last persisted version is in the store. Raises the error of writing it."""
        self._store_worker.flush()

    def probe(self, number: int) -> Sent:
        """Send the buckets of the announced plan without packing, to measure the link. Receivers call `EngineTarget.probe`.

        `number` distinguishes probes.
        """
        writer, announced = self._current()
        for section, plan in announced.sections.items():
            writer.begin(-number, section)
            for bucket in plan.buckets:
                writer.buffer(section, bucket)
                writer.send(section, bucket)
        return writer.finish()

    def close(self) -> None:
        """Leave the group. The next version gets a new one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _current(self) -> tuple[PushWriter, Manifest]:
        assert self._writer is not None and self._announced is not None, "announce comes first"
        return self._writer, self._announced

    def _writer_for(self, members: tuple[str, ...]) -> PushWriter:
        """The writer for these receivers: the previous one if its group is intact and has the same members, else one for a new group."""
        if self._writer is not None:
            try:
                # A receiver may have failed after everything was sent. Its group cannot be used again.
                self._writer.control.check()
            except SyncError as error:
                self._abandon(self._writer, str(error))
        if self._writer is not None and self._members == members:
            return self._writer
        self.close()
        if self._rendezvous is None:
            self._rendezvous = host_store(self._host)
        self._groups += 1
        address = Address(self._rendezvous.host, self._rendezvous.port, f"group-{self._groups}", len(members), self.deadline_s)
        largest = max(bucket.nbytes for buckets in self.plans.values() for bucket in buckets)
        self._writer = open_writer(self.transport, Control(self._rendezvous, address), self.device, largest)
        self._members = members
        return self._writer

    def _abandon(self, writer: PushWriter, why: str) -> None:
        writer.fail(why)
        self._writer = None


class HostCopy(BucketWriter):
    """Buckets in host memory, which is allocated once and reused for each version; pinned if the trainer has a card."""

    follows_stream = True

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.buckets: dict[tuple[str, int], torch.Tensor] = {}

    def begin(self, version: int, section: str) -> None:
        """Nothing to do."""

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        key = section, bucket.index
        if key not in self.buckets:
            self.buckets[key] = torch.empty(bucket.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        return self.buckets[key]

    def send(self, section: str, bucket: Bucket) -> None:
        """Nothing to do: the bucket stays in its buffer."""

    def retain(self, sections: Collection[str]) -> None:
        """Free the memory of other sections."""
        self.buckets = {key: copy for key, copy in self.buckets.items() if key[0] in sections}


class StoreWorker:
    """Writes one version at a time from `copy` to the store, in threads that pause while the next version is sent."""

    def __init__(self, store: VersionStore, *, pinned: bool) -> None:
        self.store = store
        self.copy = HostCopy(pinned=pinned)
        self._thread: Thread | None = None
        self._failure: BaseException | None = None
        self._may_write = Event()
        self._may_write.set()

    def start(self, version: Manifest) -> None:
        """Write the content of `copy` as this version. Call `flush` before the copy is filled."""
        self._thread = Thread(target=self._write, args=(version,), name="version-store", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Slow writing down until `resume`, to leave cores and memory to a transfer. Raises the error of the previous write."""
        self._raise_failure()
        self._may_write.clear()

    def resume(self) -> None:
        """Write at full speed again."""
        self._may_write.set()

    def flush(self) -> None:
        """Wait until the last version is in the store. Raises the error of writing it."""
        if self._thread is not None:
            self.resume()
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _write(self, version: Manifest) -> None:
        try:
            folder = self.store.prepare(version.version)
            writer = Writer(folder)

            def write(key: tuple[str, Bucket]) -> None:
                section, bucket = key
                writer.put(section, bucket, self.copy.buckets[section, bucket.index], lambda: self._may_write.wait(PAUSE_S))

            # Several threads, because allocating shared memory takes one core per thread. Writing does not hold the GIL.
            with ThreadPoolExecutor(max(1, min(WRITERS, (os.cpu_count() or 1) // CORES_A_WRITER))) as pool:
                list(pool.map(write, [(section, bucket) for section, plan in version.sections.items() for bucket in plan.buckets]))
            self.store.commit(Manifest(version.version, SHM, str(folder.absolute()), version.sections, version.store))
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
