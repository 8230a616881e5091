"""The caller's end of one run: its open files, its limits in time and output, and how it ended."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypedDict

from mtpctl.errors import RuntimeFailure
from mtpctl.sandbox.inside import NOT_CONFINED
from mtpctl.sandbox.limits import Limits, Result

_PIECE = 1 << 16


class Report(TypedDict, total=False):
    """What the zygote says of a run that has ended, or of one that could not begin."""

    exit: int
    cpu_s: float
    error: str


class Process:
    """A run under way. Whatever becomes of this object, closing its `status` end kills the run."""

    def __init__(self, status: socket.socket, stdout: int, stderr: int | None, channel: socket.socket | None, limits: Limits) -> None:
        self.limits, self.channel = limits, channel
        self.too_much_output = self.timed_out = False
        self._status = status
        self._pipes = {stdout: bytearray()} | ({} if stderr is None else {stderr: bytearray()})
        self._order = list(self._pipes)
        self._open = set(self._order)
        self._report: Report | None = None

    def kill(self) -> None:
        """Kill the run."""
        self._status.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the run."""
        self._status.send(b"i")

    @property
    def ended(self) -> bool:
        """Whether the run has ended, and all of its output is here."""
        return self._report is not None and not self._open

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what this run writes to; `step` is the data."""
        for pipe in self._open:
            selector.register(pipe, selectors.EVENT_READ, self.step)
        selector.register(self._status, selectors.EVENT_READ, self.step)

    def step(self, selector: selectors.BaseSelector, ready: selectors.SelectorKey) -> None:
        """Read what is there from one of the run's ends."""
        if ready.fileobj is self._status:
            selector.unregister(self._status)
            self._report = self._read_report()
        else:
            self._read(ready.fd)
            if ready.fd not in self._open:
                selector.unregister(ready.fd)

    def take_output(self) -> str:
        """Take what the run has written so far, stdout first."""
        for pipe in list(self._open):
            os.set_blocking(pipe, False)
            while self._read(pipe):
                pass
        text = "".join(_text(kept) for kept in self._pipes.values())
        for kept in self._pipes.values():
            kept.clear()
        return text

    def finish(self) -> Result:
        """Wait until the run has ended, or has used up its time or output and is killed: its result. Raises RuntimeFailure."""
        with selectors.DefaultSelector() as selector:
            self.watch(selector)
            wait([self], selector, time.monotonic() + self.limits.deadline_s, lambda: self.ended)
        return self.result()

    def result(self) -> Result:
        """The result of a run that has ended. Raises RuntimeFailure where the sandbox itself has failed."""
        report = self._report or {}
        stdout, *stderr = (_text(self._pipes[pipe]) for pipe in self._order)
        told = stderr[0] if stderr else ""
        if "exit" not in report or report["exit"] == NOT_CONFINED:
            raise RuntimeFailure(f"sandbox: a run could not begin: {report.get('error') or told.strip() or 'its process was killed'}")
        code = report["exit"]
        return Result(
            stdout,
            told,
            code,
            timed_out=self.timed_out or code == -signal.SIGXCPU or (code == -signal.SIGKILL and report["cpu_s"] >= self.limits.cpu_s),
            out_of_memory=told.rstrip().rpartition("\n")[2].startswith("MemoryError"),
            too_much_output=self.too_much_output,
            cpu_s=report["cpu_s"],
        )

    def close(self) -> None:
        """Kill the run if it still goes, and let go of its files."""
        self._status.close()
        for pipe in self._order:
            os.close(pipe)
        if self.channel is not None:
            self.channel.close()

    def _read(self, pipe: int) -> bool:
        """Read a piece; what is beyond the limit is dropped. Returns whether there may be more now."""
        try:
            piece = os.read(pipe, _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self._open.discard(pipe)
            return False
        room = self.limits.output_bytes - sum(map(len, self._pipes.values()))
        self._pipes[pipe] += piece[: max(room, 0)]
        self.too_much_output |= len(piece) > room
        return len(piece) <= room

    def _read_report(self) -> Report:
        parts = []
        with suppress(OSError):  # the zygote has ended: no report
            while part := self._status.recv(4096):
                parts.append(part)
        report: Report = json.loads(b"".join(parts) or b"{}")
        return report


def wait(runs: list[Process], selector: selectors.BaseSelector, deadline: float, done: Callable[[], bool]) -> None:
    """Read from the runs until `done`; kill all of them when the clock reaches `deadline`, or one writes too much."""
    killed = False
    while not done():
        left = deadline - time.monotonic()
        if not killed and (left <= 0 or any(run.too_much_output for run in runs)):
            killed = True
            for run in runs:
                run.timed_out |= left <= 0
                run.kill()
        for key, _ in selector.select(None if killed or left == math.inf else max(left, 0.0)):
            key.data(selector, key)


def _text(kept: bytearray) -> str:
    return kept.decode(errors="replace")
