"""The controller's end of a template process, from which workers are made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

from mtpctl.errors import UserError
from mtpctl.rl.rewards.frames import Channel
from mtpctl.rl.rewards.worker import FORK, SERVE, Job, Loaded

START_S = 120.0
"""Seconds that a process may take to load the function, also on a busy machine."""
_ROOT = Path(__file__).resolve().parents[3]
# Without the working directory on the path, where a user's random.py would be taken for the library's.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from mtpctl.rl.rewards.worker import main; main(int(sys.argv[2]))"


class Template:
    """A process that has loaded the function. `loaded` says what it found."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, loaded: Loaded) -> None:
        self.process, self._control, self.loaded = process, control, loaded

    @classmethod
    async def start(cls, job: Job, log: Path | None) -> Template:
        """Start a process and have it load the function. Raises UserError where that cannot be done."""
        ours, theirs = socket.socketpair()
        # A session of its own: Ctrl-C is the trainer's to handle. One thread for linear algebra: there are as many workers as CPUs.
        with theirs, contextlib.ExitStack() as stack:
            out: IO[bytes] | None = None if log is None else stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(_ROOT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=out,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ},
            )
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def settle(message: object) -> None:
            if not answered.done():
                answered.set_result(message)

        channel = Channel(settle, lambda: settle(None))
        control = ours.dup()  # the channel closes its own
        try:
            await channel.open(ours)
            channel.send(job)
            loaded = await asyncio.wait_for(answered, START_S)
        except TimeoutError:
            loaded = Loaded(
                refused=f"{job.role.function}: loading {job.reference} took more than {START_S:g} s; do less when it is imported"
            )
        except BaseException:
            _kill(process)
            raise
        finally:
            channel.close()
        if not isinstance(loaded, Loaded):
            loaded = Loaded(
                refused=f"{job.role.function}: the process that loaded {job.reference} died; see what it wrote to standard error"
            )
        if loaded.refused:
            control.close()
            _kill(process)
            raise UserError(loaded.refused)
        return cls(process, control, loaded)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def worker(self) -> socket.socket:
        """The controller's end of a new worker: forked, or this very process, which is a template no more then."""
        if not self.loaded.forkable:
            self._control.send(SERVE)
            return self._control
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [FORK], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """End the process and what was forked from it."""
        if self.loaded.forkable:
            self._control.close()
        _kill(self.process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
