"""The interface of transports, and the selection of a transport by its name in the manifest.

With `shm` the buckets are files that receivers read at their own pace. `ipc` and `nccl` push: sender and receivers process the same
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
    """Statistics of a transfer: bytes, total seconds, seconds on the wire, and seconds of waiting for receivers to be ready."""

    nbytes: int = 0
    seconds: float = 0.0
    wire_seconds: float = 0.0
    wait_seconds: float = 0.0


class BucketWriter(ABC):
    """The sender's end."""

    follows_stream = False
    """Whether `send` is ordered after copies into the buffer on the card's stream, so that the caller need not wait for them."""
    section_after_section = False
    """Whether a section must be complete before the next one begins."""

    @abstractmethod
    def begin(self, version: int, section: str) -> None:
        """Prepare a section; called before its first bucket. A pushing transport waits for every receiver, or raises SyncError."""

    @abstractmethod
    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """A buffer `[bucket.nbytes]` (uint8) to fill with the bucket's entries at their offsets."""

    @abstractmethod
    def send(self, section: str, bucket: Bucket) -> None:
        """Send the filled buffer. It must not be written to afterwards."""


class PushWriter(BucketWriter):
    """The sender's end of a pushing transport. Its receivers are a group that is joined through `control` and serves many versions."""

    follows_stream = True
    section_after_section = True
    control: Control

    @abstractmethod
    def finish(self) -> Sent:
        """Wait until every receiver has every bucket of the version."""

    @abstractmethod
    def fail(self, why: str) -> None:
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
    def fail(self, why: str) -> None:
        """Report to the sender that this receiver has failed. The reader cannot be used afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Release buffers and connections."""


class Readers:
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

    def fail(self, why: str) -> None:
        """Report to the sender that this receiver has failed, and close the reader."""
        if self._reader is not None:
            self._reader.fail(why)
            self.close()

    def end_section(self) -> None:
        """Close the reader after a section, unless the transport reuses it for the next version."""
        if self._address is not None and self._address[0] not in PUSHED:
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


def cancel(manifest: Manifest, why: str) -> None:
    """End a transfer for its whole group, on behalf of a member that was lost and cannot report it."""
    if manifest.transport in PUSHED:
        from mtpctl.sync.transports.control import report_failure

        report_failure(manifest.address, why)
