"""The caller's side of sandboxed processes: `Process` is one of them, and `Session` one that executes cells of code one after another.

`Limits` are the limits of a process, `Result` and `Judgement` the results of processes and of tests.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

from mtpctl.errors import RuntimeFailure
from mtpctl.sandbox.inside import EXIT_NOT_ISOLATED
from mtpctl.sandbox.messages import write_frame

_READ_BYTES = 1 << 16
_GRACE_S = 1.0
"""Seconds between the interrupt of a cell and the kill of its session, if the interrupt does not end the cell."""
_CELL_DONE_BYTES = 6
"""Length of the message that reports the end of a cell, in bytes."""


class Report(TypedDict, total=False):
    """The zygote's report of a process that has ended, or could not start."""

    exit: int
    cpu_s: float
    error: str


class Process:
    """A sandboxed process: its output, limits and result. Closing its `status` socket kills it, even if the caller dies.

    `channel`: socket to the code in the process, for cells of a session and verdicts of tests; None for other processes.
    """

    def __init__(self, status: socket.socket, stdout: int, stderr: int | None, channel: socket.socket | None, limits: Limits) -> None:
        self.limits, self.channel = limits, channel
        self.too_much_output = self.timed_out = False
        self._status = status
        self._output = {stdout: bytearray()} | ({} if stderr is None else {stderr: bytearray()})
        self._open_pipes = set(self._output)
        self._report: Report | None = None

    def kill(self) -> None:
        self._status.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the process."""
        self._status.send(b"i")

    @property
    def ended(self) -> bool:
        """Whether the process has ended and all of its output has been read."""
        return self._report is not None and not self._open_pipes

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the process's descriptors, with the method `read` as their data."""
        for pipe in self._open_pipes:
            selector.register(pipe, selectors.EVENT_READ, self.read)
        selector.register(self._status, selectors.EVENT_READ, self.read)

    def read(self, selector: selectors.BaseSelector, ready: selectors.SelectorKey) -> None:
        """Read from one of the process's descriptors."""
        if ready.fileobj is self._status:
            selector.unregister(self._status)
            self._report = self._read_report()
        else:
            self._read_output(ready.fd)
            if ready.fd not in self._open_pipes:
                selector.unregister(ready.fd)

    def take_output(self) -> str:
        """Return and clear the output so far, stdout first."""
        for pipe in list(self._open_pipes):
            os.set_blocking(pipe, False)
            while self._read_output(pipe):
                pass
        text = "".join(content.decode(errors="replace") for content in self._output.values())
        for content in self._output.values():
            content.clear()
        return text

    def finish(self) -> Result:
        """Wait until the process has ended, or kill it when it exceeds its time or output limit. Raises RuntimeFailure."""
        with selectors.DefaultSelector() as selector:
            self.register(selector)
            wait_for_processes([self], selector, time.monotonic() + self.limits.deadline_s, lambda: self.ended)
        return self.result()

    def result(self) -> Result:
        """The result of a process that has ended. Raises RuntimeFailure if the sandbox itself failed."""
        report = self._report or {}
        stdout, *other_outputs = (content.decode(errors="replace") for content in self._output.values())
        stderr = "".join(other_outputs)
        if "exit" not in report or report["exit"] == EXIT_NOT_ISOLATED:
            raise RuntimeFailure(f"sandbox: a process could not begin: {report.get('error') or stderr.strip() or 'it was killed'}")
        code, cpu_s = report["exit"], report["cpu_s"]
        # At the limit of CPU time the kernel sends SIGXCPU, and a second later SIGKILL.
        exceeded_cpu = code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= self.limits.cpu_s)
        return Result(stdout, stderr, code, self.timed_out or exceeded_cpu, self.too_much_output, cpu_s)

    def close(self) -> None:
        """Kill the process if it is still running, and close its files."""
        self._status.close()
        for pipe in self._output:
            os.close(pipe)
        if self.channel is not None:
            self.channel.close()

    def _read_output(self, pipe: int) -> bool:
        """Read once, and drop output beyond the limit. Returns whether there may be more."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._open_pipes.discard(pipe)
            return False
        remaining_bytes = self.limits.output_bytes - sum(map(len, self._output.values()))
        self._output[pipe] += data[: max(remaining_bytes, 0)]
        self.too_much_output |= len(data) > remaining_bytes
        return len(data) <= remaining_bytes

    def _read_report(self) -> Report:
        chunks = []
        with suppress(OSError):  # the zygote has ended
            while chunk := self._status.recv(4096):
                chunks.append(chunk)
        report: Report = json.loads(b"".join(chunks) or b"{}")
        return report


def wait_for_processes(processes: list[Process], selector: selectors.BaseSelector, deadline: float, is_done: Callable[[], bool]) -> None:
    """Read from the processes until `is_done()` is true. Kill all of them at the deadline, or if one exceeds its output limit."""
    killed = False
    while not is_done():
        remaining = deadline - time.monotonic()
        if not killed and (remaining <= 0 or any(process.too_much_output for process in processes)):
            killed = True
            for process in processes:
                process.timed_out |= remaining <= 0
                process.kill()
        for key, _ in selector.select(None if killed or remaining == math.inf else max(remaining, 0.0)):
            key.data(selector, key)


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a cell, including errors. `ended`: the session has ended, and its state is lost."""

    text: str
    timed_out: bool = False
    too_much_output: bool = False
    ended: bool = False


