"""Buckets as files: shared memory on one host, or a shared file system.

Receivers on a CPU map the files without a copy. Receivers on a GPU read them through pinned buffers, because page faults and copies from
pageable memory are several times slower than the link to the GPU.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import torch

from mtpctl.errors import PrerequisiteMissing
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import SyncError, bucket_file
from mtpctl.sync.transports.base import BucketReader, BucketWriter

NAME = "shm"
PIECE_BYTES = 16 << 20
"""Bytes written at a time."""
STAGING_BYTES = 64 << 20
"""Size of each of the two pinned buffers of a receiver on a GPU."""
READ_THREADS = 4
"""Threads that read parts of a file at the same time. One thread reads shared memory at about 5 GB/s."""


def _path(folder: Path, section: str, bucket: Bucket) -> Path:
    return folder / bucket_file(section, bucket)


def _no_space_error(path: Path, bucket: Bucket, error: OSError) -> PrerequisiteMissing:
    return PrerequisiteMissing(
        f"{path}: no room for {bucket.nbytes} bytes of published weights ({error.strerror}); free space there and start again"
    )


def _read_error(path: Path, section: str, bucket: Bucket, error: Exception) -> SyncError:
    return SyncError(f"{path}: bucket {bucket.index} of section {section} cannot be read: {error}")


class Writer(BucketWriter):
    """Writes the buckets of one version into its folder."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def begin(self, version: int, section: str) -> None:
        """Nothing to do: receivers read once the whole version is written."""

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """A mapped file of the bucket's size. Raises PrerequisiteMissing if the file system is full."""
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
        PrerequisiteMissing if the file system is full.
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
        """Nothing to do: receivers read the same pages."""


class StagedReader:
    """Reads files into one buffer on `device` through two pinned buffers. One is filled while the other one is being copied.

    Copies are enqueued on the current stream, so they wait for kernels that use the previous file.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # torch's allocator keeps pinned memory for the next reader, so a process allocates it once.
        self._staging = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if is_cuda else []

    def read(self, file: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` bytes of a file, valid until the next call. Raises OSError, and ValueError if the file is shorter."""
        data = self._buffer[:nbytes]
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for index, piece in enumerate(data.split(STAGING_BYTES)):
                staging, start = self._staging[index % 2][: len(piece)], index * STAGING_BYTES
                if self._copied:
                    self._copied[index % 2].synchronize()
                parts = staging.split(-(-len(staging) // READ_THREADS))
                offsets = range(start, start + len(staging), len(parts[0]))
                list(pool.map(lambda part, offset: _fill(part, file, offset), parts, offsets))
                piece.copy_(staging, non_blocking=True)
                if self._copied:
                    self._copied[index % 2].record(torch.cuda.current_stream(self._device))
        return data

    def wait(self) -> None:
        """Wait until the last file is no longer used."""
        if self._copied:
            torch.cuda.current_stream(self._device).synchronize()


def _fill(part: torch.Tensor, file: int, offset: int) -> None:
    remaining = memoryview(part.numpy())
    while remaining:
        nbytes = os.preadv(file, [remaining], offset)
        if not nbytes:
            raise ValueError(f"the file has only {os.fstat(file).st_size} bytes")
        remaining, offset = remaining[nbytes:], offset + nbytes


def map_file(file: int, nbytes: int) -> torch.Tensor:
    """Map the first bytes of a file, read-only."""
    mapping = mmap.mmap(file, nbytes, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


class Reader(BucketReader):
    """Maps the buckets of one version, or reads them if `device` is a GPU; `address` is the version's folder."""

    def __init__(self, address: str, device: torch.device | str = "cpu") -> None:
        self.folder, self.device = Path(address), torch.device(device)

    def begin(self, version: int, section: str) -> None:
        """Nothing to do: the version is complete."""

    def stream(self, section: str, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        yield from self._load(section, buckets, (self._open(section, bucket) for bucket in buckets))

    def _open(self, section: str, bucket: Bucket) -> FileIO:
        path = _path(self.folder, section, bucket)
        try:
            return path.open("rb", buffering=0)
        except OSError as error:
            raise _read_error(path, section, bucket, error) from error

    def _load(self, section: str, buckets: Sequence[Bucket], files: Iterable[FileIO]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket with the content of its file, and close the files."""
        staged = None
        if self.device.type == "cuda":
            staged = StagedReader(self.device, max(bucket.nbytes for bucket in buckets))
        for bucket, file in zip(buckets, files, strict=True):
            with file:
                try:
                    data = (staged.read if staged is not None else map_file)(file.fileno(), bucket.nbytes)
                except (OSError, ValueError) as error:
                    raise _read_error(_path(self.folder, section, bucket), section, bucket, error) from error
            yield bucket, data
        if staged is not None:
            staged.wait()

    def fail(self, reason: str) -> None:
        """Nothing to do: the writer waits for no receiver."""

    def close(self) -> None:
        """Nothing to do: mappings are released with their tensors."""
