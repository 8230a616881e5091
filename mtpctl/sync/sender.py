"""The senders of weight updates: `Publisher` for transports `shm` and `storage`, and `Sender` for the pushing ones, `ipc` and `nccl`.

A `Publisher` writes a version into the version store, or uploads it, and receivers read it at their own pace. A `Sender` runs on the
trainer rank from which all receivers get their buckets. Its methods follow the states of a `WeightUpdate`: `announce` plans the version and
names the group that receivers join; `send` packs and sends while they receive; `persist` packs another export of the version into host
memory while generation continues, and threads write that copy to the store. Until the threads end, the newest version in the store is the
previous one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Unpack

import torch
from torch.distributed import TCPStore

from mtpctl.cluster.object_store import ObjectStore, StoreFailed
from mtpctl.cluster.rendezvous import host_store
from mtpctl.plan.buckets import MAX_DELTA_SHARE, Bucket
from mtpctl.sync.packing import Changes, Checksums, Export, HostCopy, Packer, PackingOptions, spec_of
from mtpctl.sync.protocol import Manifest, SyncError
from mtpctl.sync.remote import compute_digests, make_host_folder, upload
from mtpctl.sync.store import COMPLETE, VersionStore
from mtpctl.sync.transports.base import Address, Control, PushWriter, TransferStats, open_writer
from mtpctl.sync.transports.shm import NAME as SHM
from mtpctl.sync.transports.shm import Writer
from mtpctl.sync.transports.storage import NAME as STORAGE

MAX_WRITERS = 8
"""Maximum number of threads that write to the store. There is one per `CORES_PER_WRITER` CPU cores."""
CORES_PER_WRITER = 4
PAUSE_S = 1.0
"""Seconds that a writing thread waits before each piece while a version is being sent."""


class Publisher(Packer):
    """Publishes versions into a `VersionStore`, or uploads them if the store has a remote.

    With `delta`, a version has only the changes since the previous one, unless they exceed `MAX_DELTA_SHARE` of the full size, or there is
    no copy of the previous version (at the start, or because it could not be stored). Such a version is complete. When the changes since
    the last complete version add up to this share, all buckets are stored in addition, but not while a previous upload of all buckets is
    running. This bounds the bytes that a receiver that starts later has to read.
    """

    def __init__(
        self, store: VersionStore, *, delta: bool = False, pinned: bool = False, digests: bool = False, **options: Unpack[PackingOptions]
    ) -> None:
        """`pinned`: with `delta`, keep the copy of the last version in pinned memory. `digests`: add the files' digests to manifests."""
        super().__init__(**options)
        self.store = store
        self._digests = digests
        self._copy = HostCopy(pinned=pinned) if delta else None
        # The version in `_copy`; None if there is none, or if the copy may be a mix of versions.
        self._copied: int | None = None
        self._changed_bytes = 0  # since the last complete version
        self._upload: Upload | None = None
        self._commit_lock = Lock()  # prevents the upload from marking a version while it is deleted
        self._token = secrets.token_hex(16)

    def publish(self, export: Export, version: int, *, checksums: bool = False) -> Manifest:
        """Pack and publish one version. Receivers see the previous version until this returns.

        Unless `plan` or `plan_from` was called, the first export is held in memory to plan from it; later ones stream. With `checksums`,
        the checksum of each tensor is included for receivers to compare.

        Raises VersionConflict unless `version` is newer, PlanMismatch if the export differs from the plan, PrerequisiteMissing if the store
        is full, and StoreFailed if an upload fails, this one or an earlier one in the background. A failed version is deleted.
        """
        tensors = self.wire_tensors(export)
        if not self.plans:
            exported = list(tensors)
            self.plan((spec_of(name, tensor) for name, tensor in exported), _find_tied_weights(exported))
            tensors = iter(exported)
        if self._upload is not None:
            self._upload.check()
        folder = self.store.prepare(version)
        files = folder.absolute()
        if self.store.remote is not None:
            files = make_host_folder(f"upload-{self._token}-{version}", 2 * self.full_nbytes)  # until the files are uploaded
        try:
            manifest = Manifest(version, SHM, str(files), {}, str(self.store.root.absolute()))
            if self._copy is None:
                sums = self.pack(version, tensors, Writer(files), checksums=checksums)
                manifest = replace(manifest, sections=self.section_plans(sums))
            else:
                manifest = self._write_changes(manifest, tensors, self._copy, checksums=checksums)
            if self.store.remote is not None:
                manifest = self._upload_files(manifest, self.store.remote, folder.name)
            with self._commit_lock:
                self.store.commit(manifest)
            self._copied = version
        except BaseException:
            self._copied = None
            shutil.rmtree(files, ignore_errors=True)
            self.store.discard(version)
            raise
        if self.store.remote is not None:
            if (files / COMPLETE).exists():
                self._upload = Upload(self.store, self.store.remote, files, f"{folder.name}-{self._token}", version, self._commit_lock)
            else:
                shutil.rmtree(files)
        return manifest

    def _write_changes(self, manifest: Manifest, tensors: Export, copy: HostCopy, *, checksums: bool) -> Manifest:
        """Write the changes since the version in `copy`, all buckets, or both, and update the copy."""
        copy.retain(self.next_sections)
        writer, base, changes = Writer(Path(manifest.address)), self._copied, None
        if base is not None and copy.has(self.next_plans):
            changes, sums = self.compare(tensors, copy, base, update=True, checksums=checksums)
            if changes.fits:
                manifest = replace(manifest, base=base, sections=self.section_plans(sums, changes, delta=True))
                self.pack_blobs(manifest.version, changes, manifest.sections, writer)
                self._changed_bytes += manifest.nbytes
                if self._changed_bytes < MAX_DELTA_SHARE * self.full_nbytes or (self._upload is not None and self._upload.running):
                    return manifest
                writer.folder /= COMPLETE
                writer.folder.mkdir()
        else:
            sums = self.pack(manifest.version, tensors, copy, checksums=checksums)
            copy.wait()
        for section, buckets in self.next_plans.items():
            for bucket in buckets:
                writer.put(section, bucket, copy.buckets[section, bucket.index], lambda: None)
        self._changed_bytes = 0
        return manifest if manifest.base is not None else replace(manifest, sections=self.section_plans(sums, changes))

    def _upload_files(self, manifest: Manifest, remote: ObjectStore, folder_name: str) -> Manifest:
        """Upload the version's files, except those in `COMPLETE`, which only later receivers need."""
        files, remote_name = Path(manifest.address), f"{folder_name}-{self._token}"
        buckets = sorted(files.glob("*.bin"))
        digests = compute_digests(buckets) if self._digests else {}
        upload(remote, buckets, remote_name)
        return replace(manifest, transport=STORAGE, address=f"{remote.url}/{remote_name}", digests=digests)


