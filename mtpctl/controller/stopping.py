"""Stops a run: on a signal, or if its Ray cluster is lost."""

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

SIGNAL_EXIT_S = 8.0
"""Time limit for a clean shutdown after a second signal, in seconds. Then the process exits, and the watchdog kills Ray's processes."""
CLUSTER_EXIT_S = 45.0
"""Time limit for a checkpoint and a shutdown after the loss of the cluster, in seconds. Ray kills the actors after 60 s without GCS."""
POLL_S = 0.5
SHOW_CURSOR = "\x1b[?25h"


class StopHandler:
    """Stops a run on a signal: the first requests a stop after the current update, the second cancels it, a third exits immediately.

    It also stops a run whose Ray cluster is lost. The actors answer for some seconds more, so the trainer can write a checkpoint.

    Attributes:
        number: the signal that requested the stop.
        daemons: the Ray daemons that the run started.
    """

    number: int | None = None

    def __init__(self, state: RunState, report: Callable[[str], None], daemons: Daemons | None = None) -> None:
        self.state, self.report, self.daemons = state, report, daemons
        self._signals = stop_signals()

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the stop signals in the running event loop, and watch the cluster, while the block runs.

        If the cluster is lost, raises a RuntimeFailure that names the daemon, instead of the error of the actor call that failed first.
        """
        for signal_number in self._signals:
            asyncio.get_running_loop().add_signal_handler(signal_number, self._on_signal, signal_number)
        block_ended = threading.Event()
        threading.Thread(target=self._watch, args=(asyncio.get_running_loop(), block_ended), name="cluster", daemon=True).start()
        try:
            yield
        except MtpctlError as error:
            if (cluster_error := self._cluster_error()) is not None:
                raise cluster_error from error
            raise
        finally:
            block_ended.set()
        if (cluster_error := self._cluster_error()) is not None and self.number is None and self.state.stop_requested.is_set():
            raise cluster_error

    def _on_signal(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self.state.stop_requested.set()
            self.report("stopping after this step; another signal stops immediately")
            return
        for signal_number in self._signals:
            asyncio.get_running_loop().remove_signal_handler(signal_number)
            signal.signal(signal_number, lambda number, frame: _exit(exit_code(number), "interrupted"))
        _exit_after(SIGNAL_EXIT_S, exit_code(number), "interrupted")
        # Ends the event loop; `asyncio.run` then cancels the tasks.
        raise StopRequested(number)

    def _watch(self, loop: asyncio.AbstractEventLoop, block_ended: threading.Event) -> None:
        """Stop the run when a daemon of its cluster ends. Runs in a thread, because calls to a dead GCS server block the event loop."""
        while (cluster_error := self._cluster_error()) is None:
            if block_ended.wait(POLL_S):
                return
        if block_ended.is_set():
            return
        _exit_after(CLUSTER_EXIT_S, cluster_error.exit_code, f"error: {cluster_error}")
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(self._stop_after_cluster_error, cluster_error)

    def _stop_after_cluster_error(self, cluster_error: RuntimeFailure) -> None:
        self.state.stop_requested.set()
        self.report(f"{cluster_error}; stopping after this step")

    def _cluster_error(self) -> RuntimeFailure | None:
        """The error if a daemon of the cluster has ended."""
        problem = None if self.daemons is None else self.daemons.describe_ended()
        return None if problem is None else RuntimeFailure(f"Ray on this machine: {problem}; start the same command again to continue")


def _exit_after(seconds: float, exit_status: int, message: str) -> None:
    def wait_and_exit() -> None:
        time.sleep(seconds)
        _exit(exit_status, message)

    threading.Thread(target=wait_and_exit, name="exit", daemon=True).start()


def _exit(exit_status: int, message: str) -> None:
    """Exit immediately. The watchdog then ends Ray's daemons, as it would if this process were killed."""
    if sys.stdout.isatty():
        os.write(1, SHOW_CURSOR.encode())
    os.write(2, f"{message}\n".encode())
    os._exit(exit_status)
