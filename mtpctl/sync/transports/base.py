"""The interface of transports, their selection by the name in the manifest, and the groups of pushing transports.

With `shm` and `storage` the buckets are files that receivers read at their own pace. `ipc` and `nccl` push: sender and receivers process
the same buckets at the same time, and a failure of one of them ends the transfer for all.

The sender of a pushing transport hosts a key-value store. Receivers join a group by name, and the complete group is used until a member
fails or the set of receivers changes. A failure is written to a key that all members poll while they wait, and the next transfer uses a
group with a new name. If the sender dies, its store is lost too, which receivers detect at their next poll.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from mtpctl.plan.buckets import Bucket
from mtpctl.recipe.sync import PUSH_TRANSPORTS
from mtpctl.sync.protocol import Manifest, SyncError

if TYPE_CHECKING:
    # The controller imports this module, and must not import torch.
    import torch
    from torch.distributed import TCPStore


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Statistics of a transfer: bytes, total seconds, seconds on the wire, and seconds of waiting for receivers to be ready."""

    nbytes: int = 0
    seconds: float = 0.0
    wire_seconds: float = 0.0
    wait_seconds: float = 0.0


class BucketWriter(ABC):
    """The sender's end."""

    stream_ordered = False
    """Whether `send` is ordered after copies into the buffer on the CUDA stream, so that the caller need not wait for them."""
    sequential_sections = False
    """Whether a section must be complete before the next one begins."""

    @abstractmethod
    def begin(self, version: int, section: str) -> None:
        """Prepare a section; called before its first bucket."""

    @abstractmethod
    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """A buffer `[bucket.nbytes]` (uint8) to fill with the bucket's entries at their offsets."""

    @abstractmethod
    def send(self, section: str, bucket: Bucket) -> None:
        """Send the filled buffer. It must not be written to afterwards."""


