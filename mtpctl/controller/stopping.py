"""Stops a run on a signal: the first requests a stop after the current update, the second cancels what is still running.

A run whose Ray cluster is lost stops as well. Its actors still answer for a while, so the trainer can write a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from mtpctl.cluster.local import Daemons
from mtpctl.controller.state import RunState
from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.signals import StopRequested, exit_code, stop_signals

GIVE_UP_S = 8.0
"""Time for a run to end after a second signal, in seconds. Then its process exits, and the watchdog kills the others."""
POLL_S = 0.5
LOST_S = 45.0
"""Time for a run to end after its cluster was lost, in seconds. Ray kills processes that have missed the GCS server for 60 s."""
SHOW_CURSOR = "\x1b[?25h"


class Stops:
    """Handles requests to stop a run.

    Attributes:
        number: the signal that requested the stop.
        daemons: the Ray daemons that the run started.
    """

    number: int | None = None

    def __init__(self, state: RunState, report: Callable[[str], None], daemons: Daemons | None = None) -> None:
        self.state, self.report, self.daemons = state, report, daemons
        self._signals = stop_signals()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the stop signals in the running event loop, and watch the cluster, while the block runs.

        If the cluster is lost, raises RuntimeFailure instead of the errors that this causes.
        """
        for each in self._signals:
            asyncio.get_running_loop().add_signal_handler(each, self._take, each)
        over = threading.Event()
        threading.Thread(target=self._watch, args=(asyncio.get_running_loop(), over), name="cluster", daemon=True).start()
        try:
            yield
        except MtpctlError as error:
            if (lost := self._lost()) is not None:
                raise lost from error
            raise
        finally:
            over.set()
        if (lost := self._lost()) is not None and self.number is None and self.state.stopping.is_set():
            raise lost

    def _take(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self.state.stopping.set()
            self.report("stopping after this step; another signal stops at once")
            return
        for each in self._signals:
            asyncio.get_running_loop().remove_signal_handler(each)
            signal.signal(each, lambda number, frame: _end(exit_code(number), "interrupted"))
        _end_after(GIVE_UP_S, exit_code(number), "interrupted")
        # Ends the event loop, which then cancels its tasks.
        raise StopRequested(number)

    def _watch(self, loop: asyncio.AbstractEventLoop, over: threading.Event) -> None:
        """Stop the run as on a signal once a daemon of its cluster has ended.

        Runs in a thread, because a Ray call that needs the lost server blocks the event loop until Ray kills the process without a message.
        """
        while (lost := self._lost()) is None:
            if over.wait(POLL_S):
                return
        if over.is_set():
            return
        _end_after(LOST_S, lost.exit_code, f"error: {lost}")
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(self._stop_after_loss, lost)

    def _stop_after_loss(self, lost: RuntimeFailure) -> None:
        self.state.stopping.set()
        self.report(f"{lost}; stopping after this step")

    def _lost(self) -> RuntimeFailure | None:
        """The loss of the cluster, if a daemon of it has ended."""
        ended = None if self.daemons is None else self.daemons.ended()
        return None if ended is None else RuntimeFailure(f"Ray on this machine: {ended}; start the same command again to continue")


def _end_after(seconds: float, code: int, line: str) -> None:
    def end() -> None:
        time.sleep(seconds)
        _end(code, line)

    threading.Thread(target=end, name="end", daemon=True).start()


def _end(code: int, line: str) -> None:
    """Exit at once. The watchdog ends the daemons of the process, as after SIGKILL."""
    if sys.stdout.isatty():
        os.write(1, SHOW_CURSOR.encode())
    os.write(2, f"{line}\n".encode())
    os._exit(code)
