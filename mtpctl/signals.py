"""Signals that request a stop, and their exit codes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""In order: sent by Ctrl-C; by `timeout`, schedulers and container runtimes; and by a terminal that is closed."""


class StopRequested(KeyboardInterrupt):
    """A signal requested a stop. A KeyboardInterrupt, so that libraries handle it like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(number: int) -> int:
    """The exit code after a stop by this signal, as shells report it: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + number


def stop_signals() -> list[signal.Signals]:
    """The stop signals that this process handles. SIGHUP is left out if it is ignored, as under `nohup`."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def raise_on_stop() -> None:
    """Raise KeyboardInterrupt in the main thread on SIGINT, and its subclass StopRequested on the other stop signals."""
    for number in stop_signals():
        # asyncio cancels its main task on SIGINT only if the handler is Python's own.
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _raise)


@contextmanager
def raising_on_stop() -> Iterator[None]:
    """Raise StopRequested on SIGTERM and SIGHUP within the block. The handler of SIGINT is unchanged."""
    handlers = {number: signal.signal(number, _raise) for number in stop_signals() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise StopRequested(number)
