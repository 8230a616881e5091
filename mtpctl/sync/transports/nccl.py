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
"""Seconds between `deadline_s` and the timeout of NCCL's watchdog. The deadline must expire first: the watchdog ends the process."""
_CHANNELS = 16
"""Maximum number of NCCL channels. Each needs buffers on every GPU, and 16 saturate a link."""


type Timestamp = float | torch.cuda.Event
"""A timestamp: CPU time, or an event on a CUDA stream."""


class _Backend(Protocol):
    """The common methods of NCCL's and gloo's process groups."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> dist.Work: ...

    def abort(self) -> None: ...


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
        """Start to broadcast `data` from rank 0, ordered after the work of the current stream."""
        assert self.group is not None, "the communicator is closed"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        return self.group.broadcast([data], options)

    def close(self) -> None:
        """Leave the communicator and abort transfers in flight.

        A shutdown would wait until all members leave, because ncclCommDestroy has a barrier, and receivers leave only when the sender has
        left and announces the next communicator. Transfers of a complete version are never aborted, because both ends wait for them.
        """
        if self.cuda and self.group is not None:
            self.group.abort()
        self.group = None


def _buffers(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]


def _is_completed(work: dist.Work) -> bool:
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
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reset()

    def _reset(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._buffer_index = 0
        self._works: list[tuple[dist.Work, int] | None] = [None, None]
        self._filled: list[tuple[int, torch.Tensor]] = []
        self._timestamps: list[list[Timestamp]] = []
        self._sent_bytes, self._wait_s, self._started_at = 0, 0.0, time.monotonic()

    def begin(self, version: int, section: str) -> None:
        self._send_filled()
        if not self._sent_bytes:
            self._started_at = time.monotonic()
        self._unready = version, section

    def buffer(self, section: str, bucket: Bucket) -> torch.Tensor:
        """The next buffer, once its previous bucket was sent; on a GPU only the stream waits. If both are filled, sends them first."""
        if not self._buffers:
            self._buffers = _buffers(self.largest, self.device)
        if len(self._filled) == len(self._buffers):
            self._send_filled()
        self._wait_sent(self._buffer_index)
        return self._buffers[self._buffer_index][: bucket.nbytes]

    def send(self, section: str, bucket: Bucket) -> None:
        """Send the filled buffer if the receivers are ready; otherwise later, when another buffer is needed or the section ends."""
        self._filled.append((self._buffer_index, self._buffers[self._buffer_index][: bucket.nbytes]))
        self._buffer_index = 1 - self._buffer_index
        if self._are_ready():
            self._send_filled()

    def _send_filled(self) -> None:
        """Send the filled buffers once the receivers are ready."""
        if not self._filled:
            return
        if self._wire is None:
            # A receiver becomes ready only after the sender has joined the communicator.
            receivers = self.control.address.receivers
            self._wait(lambda: self.control.count("joined") >= receivers, "waiting for the receivers of the weights")
            self._wire = Wire(self.control, 0, self.device)
        self._wait_until_ready()
        filled, self._filled = self._filled, []
        for buffer_index, data in filled:
            self._timestamps.append([self._take_timestamp()])
            work = self._wire.broadcast(data)
            self._works[buffer_index] = work, len(self._timestamps) - 1
            if self._side_stream is not None:  # The side stream waits for the end of the broadcast, so that the current one need not.
                with torch.cuda.stream(self._side_stream):
                    work.wait()
                    self._timestamps[-1].append(self._take_timestamp())
            self._sent_bytes += data.numel()

    def _take_timestamp(self) -> Timestamp:
        """Take a timestamp: an event on the CUDA stream if there is one, else the CPU time."""
        if self._side_stream is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait_sent(self, buffer_index: int) -> None:
        """Wait until a buffer's bucket was sent, so that it may be overwritten. On a GPU the stream waits, otherwise this thread."""
        if (transfer := self._works[buffer_index]) is None:
            return
        work, index = transfer
        self._works[buffer_index] = None
        if self._side_stream is None:
            self.control.wait(lambda: _is_completed(work), "sending weights")
            self._timestamps[index].append(self._take_timestamp())
        else:
            work.wait()

    def finish(self) -> TransferStats:
        self._send_filled()
        for buffer_index in (self._buffer_index, 1 - self._buffer_index):
            self._wait_sent(buffer_index)
        if self._side_stream is not None:
            done_event = torch.cuda.Event()
            done_event.record(self._side_stream)
            self.control.wait(done_event.query, "sending weights")
        stats = TransferStats(self._sent_bytes, time.monotonic() - self._started_at, self._wire_seconds(), self._wait_s)
        self._reset()
        return stats

    def _wire_seconds(self) -> float:
        """Seconds during which at least one bucket was on the wire."""
        wire_s = last_end = 0.0
        for timestamps in self._timestamps:
            start, end = (_seconds(self._timestamps[0][0], timestamp) for timestamp in timestamps)
            wire_s += max(0.0, end - max(start, last_end))
            last_end = max(last_end, end)
        return wire_s

    def fail(self, reason: str) -> None:
        self.control.fail(reason)
        self.close()

    def close(self) -> None:
        """Leave the communicator and release the buffers."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._reset()


def _seconds(start: Timestamp, end: Timestamp) -> float:
    """Seconds between two timestamps of the same kind."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3


class Reader(BucketReader):
    """Receives the buckets of the writer at `address`."""

    def __init__(self, address: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.control, rank = join(Address.parse(address))
        self._wire = Wire(self.control, rank, self.device)

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
                self.control.wait(partial(_is_completed, work), "receiving weights")
            if index + 1 < len(buckets):
                incoming = receive(index + 1)
            yield bucket, data
        if self._wire.cuda:
            done_event = torch.cuda.Event()
            done_event.record()
            self.control.wait(done_event.query, "receiving weights")

    def fail(self, reason: str) -> None:
        self.control.fail(reason)
        self.close()

    def close(self) -> None:
        self._wire.close()
