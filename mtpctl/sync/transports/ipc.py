"""Buckets in two buffers on the sender's GPU, which every receiver on the host maps and reads.

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
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch

from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.transports.base import Address, BucketReader, Control, PushWriter, TransferStats, join

NAME = "ipc"
_DEVICE_AT = 6
"""Position of the device index in the arguments of `rebuild_cuda_tensor`. Each process has its own numbering of GPUs."""


class _Shared:
    """Two buffers that other processes can map."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            return
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        descriptor, path = tempfile.mkstemp(prefix=f"mtpctl-ipc-{os.getpid()}-", dir=memory)
        os.posix_fallocate(descriptor, 0, 2 * nbytes)
        whole = torch.frombuffer(mmap.mmap(descriptor, 2 * nbytes), dtype=torch.uint8)
        os.close(descriptor)
        self.path, self.buffers = Path(path), [whole[:nbytes], whole[nbytes:]]

    def handles(self) -> bytes:
        """The handles for one receiver. Each receiver gets its own, since CUDA counts the users of a handle."""
        if not self.cuda:
            return pickle.dumps((str(self.path), self.buffers[0].numel()))
        from torch.multiprocessing.reductions import reduce_tensor

        return pickle.dumps([reduce_tensor(buffer) for buffer in self.buffers])

    def unlink(self) -> None:
        """Delete the name of the file. Mappings keep its memory until they end."""
        if not self.cuda:
            self.path.unlink(missing_ok=True)


def _mapped(handles: bytes, device: torch.device) -> list[torch.Tensor]:
    unpickled = pickle.loads(handles)
    if device.type != "cuda":
        path, nbytes = unpickled
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 2 * nbytes, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
        return [whole[:nbytes], whole[nbytes:]]
    buffers = []
    with torch.cuda.device(device):
        for rebuild, arguments in unpickled:
            local = [*arguments]
            local[_DEVICE_AT] = torch.cuda.current_device()
            buffers.append(rebuild(*local))
    return buffers


class Writer(PushWriter):
    """Fills the buffers, bucket by bucket."""

    def __init__(self, control: Control, device: torch.device, largest: int) -> None:
        self.control, self.device, self.largest = control, device, largest
        self._shared: _Shared | None = None
        self._filled = 0
        self._reset()

    def _reset(self) -> None:
        self._sent, self._waited, self._began = 0, 0.0, time.monotonic()

    def begin(self, version: int, section: str) -> None:
        began = time.monotonic()
        if not self._sent:
            self._began = began
        receivers = self.control.address.receivers
        if self._shared is None:
            self._shared = _Shared(self.largest, self.device)
            for rank in range(1, receivers + 1):
                # torch's type stubs allow only text, but bytes work too.
                self.control.store.set(self.control.key("handles", rank), cast(str, self._shared.handles()))
        self.control.wait(lambda: self.control.count(version, section) >= receivers, "waiting for receivers to be ready")
        self._waited += time.monotonic() - began

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """The next buffer, after every receiver has read its previous bucket."""
        assert self._shared is not None
        self._read_by_all(self._filled - 2)
        return self._shared.buffers[self._filled % 2][: bucket.nbytes]

    def send(self, section: str, bucket: Bucket) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._filled = self.control.increment("filled")
        self._sent += bucket.nbytes

    def _read_by_all(self, number: int) -> None:
        if number >= 0:
            receivers = self.control.address.receivers
            self.control.wait(lambda: self.control.count("read", number) >= receivers, "receivers reading weights")
            if number == 0 and self._shared is not None:
                # All receivers have mapped the file. Unlink it, so that a killed sender does not leave it behind.
                self._shared.unlink()

    def finish(self) -> TransferStats:
        for number in (self._filled - 2, self._filled - 1):
            self._read_by_all(number)
        seconds = time.monotonic() - self._began
        sent = TransferStats(self._sent, seconds, seconds - self._waited, self._waited)
        self._reset()
        return sent

    def fail(self, why: str) -> None:
        self.control.fail(why)
        self.close()

    def close(self) -> None:
        if self._shared is not None:
            self._shared.unlink()
            self._shared = None


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
            self._buffers = _mapped(self.control.store.get(key), self.device)
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

    def fail(self, why: str) -> None:
        self.control.fail(why)

    def close(self) -> None:
        self._buffers = []