class PushWriter(BucketWriter):
    """The sender's end of a pushing transport. Its receivers are a group that is joined through `control` and serves many versions.

    The sender has two buffers. Engines need tens of milliseconds to pause, so it fills both buffers before it waits for the receivers.
    """

    stream_ordered = True
    sequential_sections = True
    control: Control
    _unready: tuple[int, str] | None = None
    """Version and section whose receivers may not be ready yet."""
    _wait_s = 0.0

    def _are_ready(self) -> bool:
        return self._unready is None or self.control.count(*self._unready) >= self.control.address.receivers

    def _wait_until_ready(self) -> None:
        """Wait until every receiver is ready for the section's buckets. Raises SyncError if one of them fails."""
        self._wait(self._are_ready, "waiting for receivers to be ready")
        self._unready = None

    def _wait(self, done: Callable[[], bool], action: str) -> None:
        """Wait for the receivers, and count the seconds as waiting. Raises the errors of `Control.wait`."""
        wait_start = time.monotonic()
        self.control.wait(done, action)
        self._wait_s += time.monotonic() - wait_start

    @abstractmethod
    def finish(self) -> TransferStats:
        """Wait until every receiver has every bucket of the version."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """End the transfer for the whole group. The writer cannot be used afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and release buffers."""


class BucketReader(ABC):
    """The receiver's end."""

    @abstractmethod
    def begin(self, version: int, section: str) -> None:
        """Report that the receiver has checked the section's plan and is ready for its buckets."""

    @abstractmethod
    def stream(self, section: str, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket with its bytes `[bucket.nbytes]` (uint8), read-only and valid until the next iteration.

        Raises SyncError if the buckets do not arrive.
        """

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Report to the sender that this receiver has failed. The reader cannot be used afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Release buffers and connections."""


class ReaderCache:
    """A receiver's open reader, which is reused as long as transport and address stay the same."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._address: tuple[str, str] | None = None
        self._reader: BucketReader | None = None

    def open(self, transport: str, address: str) -> BucketReader:
        """The receiver's end of `transport` at `address`."""
        if self._reader is None or self._address != (transport, address):
            self.close()
            self._reader = open_reader(transport, address, self.device)
            self._address = (transport, address)
        return self._reader

    def fail(self, reason: str) -> None:
        """Report to the sender that this receiver has failed, and close the reader."""
        if self._reader is not None:
            self._reader.fail(reason)
            self.close()

    def end_section(self) -> None:
        """Close the reader after a section, unless the transport reuses it for the next version."""
        if self._address is not None and self._address[0] not in PUSH_TRANSPORTS:
            self.close()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._address = None


def open_reader(transport: str, address: str, device: torch.device | str = "cpu") -> BucketReader:
    """The receiver's end of `transport` at `address`."""
    reader: BucketReader = import_module(f"mtpctl.sync.transports.{transport}").Reader(address, device)
    return reader


def open_writer(transport: str, control: Control, device: torch.device, largest: int) -> PushWriter:
    """The sender's end of a pushing `transport`, for the group of `control` and buckets of at most `largest` bytes."""
    writer: PushWriter = import_module(f"mtpctl.sync.transports.{transport}").Writer(control, device, largest)
    return writer


_CHECK_INTERVAL_S = 0.02
"""Interval of checks for failures, in seconds."""


@dataclass(frozen=True, slots=True)
class Address:
    """A group's address: the store's host and port, the group's name, its number of receivers, and the deadline of every wait."""

    host: str
    port: int
    group: str
    receivers: int
    deadline_s: float

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}/{self.group}?receivers={self.receivers}&deadline_s={self.deadline_s:g}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Inverse of `str`."""
        url = urlsplit(text)
        query = parse_qs(url.query)
        assert url.hostname is not None and url.port is not None
        return cls(url.hostname, url.port, url.path.lstrip("/"), int(query["receivers"][0]), float(query["deadline_s"][0]))


class Control:
    """One member's view of a group."""

    def __init__(self, store: TCPStore, address: Address) -> None:
        self.store, self.address = store, address
        self._checked_at = 0.0

    def key(self, *parts: object) -> str:
        return "/".join([self.address.group, *map(str, parts)])

    def increment(self, *parts: object) -> int:
        """Increment the counter at a key, and return it. Raises SyncError if the sender's store is lost."""
        try:
            return int(self.store.add(self.key(*parts), 1))
        except RuntimeError as error:
            raise SyncError("the sender of the weights is gone") from error

    def count(self, *parts: object) -> int:
        return int(self.store.add(self.key(*parts), 0))

    def fail(self, reason: str) -> None:
        """Report a failure to the group. If the store is lost, all members detect that themselves."""
        with contextlib.suppress(RuntimeError):
            self.store.set(self.key("fault"), reason)

    def check(self) -> None:
        """Raise SyncError if a failure was reported, or the sender's store is lost."""
        try:
            if self.store.check([self.key("fault")]):
                raise SyncError(self.store.get(self.key("fault")).decode())
        except SyncError:
            raise
        except RuntimeError as error:
            raise SyncError("the sender of the weights is gone") from error

    def wait(self, done: Callable[[], bool], action: str) -> None:
        """Wait until `done()`. Raises SyncError after a failure in the group, and after the deadline."""
        started_at = time.monotonic()
        interval_s = 0.00005
        while True:
            try:
                if done():
                    return
            except RuntimeError as error:
                # A failing peer also breaks the operations of other members. Prefer the reason that the peer reported.
                self.check()
                raise SyncError(f"{action} failed: {str(error).splitlines()[0]}") from error
            now = time.monotonic()
            if now - self._checked_at > _CHECK_INTERVAL_S:
                self._checked_at = now
                self.check()
            if now - started_at > self.address.deadline_s:
                message = f"{action} took longer than sync.deadline_s = {self.address.deadline_s:g}"
                self.fail(message)
                raise SyncError(message)
            time.sleep(interval_s)
            interval_s = min(2 * interval_s, 0.002)


def join(address: Address) -> tuple[Control, int]:
    """Join a group as a receiver. Returns its control and this receiver's rank, from 1. Raises SyncError if it is full or lost."""
    from mtpctl.cluster.rendezvous import join_store

    try:
        store = join_store(f"{address.host}:{address.port}")
    except (OSError, RuntimeError) as error:
        raise SyncError(f"the sender of the weights at {address.host}:{address.port} cannot be reached") from error
    control = Control(store, address)
    rank = control.increment("joined")
    if rank > address.receivers:
        raise SyncError(f"group {address.group} has its {address.receivers} receivers already")
    control.wait(lambda: control.count("joined") >= address.receivers, "waiting for the other receivers of the weights")
    return control, rank


def cancel(manifest: Manifest, reason: str) -> None:
    """End a transfer for its whole group, on behalf of a member that was lost and cannot report it."""
    from mtpctl.cluster.rendezvous import join_store

    if manifest.transport in PUSH_TRANSPORTS:
        address = Address.parse(manifest.address)
        with contextlib.suppress(OSError, RuntimeError):
            Control(join_store(f"{address.host}:{address.port}"), address).fail(reason)
