"""Worker processes of a reward function: a template that loads the function, and workers that are forked from it.

A fork takes milliseconds, while loading sympy takes a second, so a hung worker can be replaced at once. If the module of the function has
started threads, forking is unsafe, so every worker loads the module itself. Output of the function goes to standard error. An idle
process ends, with all its descendants, when the controller closes its socket; the pool kills a worker that is executing a call. All
processes end when the controller dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, cast

from mtpctl.errors import MtpctlError, UserError
from mtpctl.rl.rewards.function import Answered, RewardFunction, Role, load_function
from mtpctl.samples import Sample
from mtpctl.user_code import innermost

FORK, SERVE = b"f", b"s"
"""Requests to a template: fork a worker for the attached socket, or become a worker."""
REPORT_BLOCKING = "report blocking call"
"""Request to a coroutine worker: report which call its event loop is executing."""
TRACE = signal.SIGRTMAX - 2
"""Signal that makes the worker of a plain function write its stack to `Ready.trace`, even while it is in C code."""

START_S = 120.0
"""Maximum time for a process to load the function, in seconds. Loading is slow on a busy machine."""

_ROOT = Path(__file__).resolve().parents[3]
# -P keeps the working directory out of sys.path: a user's random.py would shadow the standard library's.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from mtpctl.rl.rewards.worker import main; main(int(sys.argv[2]))"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EXIT_S = 5.0
_LENGTH = struct.Struct("!Q")
_call_number: contextvars.ContextVar[int] = contextvars.ContextVar("call_number")


@dataclass(frozen=True)
class Job:
    """The first message to a template: the function, its arguments and role, and the time limit for coroutines."""

    reference: str
    args: Mapping[str, object]
    timeout_s: float
    role: Role = field(default_factory=Role.reward)


@dataclass(frozen=True)
class LoadedFunction:
    """Reply of a template: the error if the function could not be loaded; else its kind, and whether the process can be forked."""

    error: str = ""
    coroutine: bool = False
    forkable: bool = True


@dataclass(frozen=True)
class Request:
    """One call. Its result carries the same `number`."""

    number: int
    response: str
    problem: Answered
    sample: Sample


@dataclass(frozen=True)
class Ready:
    """The first message of a worker. `trace`: file descriptor, in the worker, of the file for its stack."""

    pid: int
    trace: int


@dataclass(frozen=True)
class LateCall:
    """Instead of a result: a coroutine exceeded its time limit while it waited at `location` (`judge.py:12`)."""

    number: int
    location: str


@dataclass(frozen=True)
class BlockingCall:
    """Reply to `REPORT_BLOCKING`: the call that the event loop is executing, if any, and its location."""

    number: int | None
    location: str


def descendants(pid: int) -> list[int]:
    """Process ids of all living descendants of a process, started by any of its threads."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process or a thread has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    return [descendant for child in children for descendant in (child, *descendants(child))]


def exit_with_descendants() -> None:
    """End this process after killing all its descendants, which would otherwise keep ports and memory."""
    deadline = time.monotonic() + _EXIT_S
    while (children := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    os._exit(0)


# Messages are pickles, each prefixed by its length, on a stream socket.


def send(connection: socket.socket, message: object) -> None:
    """Send a message on a blocking socket."""
    connection.sendall(_encode(message))


def receive(connection: socket.socket) -> object:
    """Receive the next message from a blocking socket. Raises EOFError if the other end is closed."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    message: object = pickle.loads(_receive_exactly(connection, length))
    return message


class Channel:
    """The controller's end of the socket to a template or worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, connection: socket.socket) -> Channel:
        """Open a channel on the socket. The channel closes the socket."""
        return cls(*await asyncio.open_connection(sock=connection))

    def send(self, message: object) -> None:
        """Send a message without waiting. It is lost if the other end is closed."""
        self._writer.write(_encode(message))

    async def receive(self) -> object:
        """Receive the next message. Raises EOFError if the other end is closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            message: object = pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        return message

    def close(self) -> None:
        """Close the socket at once."""
        self._writer.transport.abort()


def _encode(message: object) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = connection.recv(min(missing, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


class Template:
    """A process that has loaded the function, and from which workers are forked. `loaded` describes the function."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, loaded: LoadedFunction) -> None:
        self.process, self._control, self.loaded = process, control, loaded

    @classmethod
    async def start(cls, job: Job, log: Path | None) -> Template:
        """Start a process that loads the function. Raises UserError if it cannot be loaded."""
        controller_end, worker_end = socket.socketpair()
        with worker_end, contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None if log is None else stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(_ROOT), str(worker_end.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=output,
                pass_fds=[worker_end.fileno()],
                start_new_session=True,  # the trainer handles Ctrl-C
                # One thread for linear algebra, because there are as many workers as CPUs.
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ},
            )
        control = controller_end.dup()  # `_load` closes `controller_end`
        try:
            loaded = await asyncio.wait_for(cls._load(controller_end, job), START_S)
        except TimeoutError:
            error = f"{job.role.function}: loading {job.reference} took more than {START_S:g} s; do less when it is imported"
            loaded = LoadedFunction(error=error)
        except EOFError:
            error = f"{job.role.function}: the process that loaded {job.reference} died; see its standard error"
            loaded = LoadedFunction(error=error)
        except BaseException:
            _kill_group(process)
            raise
        if loaded.error:
            control.close()
            _kill_group(process)
            raise UserError(loaded.error)
        return cls(process, control, loaded)

    @staticmethod
    async def _load(connection: socket.socket, job: Job) -> LoadedFunction:
        channel = await Channel.open(connection)
        try:
            channel.send(job)
            return cast(LoadedFunction, await channel.receive())
        finally:
            channel.close()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def start_worker(self) -> socket.socket:
        """Start a worker, and return the controller's end of its socket. A template that cannot be forked becomes the worker itself."""
        if not self.loaded.forkable:
            self._control.send(SERVE)
            return self._control
        controller_end, worker_end = socket.socketpair()
        with worker_end:
            try:
                socket.send_fds(self._control, [FORK], [worker_end.fileno()])
            except OSError:
                controller_end.close()
                raise
        return controller_end

    def close(self) -> None:
        """Kill the process and all its descendants, also those that a call has left in other process groups."""
        if self.loaded.forkable:
            self._control.close()
        left_behind = descendants(self.process.pid)
        _kill_group(self.process)
        for pid in left_behind:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(descriptor: int) -> None:
    """Run a template, which serves the controller's requests on the socket with this file descriptor."""
    os.dup2(2, 1)
    # The controller ends the workers, so an interrupt must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Orphaned descendants of a worker become children of this process, which ends them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=descriptor)
    job = cast(Job, receive(control))
    try:
        function = load_function(job.reference, job.args, job.role)
    except MtpctlError as error:
        send(control, LoadedFunction(error=str(error)))
        return
    send(control, LoadedFunction("", function.coroutine, len(os.listdir("/proc/self/task")) == 1))
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared with the workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps killed workers
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if request == SERVE:
            # The function may hang, so a thread waits for the end of the controller.
            threading.Thread(target=_exit_with_controller, args=(control,), daemon=True).start()
            _serve(control, function, job.timeout_s)
        if request != FORK:
            exit_with_descendants()
        try:
            child = os.fork()
        except OSError as error:  # no memory, or too many processes: the controller sees a closed socket
            print(f"reward: no worker could be forked: {error}", file=sys.stderr, flush=True)
            child = -1
        if child == 0:
            control.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, 0)  # so that its descendants can be killed with it
            _serve(socket.socket(fileno=descriptors[0]), function, job.timeout_s)
        os.close(descriptors[0])