class Session:
    """Runs cells in one process, one at a time. The first cell starts the process, and the next cell restarts it if it has ended."""

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self._process: Process | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, code: str) -> Output:
        """Run a cell. A cell that exceeds the time or output limit is interrupted; if it does not stop, the session ends."""
        with self._lock:
            if self._closed:
                return Output("", ended=True)
            process = self._process = self._process or self._start()
            assert process.channel is not None, "sessions have a channel"
            with suppress(OSError):  # a thread of an earlier cell may have ended the process
                write_frame(process.channel.fileno(), json.dumps({"code": code}).encode())
            output = self._wait(process, process.channel)
            if output.ended or self._closed:
                self._release()
            return output

    def close(self) -> None:
        """End the session, even while a cell runs in another thread. May be called again."""
        self._closed = True
        process = self._process
        if self._lock.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._lock.release()
        elif process is not None:
            process.kill()  # the thread that runs the cell releases the process

    def _release(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _wait(self, process: Process, channel: socket.socket) -> Output:
        deadline = time.monotonic() + process.limits.deadline_s
        timed_out, process.too_much_output, interrupted, message = False, False, False, b""
        with selectors.DefaultSelector() as selector:
            process.register(selector)
            selector.register(channel, selectors.EVENT_READ)
            while len(message) < _CELL_DONE_BYTES and not process.ended:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or (process.too_much_output and not interrupted):
                    if interrupted:
                        process.kill()
                        deadline = math.inf
                    else:
                        timed_out, interrupted, deadline = remaining <= 0, True, time.monotonic() + _GRACE_S
                        process.interrupt()
                    continue
                for key, _ in selector.select(None if remaining == math.inf else remaining):
                    if key.fileobj is not channel:
                        process.read(selector, key)
                        continue
                    data = b""
                    with suppress(ConnectionResetError):  # the process was killed before it read the cell
                        data = channel.recv(_CELL_DONE_BYTES - len(message))
                    message += data
                    if not data:
                        selector.unregister(channel)
        text = process.take_output()
        return Output(text, timed_out, process.too_much_output, process.ended)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process.

    Attributes:
        cpu_s: CPU seconds of all threads together, rounded up to whole seconds. It does not depend on the load of the machine.
        wall_s: wall-clock seconds, for processes that sleep or wait; default: 3 `cpu_s` + 1.
        memory_mb: address space beyond that of the interpreter.
        tmp_mb: size of /tmp, if the process has one.
        output_bytes: stdout and stderr together.
    """

    cpu_s: float = 5.0
    wall_s: float | None = None
    memory_mb: int = 512
    tmp_mb: int = 16
    threads: int = 32
    output_bytes: int = 1 << 20

    @property
    def deadline_s(self) -> float:
        return 3 * self.cpu_s + 1 if self.wall_s is None else self.wall_s


@dataclass(frozen=True, slots=True)
class Result:
    """A process that has ended.

    Attributes:
        exit: exit code, or minus the signal that ended it.
        timed_out, too_much_output: whether the process was killed for this reason.
    """

    stdout: str
    stderr: str
    exit: int
    timed_out: bool = False
    too_much_output: bool = False
    cpu_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it was not killed and its exit code is 0."""
        return self.exit == 0 and not (self.timed_out or self.too_much_output)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of testing an answer.

    Attributes:
        failures: why each test failed; None if it passed.
        timed_out: whether some tests did not end in time.
        decided: number of tests that ended; these come first in `failures`.
    """

    failures: list[str | None]
    timed_out: bool
    decided: int = 0

    @property
    def passed(self) -> float:
        """Share of the tests that passed."""
        return sum(failure is None for failure in self.failures) / len(self.failures)
