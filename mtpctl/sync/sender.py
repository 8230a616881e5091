"""The sender of a pushing transport, `ipc` or `nccl`: the trainer rank that every receiver takes its buckets from.

It has a method for each state of a `WeightUpdate`. `announce` says what comes and where receivers meet; nothing has moved yet. `send`
packs and sends while they receive. `persist` copies the version for the store, when generation goes on already: from a second export
into host memory, and from there to the store by a thread. Until that is done the store's newest version is the one before.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch.distributed import TCPStore

from mtpctl.cluster.meeting import host_store
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.packing import Checksums, Export, Packer, PackingOptions
from mtpctl.sync.persist import StoreWorker
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import PushWriter, Sent, open_writer
from mtpctl.sync.transports.control import Address, Control


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
