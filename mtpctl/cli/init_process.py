"""The command as the first process of a container.

The kernel discards signals to process 1 that it has no handler for, so a second SIGTERM would never end it. Processes whose parents have
ended become its children, and stay as zombies until it waits for them. So process 1 only forwards signals and reaps children, and the
command runs in a child process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from mtpctl.signals import exit_code

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
END_S = 10.0
"""Seconds to wait for the other processes of the container after the command has ended."""
_LOOK_S = 0.05


def fork_command() -> None:
    """Fork, and return in the child, which is the command. The caller waits for it, and exits with its exit code."""
    awaited = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*awaited, signal.SIGTTOU})
    command = os.fork()
    if not command:
        _lead_group()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code = None
    while code is None:
        number = signal.sigwait(awaited)
        if number == signal.SIGCHLD:
            code = _reap(command)
        else:
            with suppress(ProcessLookupError):
                os.kill(command, number)
    # The watchdog of the command may still be at work.
    deadline = time.monotonic() + END_S
    while _reap_one() is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    sys.stdout.flush()
    os._exit(code)


def _lead_group() -> None:
    """Become the leader of a process group, in the foreground if there is a terminal, so that signals arrive only from process 1."""
    os.setpgid(0, 0)
    with suppress(OSError):  # no terminal, or that of another session
        os.tcsetpgrp(0, os.getpgid(0))


def _reap(command: int) -> int | None:
    """Wait for children that have ended. Returns the exit code of the command if it is among them."""
    code = None
    while (ended := _reap_one()) is not None and ended[0]:
        if ended[0] == command:
            code = os.waitstatus_to_exitcode(ended[1])
    return code if code is None or code >= 0 else exit_code(-code)


def _reap_one() -> tuple[int, int] | None:
    """The id and status of a child that has ended; (0, 0) if all are running, None if there are no children."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
