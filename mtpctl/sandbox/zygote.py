"""The process that forks a run for each request. It has imported what answers use, so that a run starts in milliseconds.

A fork has a copy of its parent's memory, and that of one run must hold nothing of another. So the zygote never reads code, tests or input:
they come as open files with the request.

The request is a datagram of JSON with descriptors: `status` and those of `NAMES`. The process answers on `status` when the run has ended.
Closing the other end of `status` kills the run; a byte there interrupts it. When the request socket closes, everything ends.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TypedDict

from mtpctl.sandbox import inside, kernel, landlock, seccomp, walls
from mtpctl.sandbox.preload import preload

NAMES = ("stdin", "stdout", "stderr", "job", "channel", "link")
"""Descriptors of a run, by their numbers."""
LARGEST_REQUEST = 1 << 12
_FIRST_USER = 1_900_000_000
_USERS = 1_000_000
_NOBODY = 65534
_INTERPRETER = 128 << 20
"""Bytes that the interpreter maps with what is preloaded, where the kernel does not say."""
_SHARED_THREADS = 2048
"""Bound of threads where they are counted over all runs of a zygote."""


class Request(TypedDict):
    """One run: its descriptors by name, and its limits."""

    names: list[str]
    cpu_s: float
    memory_mb: int
    tmp_mb: int
    threads: int


@dataclass(slots=True)
class _Run:
    pid: int
    status: socket.socket


class Zygote:
    """Forks runs until its `control` socket closes."""

    def __init__(self, control: socket.socket, kind: walls.Walls) -> None:
        self._control, self._kind = control, kind
        self._base = _mapped()
        self._rules = walls.enter(kind)
        self._runs: dict[int, _Run] = {}
        self._started = 0
        self._selector = selectors.DefaultSelector()

    def try_out(self) -> None:
        """Confine a fork as a run will be. Raises OSError where that does not work here."""
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._confine({"names": [], "cpu_s": 1.0, "memory_mb": 64, "tmp_mb": 1, "threads": 8})
            except BaseException as error:
                os.write(tell, str(error).encode())
            os._exit(0)
        os.close(tell)
        with open(told, "rb") as answer:
            trouble = answer.read().decode()
        os.waitpid(pid, 0)
        if trouble:
            raise OSError(trouble)

    def serve(self) -> None:
        """Fork, kill and report until the socket closes."""
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._accept():
                        return
                elif key.fd == woken:
                    os.read(woken, 512)
                elif isinstance(key.data, _Run):
                    self._command(key.data)
            self._reap()

    def close(self) -> None:
        """Kill what still runs."""
        for run in self._runs.values():
            os.kill(run.pid, signal.SIGKILL)

    def _accept(self) -> bool:
        """Fork for one request; False where there will be no more."""
        text, descriptors, _, _ = socket.recv_fds(self._control, LARGEST_REQUEST, len(NAMES) + 1)
        if not text:
            return False
        request: Request = json.loads(text)
        self._started += 1
        status, *given = descriptors
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory: told as a run that did not start
            with socket.socket(fileno=status) as refused:
                refused.sendall(json.dumps({"error": f"fork: {error}"}).encode())
            pid = -1
        if pid == 0:
            self._become(request, given)
        for descriptor in given:
            os.close(descriptor)
        if pid > 0:
            run = self._runs[pid] = _Run(pid, socket.socket(fileno=status))
            self._selector.register(run.status, selectors.EVENT_READ, run)
        return True

    def _command(self, run: _Run) -> None:
        try:
            wanted = run.status.recv(1)
        except OSError:
            wanted = b""
        os.kill(run.pid, signal.SIGINT if wanted else signal.SIGKILL)
        if not wanted:  # nobody reads: it would be ready for ever
            self._selector.unregister(run.status)

    def _reap(self) -> None:
        while self._runs:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            run = self._runs.pop(pid)
            if run.status in self._selector.get_map():
                self._selector.unregister(run.status)
            report = {"exit": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
            with suppress(OSError):  # whoever asked has gone
                run.status.sendall(json.dumps(report).encode())
            run.status.close()

    def _become(self, request: Request, descriptors: list[int]) -> None:
        """In the fork: take the descriptors, go behind the rest of the walls, do the job, and never return."""
        try:
            self._rules = _take(dict(zip(request["names"], descriptors, strict=True)), self._rules)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._confine(request)
        except BaseException as error:
            os.write(2, f"the sandbox could not be closed: {error}\n".encode())
            os._exit(inside.NOT_CONFINED)
        inside.play()

    def _confine(self, request: Request) -> None:
        named = self._kind in ("namespaces", "user namespaces")
        if named and request["tmp_mb"]:
            walls.private_folder(request["tmp_mb"])
        os.chdir(walls.scratch() if named else "/")
        os.environ["TMPDIR"] = os.getcwd()
        own = self._change_user() if self._kind == "namespaces" else False
        self._limit(request, own, named)
        if self._kind == "none":
            return
        kernel.no_new_privileges()
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        if self._rules >= 0:
            landlock.restrict(self._rules)
            os.close(self._rules)
        files: dict[str, seccomp.Files] = {"landlock": "landlock", "closed": "closed", "bubblewrap": "landlock"}
        kernel.install_filter(seccomp.program(os.getpid(), files.get(self._kind, "mounts")))

    def _change_user(self) -> bool:
        """Become a user that owns nothing, whose threads are counted for this run alone; False where one for all has to do."""
        os.setgroups([])
        for user in (_FIRST_USER + self._started % _USERS, _NOBODY):
            try:
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            except OSError:  # a container that maps only some users
                continue
            return user != _NOBODY
        raise PermissionError("this container has no user other than root")

    def _limit(self, request: Request, own_user: bool, named: bool) -> None:
        seconds = math.ceil(request["cpu_s"])
        space = self._base + (request["memory_mb"] << 20)
        file = max(request["tmp_mb"], 0) << 20
        for kind, soft, hard in (
            (resource.RLIMIT_CPU, seconds, seconds + 1),
            (resource.RLIMIT_AS, space, space),
            (resource.RLIMIT_FSIZE, file, file),
            (resource.RLIMIT_NOFILE, 64, 64),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
        ):
            resource.setrlimit(kind, (soft, hard))
        if named:
            threads = request["threads"] if own_user else _SHARED_THREADS
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def _take(descriptors: dict[str, int], rules: int) -> int:
    """Give the descriptors the numbers of `NAMES`, close all others, and return the number that `rules` have now."""
    kept = {NAMES.index(name): each for name, each in descriptors.items()}
    if rules >= 0:
        kept[len(NAMES)] = rules
    aside = {number: fcntl.fcntl(each, fcntl.F_DUPFD, 2 * len(NAMES)) for number, each in kept.items()}
    for number in range(2 * len(NAMES)):
        if number in aside:
            os.dup2(aside[number], number)
        else:
            os.closerange(number, number + 1)  # closes what is open, and does not mind what is not
    os.closerange(2 * len(NAMES), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return len(NAMES) if rules >= 0 else -1


def _mapped() -> int:
    """Bytes that this process maps, which are a run's to begin with."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # bubblewrap shows no /proc
        return _INTERPRETER


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal wakes the loop."""


def main(descriptor: int, kind: walls.Walls, source: str) -> None:
    """Go behind `kind`, say so, and serve. `source` is the folder that the package was imported from."""
    control = socket.socket(fileno=descriptor)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.set_int_max_str_digits(0)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this goes first
    try:
        preload()
        sys.path.remove(source)
        zygote = Zygote(control, kind)
        zygote.try_out()
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    control.send(b"{}")
    try:
        zygote.serve()
    finally:
        zygote.close()
