"""The sender of a pushing transport: the trainer rank that every receiver takes its buckets from.

A version has three steps. `announce` says what comes and where to meet; nothing has moved yet. `send` packs and sends while the
receivers take in. `keep` fills the host's version store, when generation goes on already: from a second export into host memory,
which is pinned where there is a card, and from there to the store by a thread beside the trainer's next update. Until that is
done, the store's newest version is the one before; a replica that restarts meanwhile waits for the one that its fellows serve.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Event, Thread
from typing import Any

import torch

from mtpctl.cluster.meeting import host_store
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.publisher import Export, Packing
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import BucketWriter, Sent
from mtpctl.sync.transports.control import Address, Control
from mtpctl.sync.transports.shm import NAME as SHM
from mtpctl.sync.transports.shm import Writer as StoreWriter

WRITERS = 8
"""Threads that fill the store, at most: one for each `CORES_A_WRITER`."""
CORES_A_WRITER = 4
STAND_BY_S = 1.0
"""Seconds for which a thread that fills the store waits at a time for a version on its way to the receivers."""


class Sender(Packing):
    """Sends versions over `transport` from tensors on `device`, and keeps them in `store`. Other options are those of `Packing`."""

    def __init__(
        self, store: VersionStore, transport: str, device: torch.device | str, *, deadline_s: float = 120.0, host: str = "", **options: Any
    ) -> None:
        super().__init__(**options)
        self.store, self.transport, self.device, self.deadline_s = store, transport, torch.device(device), deadline_s
        self._host = host
        self._meeting: Any = None
        self._groups = 0
        self._members: tuple[str, ...] | None = None
        self._writer: Any = None
        self._sending: Manifest | None = None
        self._staged = _Staging(self.device)
        self._keeping: Thread | None = None
        self._failure: BaseException | None = None
        self._idle = Event()
        self._idle.set()

    def announce(self, version: int, members: list[str], checksums: Mapping[str, dict[str, str]] | None = None) -> Manifest:
        """What `version` will be, for receivers of these names, one a rank. `learn` comes first; its checksums go along.

        Receivers that are others than last time, or a fault last time, get a group of a new name. Raises what keeping the version
        before raised.
        """
        self._raise_failure()
        self._idle.clear()
        self._leave_broken()
        if self._writer is None or self._members != tuple(members):
            self._open(members)
        plans = self.section_plans(checksums or {})
        address = str(self._writer.control.address)
        self._sending = Manifest(version, self.transport, address, plans, str(self.store.root.absolute()))
        return self._sending

    def _leave_broken(self) -> None:
        """Leave a group that a receiver has given up, perhaps after everything was sent: in it nobody goes on."""
        if self._writer is not None:
            try:
                self._writer.control.look()
            except SyncError as error:
                self._writer.fail(str(error))
                self._writer = None

    def _open(self, members: list[str]) -> None:
        self.close()
        if self._meeting is None:
            self._meeting = host_store(self._host)
        self._groups += 1
        address = Address(self._meeting.host, self._meeting.port, f"group-{self._groups}", len(members), self.deadline_s)
        writer = import_module(f"mtpctl.sync.transports.{self.transport}").Writer
        largest = max(bucket.nbytes for buckets in self.plans.values() for bucket in buckets)
        self._writer = writer(Control(self._meeting, address), self.device, largest)
        self._members = tuple(members)

    def send(self, export: Export) -> Sent:
        """Pack and send what was announced. `export` yields section after section, in the order of the announced plan.

        Raises SyncError where a receiver fails, and PlanMismatch where the export differs from the plan; the group is over then.
        """
        assert self._sending is not None, "announce comes first"
        ordered = _InOrder(self._writer, self._sending)
        try:
            self.pack(self._cast(export), ordered)
            sent: Sent = self._writer.finish()
        except BaseException as error:
            self._writer.fail(f"the sender of the weights gave up: {error}")
            self._writer = None
            raise
        finally:
            self._idle.set()
        return sent

    def probe(self, number: int) -> Sent:
        """Send buckets of the announced plan's sizes, whatever is in the buffers: what the link can do, without packing.

        `number` tells probes apart; receivers take part by `EngineTarget.probe`.
        """
        assert self._sending is not None, "announce comes first"
        for section, plan in self._sending.sections.items():
            self._writer.begin(-number, section)
            for bucket in plan.buckets:
                self._writer.buffer(section, bucket)
                self._writer.send(section, bucket)
        sent: Sent = self._writer.finish()
        return sent

    def keep(self, export: Export) -> None:
        """Copy the version that was sent into host memory, and have it written to the store. Returns once the weights may change.

        There is one such copy: where the version before is still being written from it, this waits.
        """
        assert self._sending is not None
        self.flush()
        # What moved once (the weights beneath an adapter) needs no memory for a copy any more.
        self._staged.held = {place: copy for place, copy in self._staged.held.items() if place[0] in self.moving}
        self.pack(self._cast(export), self._staged)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._keeping = Thread(target=self._write, args=(self._sending,), name="version-store", daemon=True)
        self._keeping.start()

    def _write(self, sent: Manifest) -> None:
        try:
            folder = self.store.prepare(sent.version)
            writer = StoreWriter(folder)

            def write(place: tuple[str, Bucket]) -> None:
                section, bucket = place
                # What generation stands for comes first: cores and memory are its own meanwhile.
                writer.put(section, bucket, self._staged.held[section, bucket.index], lambda: self._idle.wait(STAND_BY_S))

            # Fresh pages of shared memory come at the pace of one core each; writing holds no lock of the interpreter.
            with ThreadPoolExecutor(max(1, min(WRITERS, (os.cpu_count() or 1) // CORES_A_WRITER))) as pool:
                list(pool.map(write, [(section, bucket) for section, plan in sent.sections.items() for bucket in plan.buckets]))
            self.store.commit(Manifest(sent.version, SHM, str(folder.absolute()), sent.sections, sent.store))
        except BaseException as error:
            self._failure = error

    def flush(self) -> None:
        """Return once the version kept last is in the store. Raises what writing it raised."""
        if self._keeping is not None:
            self._idle.set()
            self._keeping.join()
            self._keeping = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Leave the group; the next version has another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _InOrder(BucketWriter):
    """The transport's writer, told of each section when its first bucket is due."""

    in_order = True

    def __init__(self, writer: Any, manifest: Manifest) -> None:
        self.writer, self.version = writer, manifest.version
        self.left = {section: len(plan.buckets) for section, plan in manifest.sections.items()}
        self.section = ""

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        if section != self.section:
            due = next(name for name, left in self.left.items() if left)
            if section != due:
                raise SyncError(f"the export came to section {section} before section {due} was complete")
            self.writer.begin(self.version, section)
            self.section = section
        buffer: torch.Tensor = self.writer.buffer(section, bucket)
        return buffer

    def send(self, section: str, bucket: Bucket) -> None:
        self.writer.send(section, bucket)
        self.left[section] -= 1


class _Staging(BucketWriter):
    """Host memory of a whole version, allocated once, pinned where a card copies into it."""

    in_order = True

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.held: dict[tuple[str, int], torch.Tensor] = {}

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        place = section, bucket.index
        if place not in self.held:
            self.held[place] = torch.empty(bucket.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        return self.held[place]

    def send(self, section: str, bucket: Bucket) -> None:
        pass