class Upload:
    """Uploads all buckets of a published version in a thread, and then marks the version in the store as complete.

    If newer versions are complete, the store may delete the version during the upload. Then its uploaded buckets are deleted, too.
    """

    def __init__(self, store: VersionStore, remote: ObjectStore, files: Path, name: str, version: int, commit_lock: Lock) -> None:
        """`files`: the version's files, which are deleted at the end. `name`: its folder in the remote. `commit_lock`: held by commits."""
        self._store, self._remote, self._files, self._name = store, remote, files, name
        self._version, self._commit_lock = version, commit_lock
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a failed upload."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._upload_and_mark()
        except BaseException as error:
            self._failure = error
        finally:
            shutil.rmtree(self._files)

    def _upload_and_mark(self) -> None:
        folder = self._store.folder(self._version)
        try:
            upload(self._remote, sorted((self._files / COMPLETE).iterdir()), f"{self._name}/{COMPLETE}")
        except StoreFailed:
            if folder.exists():
                raise
        with self._commit_lock:
            if folder.exists():
                (folder / COMPLETE).mkdir()
            else:
                self._store.discard(self._version)


def _find_tied_weights(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Names of tensors that share the memory of another tensor, each with that tensor's name."""
    owners: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors:
        owner = owners.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if owner != name and tensor.numel():
            tied[name] = owner
    return tied


class Sender(Packer):
    """Sends versions over `transport` from tensors on `device`, and persists them in `store`.

    With `delta`, a version that is sent to the receivers of the previous one contains only the changes, if they are few enough. They are
    found by comparison with the copy for the store, which has the previous version. A repeated transfer is complete.
    """

    def __init__(
        self,
        store: VersionStore,
        transport: str,
        device: torch.device | str,
        *,
        deadline_s: float = 120.0,
        host: str = "",
        delta: bool = False,
        **options: Unpack[PackingOptions],
    ) -> None:
        super().__init__(**options)
        self._delta = delta
        # The version that all receivers have; None before the first one, during a transfer, and after a failed one.
        self._delivered: int | None = None
        # The version in the copy for the store; None if there is none, or if the copy may be a mix of versions.
        self._copied: int | None = None
        self._changes: Changes | None = None
        self.store, self.transport, self.device, self.deadline_s = store, transport, torch.device(device), deadline_s
        self._host = host
        self._rendezvous: TCPStore | None = None
        self._groups = 0
        self._members: tuple[str, ...] = ()
        self._writer: PushWriter | None = None
        self._announced: Manifest | None = None
        self._store_worker = StoreWorker(store, pinned=self.device.type == "cuda")

    def plan_from(self, export: Export, aliases: Mapping[str, str] | None = None, *, checksums: bool = False) -> Checksums:
        """See `Packer.plan_from`. With `delta`, also compare the export with the previous version."""
        self._changes = None
        copy, base = self._store_worker.copy, self._delivered
        if not self._delta or base is None or base != self._copied or not copy.has(self.next_plans):
            return super().plan_from(export, aliases, checksums=checksums)
        self._changes, sums = self.compare(self.wire_tensors(export), copy, base, update=False, checksums=checksums)
        return sums

    def announce(self, version: int, members: list[str], checksums: Checksums | None = None) -> Manifest:
        """Plan `version` for receivers with these names, one per rank. Call `plan_from` first, and pass its checksums.

        If the receivers differ from the last version's, or that transfer failed, they get a new group. Raises the error of persisting
        the previous version, if any.
        """
        self._store_worker.pause()
        previous_writer, changes = self._writer, self._changes
        writer = self._writer_for(tuple(members))
        address = str(writer.control.address)
        delta = changes is not None and changes.fits and writer is previous_writer
        sections = self.section_plans(checksums or {}, changes, delta=delta)
        base = changes.base if changes is not None and delta else None
        self._announced = Manifest(version, self.transport, address, sections, str(self.store.root.absolute()), base)
        self._delivered = None
        return self._announced

    def send(self, export: Export) -> TransferStats:
        """Pack and send the announced version. `export` yields section after section, in the order of the plan; it is unused for a delta.

        Raises SyncError if a receiver fails, and PlanMismatch if the export differs from the plan. Either ends the group.
        """
        writer, announced = self._current()
        try:
            if announced.base is None:
                self.pack(announced.version, self.wire_tensors(export), writer)
            else:
                assert self._changes is not None
                self.pack_blobs(announced.version, self._changes, announced.sections, writer)
            sent = writer.finish()
            self._delivered, self._changes = announced.version, None
            return sent
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
        self._copied = None
        # Sections that are sent only once (the base weights of an adapter) no longer need a copy.
        self._store_worker.copy.retain(self.next_sections)
        self.pack(announced.version, self.wire_tensors(export), self._store_worker.copy)
        self._store_worker.copy.wait()
        self._copied = announced.version
        self._store_worker.start(announced.complete())

    def flush(self) -> None:
        """Wait until the last persisted version is in the store. Raises the error of writing it."""
        self._store_worker.flush()

    def probe(self, number: int) -> TransferStats:
        """Send the buckets of the announced plan without packing, to measure the link. Receivers call `EngineTarget.probe`.

        `number` distinguishes probes.
        """
        writer, announced = self._current()
        for section, plan in announced.sections.items():
            writer.begin(-number, section)
            for bucket in plan.wire_buckets:
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
        """Return the writer for these receivers: the previous one if its group is intact and has the same members, else a new one."""
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
        self._writer = open_writer(self.transport, Control(self._rendezvous, address), self.device, self.largest)
        self._members = members
        return self._writer

    def _abandon(self, writer: PushWriter, reason: str) -> None:
        writer.fail(reason)
        self._writer = None


class StoreWorker:
    """Writes one version at a time from `copy` to the store, in threads that write slowly while the next version is sent."""

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
        """Slow down writing until `resume`, so that a transfer gets cores and memory bandwidth. Raises the error of the previous write."""
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
            with ThreadPoolExecutor(max(1, min(MAX_WRITERS, (os.cpu_count() or 1) // CORES_PER_WRITER))) as pool:
                list(pool.map(write, [(section, bucket) for section, plan in version.sections.items() for bucket in plan.buckets]))
            self.store.commit(Manifest(version.version, SHM, str(folder.absolute()), version.sections, version.store))
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
