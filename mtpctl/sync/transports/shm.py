"""Buckets as files that both ends map: shared memory on one host, without a copy."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from mtpctl.errors import EnvironmentMissing
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import SyncError, bucket_file
from mtpctl.sync.transports.base import BucketReader, BucketWriter

NAME = "shm"
PIECE_BYTES = 16 << 20
"""Bytes written at a time."""


def _path(folder: Path, section: str, bucket: Bucket) -> Path:
    return folder / bucket_file(section, bucket)


def _no_space_error(path: Path, bucket: Bucket, error: OSError) -> EnvironmentMissing:
    return EnvironmentMissing(
        f"{path}: no room for {bucket.nbytes} bytes of published weights ({error.strerror}); free space there and start again"
    )


class Writer(BucketWriter):
    """Writes the buckets of one version into its folder."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def begin(self, version: int, section: str) -> None:
        """Nothing to do: receivers read once the whole version is written."""

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """A mapped file of the bucket's size. Raises EnvironmentMissing if the file system is full."""
        path = _path(self.folder, section, bucket)
        try:
            with path.open("xb+") as file:
                # Reserve the pages now, so that a full file system is an error here and not a SIGBUS while packing.
                os.posix_fallocate(file.fileno(), 0, bucket.nbytes)
                return torch.frombuffer(mmap.mmap(file.fileno(), bucket.nbytes), dtype=torch.uint8)
        except OSError as error:
            raise _no_space_error(path, bucket, error) from error

    def put(self, section: str, bucket: Bucket, data: torch.Tensor, before: Callable[[], object]) -> None:
        """Write a bucket from host memory in pieces, and call `before` before each piece.

        Writing is faster than copying into a mapping, because no page is mapped, zeroed or faulted. It does not block other threads. Raises
        EnvironmentMissing if the file system is full.
        """
        path, remaining = _path(self.folder, section, bucket), memoryview(data.numpy())
        try:
            with path.open("xb", buffering=0) as file:
                while remaining:
                    before()
                    remaining = remaining[file.write(remaining[:PIECE_BYTES]) :]
        except OSError as error:
            raise _no_space_error(path, bucket, error) from error

    def send(self, section: str, bucket: Bucket) -> None:
        """Nothing to do: receivers map the same pages."""


class Reader(BucketReader):
    """Maps the buckets of one version; `address` is its folder."""

    def __init__(self, address: str, device: torch.device | str = "cpu") -> None:
        self.folder = Path(address)

    def begin(self, version: int, section: str) -> None:
        """Nothing to do: the version is complete."""

    def stream(self, section: str, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for bucket in buckets:
            yield bucket, self._read(section, bucket)

    def _read(self, section: str, bucket: Bucket) -> torch.Tensor:
        path = _path(self.folder, section, bucket)
        try:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), bucket.nbytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise SyncError(f"{path}: bucket {bucket.index} of section {section} cannot be read: {error}") from error
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(mapping, dtype=torch.uint8)

    def fail(self, reason: str) -> None:
        """Nothing to do: the writer waits for no receiver."""

    def close(self) -> None:
        """Nothing to do: mappings are released with their tensors."""
