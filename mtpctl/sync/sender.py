"""The sender of a pushing transport, `ipc` or `nccl`: the trainer rank that every receiver takes its buckets from.

It has a method for each state of a `WeightUpdate`. `announce` says what comes and where receivers meet; nothing has moved yet. `send`
packs and sends while they receive. `persist` copies the version for the store, when generation goes on already: from a second export
into host memory, and from there to the store by a thread. Until that is done the store's newest version is the one before.
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


class Publisher(Packer):
    """Publishes into a `VersionStore` on this host."""

    def __init__(self, store: VersionStore, **options: Unpack[PackingOptions]) -> None:
        super().__init__(**options)
        self.store = store

    def publish(self, export: Export, version: int, *, checksums: bool = False) -> Manifest:
        """Pack and publish one version. Until it returns, receivers see the version before.

        Unless `plan` or `plan_from` was called, the first export is held whole to plan from it; later ones stream. With `checksums`,
        one is taken of each tensor for receivers to compare with.

        Raises VersionConflict unless `version` grows, PlanMismatch where the export differs from the plan, and
        EnvironmentMissing where the store is full; a failed version leaves nothing behind.
        """
        tensors = self.cast(export)
        if not self.plans:
            held = list(tensors)
            self.plan((spec_of(name, tensor) for name, tensor in held), _tied(held))
            tensors = iter(held)
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
    """Names of tensors that are another one's very memory, each with that other name."""
    owners: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors:
        owner = owners.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if owner != name and tensor.numel():
            tied[name] = owner
    return tied


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
            writer = Writer(folder)

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
        self._meeting: TCPStore | None = None
        self._groups = 0
        self._members: tuple[str, ...] = ()
        self._writer: PushWriter | None = None
        self._announced: Manifest | None = None
        self._store_worker = StoreWorker(store, pinned=self.device.type == "cuda")

    def announce(self, version: int, members: list[str], checksums: Checksums | None = None) -> Manifest:
        """What `version` will be, for receivers of these names, one a rank. `plan_from` comes first; its checksums go along.

        Receivers that are others than last time, or a fault last time, get a group of a new name. Raises what persisting the version
        before raised.
        """
        self._store_worker.stand_by()
        writer = self._writer_for(tuple(members))
        address = str(writer.control.address)
        self._announced = Manifest(version, self.transport, address, self.section_plans(checksums or {}), str(self.store.root.absolute()))
        return self._announced

    def send(self, export: Export) -> Sent:
        """Pack and send what was announced. `export` yields section after section, in the order of the announced plan.

        Raises SyncError where a receiver fails, and PlanMismatch where the export differs from the plan; the group is over then.
        """
        writer, announced = self._under_way()
        try:
            self.pack(announced.version, self.cast(export), writer)
            return writer.finish()
        except BaseException as error:
            self._give_up(writer, f"the sender of the weights gave up: {error}")
            raise
        finally:
            self._store_worker.go_on()

    def persist(self, export: Export) -> None:
        """Copy the version that was sent into host memory, and have it written to the store. Returns once the weights may change.

        There is one such copy: where the version before is still being written from it, this waits.
        """
        announced = self._announced
        assert announced is not None, "announce comes first"
        self._store_worker.flush()
        # What moved once (the base weights of an adapter) needs no memory for a copy any more.
        self._store_worker.copy.drop_all_but(self.moving)
        self.pack(announced.version, self.cast(export), self._store_worker.copy)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._store_worker.start(announced)

    def flush(self) -> None:
        """Return once the version persisted last is in the store. Raises what writing it raised."""
        self._store_worker.flush()

    def probe(self, number: int) -> Sent:
        """Send buckets of the announced plan's sizes, whatever is in the buffers: what the link can do, without packing.

        `number` tells probes apart; receivers take part by `EngineTarget.probe`.
        """
        writer, announced = self._under_way()
        for section, plan in announced.sections.items():
            writer.begin(-number, section)
            for bucket in plan.buckets:
                writer.buffer(section, bucket)
                writer.send(section, bucket)
        return writer.finish()

    def close(self) -> None:
        """Leave the group; the next version has another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _under_way(self) -> tuple[PushWriter, Manifest]:
        assert self._writer is not None and self._announced is not None, "announce comes first"
        return self._writer, self._announced

    def _writer_for(self, members: tuple[str, ...]) -> PushWriter:
        """The writer of the group of these receivers: the last version's, or that of a new group."""
        self._leave_failed_group()
        if self._writer is not None and self._members == members:
            return self._writer
        self.close()
        if self._meeting is None:
            self._meeting = host_store(self._host)
        self._groups += 1
        address = Address(self._meeting.host, self._meeting.port, f"group-{self._groups}", len(members), self.deadline_s)
        largest = max(bucket.nbytes for buckets in self.plans.values() for bucket in buckets)
        self._writer = open_writer(self.transport, Control(self._meeting, address), self.device, largest)
        self._members = members
        return self._writer

    def _leave_failed_group(self) -> None:
        """A receiver may have given up after everything was sent: nothing can be sent in that group any more."""
        if self._writer is not None:
            try:
                self._writer.control.look()
            except SyncError as error:
                self._give_up(self._writer, str(error))

    def _give_up(self, writer: PushWriter, why: str) -> None:
        writer.fail(why)
        self._writer = None
