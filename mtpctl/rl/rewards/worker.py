"""What runs in the processes of reward functions: a template that has loaded the function, and workers that are forked from it.

A fork takes milliseconds where loading sympy takes a second, so that a worker that hangs can be killed and replaced at once. A function
whose module has started threads cannot be forked safely; then every worker loads it by itself. Whatever a function prints goes to standard
error. A process ends when the controller closes its socket, or dies, and so does all that it started.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import cast

from mtpctl.errors import MtpctlError
from mtpctl.rl.rewards.descendants import become_subreaper, exit_with_descendants
from mtpctl.rl.rewards.frames import receive, send
from mtpctl.rl.rewards.function import RewardFunction, Role, load_function
from mtpctl.rl.rewards.outcome import Answered
from mtpctl.samples import Sample
from mtpctl.user_code import innermost

FORK, SERVE = b"f", b"s"
"""What the controller asks of a template: to fork a worker for the socket that comes along, or to become one."""
WHO = "who"
"""Asks a worker of coroutines which call its event loop is in."""
WHERE = signal.SIGRTMAX - 2
"""Has a worker of a plain function write where it is into its file `Ready.trace`, also where it is stuck in C."""

_PR_SET_PDEATHSIG = 1
_number: contextvars.ContextVar[int] = contextvars.ContextVar("number")


@dataclass(frozen=True)
class Job:
    """What a template is told first: the function, its arguments and role, and the seconds that a call of a coroutine may take."""

    reference: str
    args: Mapping[str, object]
    timeout_s: float
    role: Role = field(default_factory=Role.reward)


@dataclass(frozen=True)
class Loaded:
    """What a template answers: why it could not load the function, or what kind it is and whether the process can be forked."""

    refused: str = ""
    coroutine: bool = False
    forkable: bool = True


@dataclass(frozen=True)
class Asked:
    """One call. `number` comes back with its result."""

    number: int
    response: str
    problem: Answered
    sample: Sample


@dataclass(frozen=True)
class Ready:
    """The first message of a worker. `trace`: its file descriptor of what `WHERE` writes."""

    pid: int
    trace: int


@dataclass(frozen=True)
class Late:
    """In the place of a result: the coroutine of a call took longer than it may. `place`: `judge.py:12`, where it waits."""

    number: int
    place: str


@dataclass(frozen=True)
class Blocking:
    """What `WHO` is answered with: the call that the event loop is in, if it is in one, and where in it."""

    number: int | None
    place: str


def main(end: int) -> None:
    """Be a template on the socket with this file descriptor, and then whatever the controller asks for."""
    os.dup2(2, 1)
    # Ctrl-C reaches every process of the terminal; when these end is the controller's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Programs of a worker that ended before them get this process for a parent, which ends them.
    become_subreaper()
    control = socket.socket(fileno=end)
    job = cast(Job, receive(control))
    try:
        function = load_function(job.reference, job.args, job.role)
    except MtpctlError as error:
        send(control, Loaded(refused=str(error)))
        return
    send(control, Loaded("", function.coroutine, len(os.listdir("/proc/self/task")) == 1))
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared with the workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker that is killed
    while True:
        asked, ends, _, _ = socket.recv_fds(control, 1, 1)
        if asked == SERVE:
            # Nobody is there to end it where it hangs in the function.
            threading.Thread(target=_exit_with, args=(control,), daemon=True).start()
            _serve(control, function, job.timeout_s)
        if asked != FORK:
            exit_with_descendants()
        try:
            child = os.fork()
        except OSError as error:  # no memory, or too many processes: the controller sees the socket closed, and counts it
            print(f"reward: no worker could be forked: {error}", file=sys.stderr, flush=True)
            child = -1
        if child == 0:
            control.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, 0)  # killed with all that it starts
            _serve(socket.socket(fileno=ends[0]), function, job.timeout_s)
        os.close(ends[0])


def _exit_with(channel: socket.socket) -> None:
    """Wait until the controller closes the socket or dies, and end this process then."""
    hung_up = select.poll()
    hung_up.register(channel, select.POLLRDHUP)
    hung_up.poll()
    exit_with_descendants()


def _serve(channel: socket.socket, function: RewardFunction, timeout_s: float) -> None:
    """Answer calls until the controller closes the socket; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    trace = os.memfd_create("trace")
    faulthandler.register(WHERE, trace, all_threads=False)
    try:
        send(channel, Ready(os.getpid(), trace))
        if function.coroutine:
            asyncio.run(_Coroutines(channel, function, timeout_s).run())
        while True:
            asked = cast(Asked, receive(channel))
            send(channel, (asked.number, *function.run(asked.response, asked.problem, asked.sample)))
    except (EOFError, ConnectionError):
        exit_with_descendants()


class _Coroutines:
    """Runs calls on one event loop. A thread reads the socket, so that it can tell which call blocks the loop."""

    def __init__(self, channel: socket.socket, function: RewardFunction, timeout_s: float) -> None:
        self._channel, self._function, self._timeout_s = channel, function, timeout_s
        self._sending = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()
        await asyncio.Event().wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                asked = receive(self._channel)
                if asked == WHO:
                    task, frame = asyncio.current_task(loop), sys._current_frames().get(threading.main_thread().ident or 0)
                    place = innermost(_frames(reversed(list(traceback.walk_stack(frame)))), self._function.file) if task else ""
                    self._send(Blocking(task.get_context().get(_number) if task is not None else None, place))
                else:
                    loop.call_soon_threadsafe(self._begin, cast(Asked, asked))
        except (EOFError, ConnectionError):
            exit_with_descendants()

    def _begin(self, asked: Asked) -> None:
        task = asyncio.create_task(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: Asked) -> None:
        _number.set(asked.number)
        work = asyncio.create_task(self._function.wait(asked.response, asked.problem, asked.sample))
        done, _ = await asyncio.wait({work}, timeout=self._timeout_s)
        if not done:
            place = innermost(_frames(_awaiting(work.get_coro())), self._function.file)
            work.cancel()  # one that does not let itself be cancelled is not waited for
            self._send(Late(asked.number, place))
        elif work.cancelled():
            self._send((asked.number, None, {}, "the coroutine cancelled itself"))
        else:
            self._send((asked.number, *work.result()))

    def _send(self, message: object) -> None:
        with self._sending:
            send(self._channel, message)


def _awaiting(coroutine: object) -> Iterator[tuple[FrameType, int]]:
    """The frames in which a suspended coroutine waits, the outermost first, with their lines."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None)


def _frames(walked: Iterable[tuple[FrameType, int]]) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in walked]


if __name__ == "__main__":
    main(int(sys.argv[1]))
