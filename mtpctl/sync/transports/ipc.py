"""Transfers buckets through two buffers on the sender's GPU, which every receiver on the host maps and reads.

The sender fills one buffer while receivers read the other, and reuses a buffer once all receivers have read it. The handles of the
buffers are exchanged once. Receivers use the sender's GPU or another one with peer access to it. On a CPU the buffers are a file that both
ends map.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch

from mtpctl.errors import PrerequisiteMissing
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.transports.base import Address, BucketReader, Control, PushWriter, TransferStats, join
from mtpctl.sync.transports.shm import map_file

NAME = "ipc"
_DEVICE_ARGUMENT = 6
"""Position of the device index in the arguments of `rebuild_cuda_tensor`. It is replaced, because processes may number GPUs differently."""


class _SharedBuffers:
    """Two buffers that other processes can map."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            return
        directory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        descriptor, path = tempfile.mkstemp(prefix=f"mtpctl-ipc-{os.getpid()}-", dir=directory)
        try:
            os.posix_fallocate(descriptor, 0, 2 * nbytes)
        except OSError as error:
            os.close(descriptor)
            os.unlink(path)
            raise PrerequisiteMissing(
                f"{path}: no room for {2 * nbytes} bytes of weights in transfer ({error.strerror}); free space there"
            ) from error
        memory = torch.frombuffer(mmap.mmap(descriptor, 2 * nbytes), dtype=torch.uint8)
        os.close(descriptor)
        self.path, self.buffers = Path(path), [memory[:nbytes], memory[nbytes:]]

    def handles(self) -> bytes:
        """Create the handles for one receiver. Each receiver gets separate handles, because CUDA counts the users of a handle."""
        if not self.cuda:
            return pickle.dumps((str(self.path), self.buffers[0].numel()))
        from torch.multiprocessing.reductions import reduce_tensor

        return pickle.dumps([reduce_tensor(buffer) for buffer in self.buffers])

    def unlink(self) -> None:
        """Delete the name of the file. Mappings keep its memory until they end."""
        if not self.cuda:
            self.path.unlink(missing_ok=True)


def _map_buffers(handles: bytes, device: torch.device) -> list[torch.Tensor]:
    unpickled = pickle.loads(handles)
    if device.type != "cuda":
        path, nbytes = unpickled
        with open(path, "rb") as file:
            memory = map_file(file.fileno(), 2 * nbytes)
        return [memory[:nbytes], memory[nbytes:]]
    buffers = []
    with torch.cuda.device(device):
        for rebuild, arguments in unpickled:
            local = [*arguments]
            local[_DEVICE_ARGUMENT] = torch.cuda.current_device()
            buffers.append(rebuild(*local))
    return buffers


class Writer(PushWriter):
    """Fills the buffers, bucket by bucket."""

    def __init__(self, control: Control, device: torch.device, largest: int) -> None:
        self.control, self.device, self.largest = control, device, largest
        self._shared_buffers: _SharedBuffers | None = None
        self._filled = self._section_start = 0
        self._reset()

    def _reset(self) -> None:
        self._sent_bytes, self._wait_s, self._started_at = 0, 0.0, time.monotonic()

    def begin(self, version: int, section: str) -> None:
        if not self._sent_bytes:
            self._started_at = time.monotonic()
        if self._shared_buffers is None:
            self._shared_buffers = _SharedBuffers(self.largest, self.device)
            for rank in range(1, self.control.address.receivers + 1):
                # torch's type stubs allow only text, but bytes work too.
                self.control.store.set(self.control.key("handles", rank), cast(str, self._shared_buffers.handles()))
        self._unready, self._section_start = (version, section), self._filled

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """The next buffer. Waits until every receiver has read the buffer's previous bucket."""
        assert self._shared_buffers is not None
        if self._filled - 2 >= self._section_start:  # Both buffers have buckets of this section.
            self._wait_until_ready()
        self._wait_until_read(self._filled - 2)
        return self._shared_buffers.buffers[self._filled % 2][: bucket.nbytes]

    def send(self, section: str, bucket: Bucket) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._filled = self.control.increment("filled")
        self._sent_bytes += bucket.nbytes

    def _wait_until_read(self, number: int) -> None:
        if number >= 0:
            receivers = self.control.address.receivers
            self.control.wait(lambda: self.control.count("read", number) >= receivers, "receivers reading weights")
            if number == 0 and self._shared_buffers is not None:
                # All receivers have mapped the file. Unlink it, so that a killed sender does not leave it behind.
                self._shared_buffers.unlink()

    def finish(self) -> TransferStats:
        self._wait_until_ready()
        for number in (self._filled - 2, self._filled - 1):
            self._wait_until_read(number)
        seconds = time.monotonic() - self._started_at
        stats = TransferStats(self._sent_bytes, seconds, seconds - self._wait_s, self._wait_s)
        self._reset()
        return stats

    def fail(self, reason: str) -> None:
        self.control.fail(reason)
        self.close()

    def close(self) -> None:
        if self._shared_buffers is not None:
            self._shared_buffers.unlink()
            self._shared_buffers = None


class Reader(BucketReader):
    """Reads the buckets of the writer at `address`."""

    def __init__(self, address: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.control, self._rank = join(Address.parse(address))
        self._buffers: list[torch.Tensor] = []
        self._read = 0

    def begin(self, version: int, section: str) -> None:
        self.control.increment(version, section)

    def _map(self) -> None:
        key = self.control.key("handles", self._rank)
        self.control.wait(lambda: self.control.store.check([key]), "waiting for the sender's buffers")
        try:
            self._buffers = _map_buffers(self.control.store.get(key), self.device)
        except (OSError, RuntimeError) as error:
            raise SyncError(f"the sender's buffers cannot be mapped here ({error}); sync.transport: ipc needs one host") from error

    def stream(self, section: str, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        if not self._buffers:
            self._map()
        for bucket in buckets:
            number = self._read
            self.control.wait(lambda: self.control.count("filled") > self._read, "waiting for the next weights")
            yield bucket, self._buffers[number % 2][: bucket.nbytes]
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            self._read += 1
            self.control.increment("read", number)

    def fail(self, reason: str) -> None:
        self.control.fail(reason)

    def close(self) -> None:
        self._buffers = []
