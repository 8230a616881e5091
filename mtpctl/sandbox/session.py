"""A session: a run that takes one cell of code after the other."""

from __future__ import annotations

import json
import math
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mtpctl.sandbox.frames import write_frame
from mtpctl.sandbox.process import Process

_GRACE_S = 1.0
"""Seconds that a cell has after its interrupt, before the session is killed."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a cell printed, errors among it. `ended`: the session has ended with it, and its state is lost."""

    text: str
    timed_out: bool = False
    too_much_output: bool = False
    ended: bool = False


class Session:
    """Runs cells in one process. It starts with the first one, and again after one that has ended it. One cell at a time."""

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self._process: Process | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, code: str) -> Output:
        """Run a cell. One that takes too long or prints too much is interrupted, and keeps its state; if it goes on, the session ends."""
        with self._lock:
            if self._closed:
                return Output("", ended=True)
            process = self._process = self._process or self._start()
            assert process.channel is not None, "sessions have one"
            with suppress(OSError):  # it has ended between two cells, by a thread that it left
                write_frame(process.channel.fileno(), json.dumps({"code": code}).encode())
            output = self._wait(process)
            if output.ended or self._closed:
                self._release()
            return output

    def close(self) -> None:
        """Kill the session, also while a cell runs in another thread, and run no more. Calling again is fine."""
        self._closed = True
        process = self._process
        if self._lock.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._lock.release()
        elif process is not None:
            process.kill()  # whoever runs the cell lets go of the rest

    def _release(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _wait(self, process: Process) -> Output:
        channel = process.channel
        assert channel is not None
        deadline = time.monotonic() + process.limits.deadline_s
        late, process.too_much_output, interrupted, answered = False, False, False, b""
        with selectors.DefaultSelector() as selector:
            process.watch(selector)
            selector.register(channel, selectors.EVENT_READ)
            while len(answered) < 6 and not process.ended:
                left = deadline - time.monotonic()
                if left <= 0 or (process.too_much_output and not interrupted):
                    if interrupted:
                        process.kill()
                        deadline = math.inf
                    else:
                        late, interrupted, deadline = left <= 0, True, time.monotonic() + _GRACE_S
                        process.interrupt()
                    continue
                for key, _ in selector.select(None if left == math.inf else left):
                    if key.fileobj is channel:
                        piece = b""
                        with suppress(ConnectionResetError):  # killed, with a cell that it had not read
                            piece = channel.recv(6 - len(answered))
                        answered += piece
                        if not piece:
                            selector.unregister(channel)
                    else:
                        process.step(selector, key)
        text = process.take_output()
        return Output(text, late, process.too_much_output, process.ended)
