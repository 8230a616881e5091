"""What every transport offers, and how a receiver finds the one that a manifest names.

With `shm` the buckets are files, which receivers read when they like. `ipc` and `nccl` push: sender and receivers work through the same
buckets at the same time, and a failure of one of them ends the transfer for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from mtpctl.plan.buckets import Bucket
from mtpctl.recipe.sync import PUSHED
from mtpctl.sync.protocol import Manifest

if TYPE_CHECKING:
    import torch

    from mtpctl.sync.transports.control import Control


@dataclass(frozen=True, slots=True)
class Sent:
    """What a sender moved: bytes, seconds in all, of these seconds on the wire, and seconds waiting for receivers to be ready."""

    nbytes: int = 0
    seconds: float = 0.0
    wire_seconds: float = 0.0
    wait_seconds: float = 0.0


class BucketWriter(ABC):
    """The sender's end."""

    follows_stream = False
    """Whether `send` waits for copies into the buffer on the card's stream, so that they need not be waited for before it is called."""
    section_after_section = False
    """Whether a section must be sent whole before the next one begins."""

    @abstractmethod
    def begin(self, version: int, section: str) -> None:
        """Return once buckets of the section may be sent; called before its first one.

        A pushing transport waits for every receiver here, and raises SyncError where one is not ready.
        """

    @abstractmethod
    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """Bytes `[bucket.nbytes]` (uint8) to be filled with the bucket's entries at their offsets."""

    @abstractmethod
    def send(self, section: str, bucket: Bucket) -> None:
        """Send the filled buffer. It must not be written to afterwards."""


class PushWriter(BucketWriter):
    """The sender's end of a transport whose receivers take part: a group that meets at `control`, and stays for many versions."""

    follows_stream = True
    section_after_section = True
    control: Control

    @abstractmethod
    def finish(self) -> Sent:
        """Return once every receiver has every bucket of the version."""

    @abstractmethod
    def fail(self, why: str) -> None:
        """End the transfer for all. The writer cannot be used any more."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and release buffers."""


class BucketReader(ABC):
    """The receiver's end."""

    @abstractmethod
    def begin(self, version: int, section: str) -> None:
        """The receiver is ready for the buckets of a section: everything about them has been checked."""

    @abstractmethod
    def stream(self, section: str, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket with its bytes `[bucket.nbytes]` (uint8), to be read only, and only until the next one is asked for.

        Raises SyncError where they do not come.
        """

    @abstractmethod
    def fail(self, why: str) -> None:
        """Tell the sender that this receiver gives up. The reader cannot be used any more."""

    @abstractmethod
    def close(self) -> None:
        """Release buffers and connections."""


class Readers:
    """A receiver's open reader, kept from one version to the next while its address stays the same."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._place: tuple[str, str] | None = None
        self._reader: BucketReader | None = None

    def open(self, transport: str, address: str) -> BucketReader:
        """The receiver's end of `transport` at `address`."""
        if self._reader is None or self._place != (transport, address):
            self.close()
            self._reader = open_reader(transport, address, self.device)
            self._place = (transport, address)
        return self._reader

    def fail(self, why: str) -> None:
        """Close the reader, and tell its sender that this receiver gives up."""
        if self._reader is not None:
            self._reader.fail(why)
            self.close()

    def settle(self) -> None:
        """A section is received: close the reader unless the next version comes through it too."""
        if self._place is not None and self._place[0] not in PUSHED:
            self.close()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._place = None


def open_reader(transport: str, address: str, device: torch.device | str = "cpu") -> BucketReader:
    """The receiver's end of `transport`, by the name a manifest gives it."""
    reader: BucketReader = import_module(f"mtpctl.sync.transports.{transport}").Reader(address, device)
    return reader


def open_writer(transport: str, control: Control, device: torch.device, largest: int) -> PushWriter:
    """The sender's end of a pushing `transport`, for a group that meets at `control`, and buckets of at most `largest` bytes."""
    writer: PushWriter = import_module(f"mtpctl.sync.transports.{transport}").Writer(control, device, largest)
    return writer


def cancel(manifest: Manifest, why: str) -> None:
    """End a transfer for all who take part in it, in place of one of them that is gone and cannot say so itself."""
    if manifest.transport in PUSHED:
        from mtpctl.sync.transports.control import report

        report(manifest.address, why)
