"""Buckets in two buffers of the sender's card that every receiver on the host maps: nothing travels, receivers read.

The sender fills one buffer while receivers read the other one, and waits for all of them before it fills a buffer again. The
handles of the buffers are exchanged once; receivers may sit on the sender's own card or on others that reach it. Between tensors
in a CPU's memory the buffers lie in a file that both ends map.
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
from mtpctl.sync.transports.base import BucketReader, PushWriter, Sent
from mtpctl.sync.transports.control import Address, Control, join

NAME = "ipc"
_DEVICE_AT = 6
"""Where `rebuild_cuda_tensor` takes the number of the card, which each process counts for itself."""


class _Shared:
    """Two buffers that other processes map, and what they need for it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            return
        descriptor, path = tempfile.mkstemp(prefix="mtpctl-ipc-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        os.posix_fallocate(descriptor, 0, 2 * nbytes)
        whole = torch.frombuffer(mmap.mmap(descriptor, 2 * nbytes), dtype=torch.uint8)
        os.close(descriptor)
        self.path, self.buffers = path, [whole[:nbytes], whole[nbytes:]]

    def handles(self) -> bytes:
        """What one receiver needs to map the buffers. Each gets its own: a handle of CUDA counts its users."""
        if not self.cuda:
            return pickle.dumps((self.path, self.buffers[0].numel()))
        from torch.multiprocessing.reductions import reduce_tensor

        return pickle.dumps([reduce_tensor(buffer) for buffer in self.buffers])

    def close(self) -> None:
        if not self.cuda:
            Path(self.path).unlink(missing_ok=True)


def _mapped(handles: bytes, device: torch.device) -> list[torch.Tensor]:
    found = pickle.loads(handles)
    if device.type != "cuda":
        path, nbytes = found
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 2 * nbytes, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
        return [whole[:nbytes], whole[nbytes:]]
    buffers = []
    with torch.cuda.device(device):
        for rebuild, arguments in found:
            here = [*arguments]
            here[_DEVICE_AT] = torch.cuda.current_device()
            buffers.append(rebuild(*here))
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
                # torch's own types say text alone, and it takes bytes.
                self.control.store.set(self.control.key("handles", rank), cast(str, self._shared.handles()))
        self.control.wait(lambda: self.control.count(version, section) >= receivers, "waiting for receivers to be ready")
        self._waited += time.monotonic() - began

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """The one of the two buffers that every receiver has read."""
        assert self._shared is not None
        self._read_by_all(self._filled - 2)
        return self._shared.buffers[self._filled % 2][: bucket.nbytes]

    def send(self, section: str, bucket: Bucket) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._filled = self.control.raise_("filled")
        self._sent += bucket.nbytes

    def _read_by_all(self, number: int) -> None:
        if number >= 0:
            receivers = self.control.address.receivers
            self.control.wait(lambda: self.control.count("read", number) >= receivers, "receivers reading weights")

    def finish(self) -> Sent:
        for number in (self._filled - 2, self._filled - 1):
            self._read_by_all(number)
        seconds = time.monotonic() - self._began
        sent = Sent(self._sent, seconds, seconds - self._waited, self._waited)
        self._reset()
        return sent

    def fail(self, why: str) -> None:
        self.control.fail(why)
        self.close()

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None


class Reader(BucketReader):
    """Reads what the writer of the group at `address` fills."""

    def __init__(self, address: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.control, self._rank = join(Address.parse(address))
        self._buffers: list[torch.Tensor] = []
        self._seen = 0

    def begin(self, version: int, section: str) -> None:
        self.control.raise_(version, section)

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
            number = self._seen
            self.control.wait(lambda: self.control.count("filled") > self._seen, "waiting for the next weights")
            yield bucket, self._buffers[number % 2][: bucket.nbytes]
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            self._seen += 1
            self.control.raise_("read", number)

    def fail(self, why: str) -> None:
        self.control.fail(why)

    def close(self) -> None:
        self._buffers = []