def _exit_with_controller(controller: socket.socket) -> None:
    """Wait until the controller closes the socket or dies, then end this process."""
    poll = select.poll()
    poll.register(controller, select.POLLRDHUP)
    poll.poll()
    exit_with_descendants()


def _serve(controller: socket.socket, function: RewardFunction, timeout_s: float) -> None:
    """Run calls until the controller closes the socket. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    trace = os.memfd_create("trace")
    faulthandler.register(TRACE, trace, all_threads=False)
    try:
        send(controller, Ready(os.getpid(), trace))
        if function.coroutine:
            asyncio.run(_CoroutineWorker(controller, function, timeout_s).run())
        while True:
            request = cast(Request, receive(controller))
            send(controller, (request.number, *function.run(request.response, request.problem, request.sample)))
    except (EOFError, ConnectionError):
        exit_with_descendants()


class _CoroutineWorker:
    """Runs calls on one event loop. A thread reads the socket, so it can report a call that blocks the loop."""

    def __init__(self, controller: socket.socket, function: RewardFunction, timeout_s: float) -> None:
        self._controller, self._function, self._timeout_s = controller, function, timeout_s
        self._send_lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()
        await asyncio.Event().wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                request = receive(self._controller)
                if request == REPORT_BLOCKING:
                    self._send(self._blocking_call(loop))
                else:
                    loop.call_soon_threadsafe(self._start, cast(Request, request))
        except (EOFError, ConnectionError):
            exit_with_descendants()

    def _blocking_call(self, loop: asyncio.AbstractEventLoop) -> BlockingCall:
        task, frame = asyncio.current_task(loop), sys._current_frames().get(threading.main_thread().ident or 0)
        if task is None:
            return BlockingCall(None, "")
        return BlockingCall(task.get_context().get(_call_number), self._location(reversed(list(traceback.walk_stack(frame)))))

    def _start(self, request: Request) -> None:
        task = asyncio.create_task(self._run_call(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_call(self, request: Request) -> None:
        _call_number.set(request.number)
        call = asyncio.create_task(self._function.run_async(request.response, request.problem, request.sample))
        done, _ = await asyncio.wait({call}, timeout=self._timeout_s)
        if not done:
            location = self._location(_awaited_frames(call.get_coro()))
            call.cancel()  # without waiting for it, because the coroutine may suppress the cancellation
            self._send(LateCall(request.number, location))
        elif call.cancelled():
            self._send((request.number, None, {}, "the coroutine cancelled itself"))
        else:
            self._send((request.number, *call.result()))

    def _location(self, frames: Iterable[tuple[FrameType, int]]) -> str:
        return innermost([(frame.f_code.co_filename, line) for frame, line in frames], self._function.file)

    def _send(self, message: object) -> None:
        with self._send_lock:
            send(self._controller, message)


def _awaited_frames(coroutine: object) -> Iterator[tuple[FrameType, int]]:
    """Frames and lines at which a suspended coroutine waits, outermost first."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None)
