"""What every transport offers, and how a receiver finds the one that a manifest names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING

from mtpctl.plan import Bucket

if TYPE_CHECKING:
    import torch


class BucketWriter(ABC):
    """The sender's end."""

    @abstractmethod
    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """Bytes `[bucket.nbytes]` (uint8) to be filled with the bucket's entries at their offsets."""

    @abstractmethod
    def send(self, section: str, bucket: Bucket) -> None:
        """Let the filled buffer go. It must not be written to afterwards."""


class BucketReader(ABC):
    """The receiver's end."""

    @abstractmethod
    def read(self, section: str, bucket: Bucket) -> torch.Tensor:
        """Bytes `[bucket.nbytes]` (uint8) as they were sent, to be read only. Raises SyncError where they are not there."""

    @abstractmethod
    def close(self) -> None:
        """Release buffers."""


def open_reader(transport: str, address: str) -> BucketReader:
    """The receiver's end of `transport`, by the name a manifest gives it."""
    reader: BucketReader = import_module(f"mtpctl.sync.transports.{transport}").Reader(address)
    return reader
