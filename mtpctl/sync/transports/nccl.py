"""Broadcasts buckets from the GPU of the sender to the GPUs of all receivers, within a host or across hosts.

One NCCL communicator serves all versions. It is an unregistered process group, so it does not affect the groups of the trainer or the
engine. Both ends have two buffers: while one bucket is being sent, the sender packs the next one and the receivers write the previous one
to their parameters. On CPUs the broadcast uses gloo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist

from mtpctl.plan.buckets import Bucket
from mtpctl.sync.transports.base import Address, BucketReader, Control, PushWriter, TransferStats, join

NAME = "nccl"
_WATCHDOG_MARGIN_S = 3600.0
"""Seconds between our deadline and the timeout of NCCL's watchdog, which would end the process. Our deadline must expire first."""
_CHANNELS = 16
"""Maximum number of NCCL channels. Each needs buffers on every GPU, and this number saturates a link."""


type Mark = float | torch.cuda.Event
"""A timestamp: CPU time, or an event on a CUDA stream."""


class _Backend(Protocol):
    """The common methods of NCCL's and gloo's process groups."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> dist.Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


class Wire:
    """One member's end of the communicator. Rank 0 sends, all others receive."""

    def __init__(self, control: Control, rank: int, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        size = control.address.receivers + 1
        store = dist.PrefixStore(control.key("wire"), control.store)
        if self.cuda:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=control.address.deadline_s + _WATCHDOG_MARGIN_S)
            options.config.max_ctas = _CHANNELS
            with torch.cuda.device(device):
                group: object = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=control.address.deadline_s))
        # torch's type stubs lack the common methods.
        self.group: _Backend | None = cast(_Backend, group)

    def broadcast(self, data: torch.Tensor) -> dist.Work:
        """Start to broadcast `data` from rank 0, after the work of the current stream."""
        assert self.group is not None, "the communicator is closed"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        return self.group.broadcast([data], options)

    def close(self, *, broken: bool = False) -> None:
        """Leave the communicator; `broken`: abort transfers in flight."""
        if self.cuda and self.group is not None:
            self.group.abort() if broken else self.group.shutdown()
        self.group = None


def _buffers(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]


def _completed(work: dist.Work) -> bool:
    """Whether a transfer has completed. Raises its error if it failed."""
    if not work.is_completed():
        return False
    work.wait()
    return True


class Writer(PushWriter):
    """Sends the buckets of consecutive versions."""

    def __init__(self, control: Control, device: torch.device, largest: int) -> None:
        self.control, self.device, self.largest = control, device, largest
        self._wire: Wire | None = None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reset()

    def _reset(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._turn = 0
        self._works: list[tuple[dist.Work, int] | None] = [None, None]
        self._marks: list[list[Mark]] = []
        self._sent, self._waited, self._began = 0, 0.0, time.monotonic()

    def begin(self, version: int, section: str) -> None:
        began = time.monotonic()
        if not self._sent:
            self._began = began
        receivers = self.control.address.receivers
        self.control.wait(lambda: self.control.count("joined") >= receivers, "waiting for the receivers of the weights")
        if self._wire is None:
            self._wire = Wire(self.control, 0, self.device)
        self.control.wait(lambda: self.control.count(version, section) >= receivers, "waiting for receivers to be ready")
        self._waited += time.monotonic() - began

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """The next buffer, after its previous bucket has been sent."""
        if not self._buffers:
            self._buffers = _buffers(self.largest, self.device)
        self._wait_sent(self._turn)
        return self._buffers[self._turn][: bucket.nbytes]

    def send(self, section: str, bucket: Bucket) -> None:
        assert self._wire is not None
        data = self._buffers[self._turn][: bucket.nbytes]
        self._marks.append([self._mark()])
        work = self._wire.broadcast(data)
        self._works[self._turn] = work, len(self._marks) - 1
        if self._side is not None:
            with torch.cuda.stream(self._side):
                work.wait()
                self._marks[-1].append(self._mark())
        self._sent += bucket.nbytes
        self._turn = 1 - self._turn

    def _mark(self) -> Mark:
        """The current point in time, on the CUDA stream if there is one, else on the clock."""
        if self._side is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait_sent(self, turn: int) -> None:
        """Wait until a buffer may be overwritten, because its bucket was sent. On a GPU the stream waits, otherwise this thread."""
        if (sending := self._works[turn]) is None:
            return
        work, mark = sending
        self._works[turn] = None
        if self._side is None:
            self.control.wait(lambda: _completed(work), "sending weights")
            self._marks[mark].append(self._mark())
        else:
            work.wait()

    def finish(self) -> TransferStats:
        for turn in (self._turn, 1 - self._turn):
            self._wait_sent(turn)
        if self._side is not None:
            done = torch.cuda.Event()
            done.record(self._side)
            self.control.wait(done.query, "sending weights")
        sent = TransferStats(self._sent, time.monotonic() - self._began, self._wire_seconds(), self._waited)
        self._reset()
        return sent

    def _wire_seconds(self) -> float:
        """Seconds during which at least one bucket was on the wire."""
        busy, end = 0.0, float("-inf")
        for start, stop in ([_seconds(self._marks[0][0], mark) for mark in marks] for marks in self._marks):
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return busy

    def fail(self, why: str) -> None:
        self.control.fail(why)
        self.close(broken=True)

    def close(self, *, broken: bool = False) -> None:
        """Leave the group and release the buffers; `broken`: without waiting for transfers in flight."""
        if self._wire is not None:
            self._wire.close(broken=broken)
            self._wire = None
        self._reset()


def _seconds(first: Mark, later: Mark) -> float:
    """Seconds between two points in time of the same kind."""
    if isinstance(first, float) and isinstance(later, float):
        return later - first
    assert isinstance(first, torch.cuda.Event) and isinstance(later, torch.cuda.Event)
    return float(first.elapsed_time(later)) / 1e3


class Reader(BucketReader):
    """Receives the buckets of the writer at `address`."""

    def __init__(self, address: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.control, rank = join(Address.parse(address))
        self._wire = Wire(self.control, rank, self.device)
        self._closed = False

    def begin(self, version: int, section: str) -> None:
        self.control.increment(version, section)

    def stream(self, section: str, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield the buckets as they arrive. While one is used, the next one is being received."""
        buffers = _buffers(max(bucket.nbytes for bucket in buckets), self.device)

        def receive(index: int) -> tuple[dist.Work, torch.Tensor]:
            data = buffers[index % 2][: buckets[index].nbytes]
            return self._wire.broadcast(data), data

        incoming = receive(0)
        for index, bucket in enumerate(buckets):
            work, data = incoming
            if self._wire.cuda:
                work.wait()
            else:
                self.control.wait(partial(_completed, work), "receiving weights")
            if index + 1 < len(buckets):
                incoming = receive(index + 1)
            yield bucket, data
        if self._wire.cuda:
            done = torch.cuda.Event()
            done.record()
            self.control.wait(done.query, "receiving weights")

    def fail(self, why: str) -> None:
        self.control.fail(why)
        self._wire.close(broken=True)
        self._closed = True

    def close(self) -> None:
        if not self._closed:
            self._wire.close()
            self._closed = True
