"""The zygote: forks the sandboxed processes. It has imported the modules that answers use, so a process starts in milliseconds.

A fork has a copy of its parent's memory, which must not contain data of other processes. Therefore the zygote never reads code, tests or
input: it receives them as open files.

A request is a JSON datagram with file descriptors: `status` and the ones in `DESCRIPTOR_NAMES`. When the process has ended, the zygote
reports on `status`. Closing the other end of `status` kills the process; a byte on it interrupts the process. When the request socket is
closed, all processes are killed.
"""

from __future__ import annotations

import fcntl
import importlib
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
from typing import TypedDict

from mtpctl.sandbox import inside, isolation

DESCRIPTOR_NAMES = ("stdin", "stdout", "stderr", "job", "channel", "link")
"""File descriptors of a process; the position is the number.

`job`: what to run. `channel`: cells of a session, or verdicts of tests. `link`: connects the processes of an answer and its tests.
"""
MAX_REQUEST_BYTES = 1 << 12
_FIRST_UID = 1_900_000_000
_NUM_UIDS = 1_000_000
_NOBODY_UID = 65534
_INTERPRETER_BYTES = 128 << 20
"""Address space of the interpreter with preloaded modules, in bytes, if /proc is not available."""
_MAX_SHARED_THREADS = 2048
"""Maximum number of threads of all processes of a zygote, if the kernel counts them together."""
# fmt: off
_PRELOADED = (
    "abc", "array", "ast", "asyncio", "atexit", "base64", "binascii", "bisect", "bz2", "calendar", "cmath", "cmd", "code", "codecs",
    "collections", "collections.abc", "colorsys", "concurrent.futures", "concurrent.futures.thread", "contextlib", "contextvars", "copy",
    "csv", "ctypes", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "encodings.ascii", "encodings.idna",
    "encodings.latin_1", "encodings.utf_16", "encodings.utf_8_sig", "enum", "errno", "fcntl", "fileinput", "fnmatch", "fractions",
    "functools", "gc", "getopt", "graphlib", "hashlib", "heapq", "hmac", "html", "html.parser", "inspect", "io", "ipaddress", "itertools",
    "json", "keyword", "linecache", "locale", "logging", "lzma", "marshal", "math", "mmap", "numbers", "opcode", "operator", "os",
    "pathlib", "pickle", "platform", "pprint", "queue", "random", "re", "reprlib", "resource", "sched", "secrets", "select", "shlex",
    "shutil", "signal", "socket", "statistics", "string", "stringprep", "struct", "subprocess", "symtable", "sys", "tempfile", "textwrap",
    "threading", "time", "timeit", "token", "tokenize", "traceback", "types", "typing", "unicodedata", "unittest", "unittest.mock",
    "urllib.parse", "uuid", "warnings", "weakref", "xml.etree.ElementTree", "zlib", "zoneinfo", "_strptime", "_pydecimal",
)
# fmt: on
"""Modules of the standard library that answers use. Preloading them makes them available in processes that cannot open files."""


class Request(TypedDict):
    """One process: its descriptors by name, and its limits."""

    names: list[str]
    cpu_s: float
    memory_mb: int
    tmp_mb: int
    threads: int


@dataclass(slots=True)
class _Process:
    pid: int
    status: socket.socket


class Zygote:
    """Forks processes until its `control` socket closes."""

    def __init__(self, control: socket.socket, mechanism: isolation.Mechanism) -> None:
        self._control, self._mechanism = control, mechanism
        self._base_address_space = _address_space_bytes()
        self._landlock_fd = isolation.prepare_isolation(mechanism)
        self._processes: dict[int, _Process] = {}
        self._num_forks = 0
        self._selector = selectors.DefaultSelector()

    def test_isolation(self) -> None:
        """Isolate a fork as for a job. Raises OSError if this fails."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._confine({"names": [], "cpu_s": 1.0, "memory_mb": 64, "tmp_mb": 1, "threads": 8})
            except BaseException as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            failure = pipe.read().decode()
        os.waitpid(pid, 0)
        if failure:
            raise OSError(failure)

    def serve(self) -> None:
        """Serve requests until the socket is closed."""
        wakeup, wakeup_write = os.pipe()
        for descriptor in (wakeup, wakeup_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only wakes the loop
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._accept():
                        return
                elif key.fd == wakeup:
                    os.read(wakeup, 512)
                elif isinstance(key.data, _Process):
                    self._handle_command(key.data)
            self._reap()

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes.values():
            os.kill(process.pid, signal.SIGKILL)

    def _accept(self) -> bool:
        """Fork for one request. Returns False if the socket is closed."""
        text, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, len(DESCRIPTOR_NAMES) + 1)
        if not text:
            return False
        request: Request = json.loads(text)
        self._num_forks += 1
        status, *run_descriptors = descriptors
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory
            with socket.socket(fileno=status) as reply:
                reply.sendall(json.dumps({"error": f"fork: {error}"}).encode())
            pid = -1
        if pid == 0:
            self._start_run(request, run_descriptors)
        for descriptor in run_descriptors:
            os.close(descriptor)
        if pid > 0:
            process = self._processes[pid] = _Process(pid, socket.socket(fileno=status))
            self._selector.register(process.status, selectors.EVENT_READ, process)
        return True

    def _handle_command(self, process: _Process) -> None:
        try:
            command = process.status.recv(1)
        except OSError:
            command = b""
        os.kill(process.pid, signal.SIGINT if command else signal.SIGKILL)
        if not command:  # a closed socket would stay ready
            self._selector.unregister(process.status)

    def _reap(self) -> None:
        while self._processes:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            process = self._processes.pop(pid)
            if process.status in self._selector.get_map():
                self._selector.unregister(process.status)
            report = {"exit": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}
            with suppress(OSError):  # the caller has ended
                process.status.sendall(json.dumps(report).encode())
            process.status.close()

    def _start_run(self, request: Request, descriptors: list[int]) -> None:
        """In the fork: renumber the descriptors, isolate the process, and run the job. Never returns."""
        try:
            self._landlock_fd = _renumber(dict(zip(request["names"], descriptors, strict=True)), self._landlock_fd)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._confine(request)
        except BaseException as error:
            os.write(2, f"the process could not be isolated: {error}\n".encode())
            os._exit(inside.EXIT_NOT_ISOLATED)
        inside.run_job()

    def _confine(self, request: Request) -> None:
        namespaces = self._mechanism in ("namespaces", "user namespaces")
        if namespaces and request["tmp_mb"]:
            isolation.mount_scratch(request["tmp_mb"])
        os.chdir(isolation.scratch_path() if namespaces else "/")
        os.environ["TMPDIR"] = os.getcwd()
        has_own_user = self._change_user() if self._mechanism == "namespaces" else False
        self._set_limits(request, has_own_user, namespaces)
        if self._mechanism == "none":
            return
        isolation.no_new_privileges()
        isolation.drop_capabilities()
        isolation.prctl(isolation.PR_SET_DUMPABLE, 0)
        if self._landlock_fd >= 0:
            isolation.apply_landlock_rules(self._landlock_fd)
            os.close(self._landlock_fd)
        file_access: dict[str, isolation.FileAccess] = {"landlock": "landlock", "closed": "closed", "bubblewrap": "landlock"}
        isolation.install_filter(isolation.build_filter(os.getpid(), file_access.get(self._mechanism, "mounts")))

    def _change_user(self) -> bool:
        """Switch to a user that owns no files. Returns True if only this process has the user, so that its threads count separately."""
        os.setgroups([])
        for user in (_FIRST_UID + self._num_forks % _NUM_UIDS, _NOBODY_UID):
            try:
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            except OSError:  # a container may map only some users
                continue
            return user != _NOBODY_UID
        raise PermissionError("this container has no user other than root")

    def _set_limits(self, request: Request, has_own_user: bool, namespaces: bool) -> None:
        seconds = math.ceil(request["cpu_s"])
        address_space = self._base_address_space + (request["memory_mb"] << 20)
        file_size = max(request["tmp_mb"], 0) << 20
        for limit, soft, hard in (
            (resource.RLIMIT_CPU, seconds, seconds + 1),
            (resource.RLIMIT_AS, address_space, address_space),
            (resource.RLIMIT_FSIZE, file_size, file_size),
            (resource.RLIMIT_NOFILE, 64, 64),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
        ):
            resource.setrlimit(limit, (soft, hard))
        if namespaces:
            threads = request["threads"] if has_own_user else _MAX_SHARED_THREADS
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def _renumber(descriptors: dict[str, int], landlock_fd: int) -> int:
    """Renumber the descriptors in the order of `DESCRIPTOR_NAMES`, close all others, and return the new number of `landlock_fd`."""
    by_number = {DESCRIPTOR_NAMES.index(name): descriptor for name, descriptor in descriptors.items()}
    if landlock_fd >= 0:
        by_number[len(DESCRIPTOR_NAMES)] = landlock_fd
    copies = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, 2 * len(DESCRIPTOR_NAMES)) for number, descriptor in by_number.items()}
    for number in range(2 * len(DESCRIPTOR_NAMES)):
        if number in copies:
            os.dup2(copies[number], number)
        else:
            os.closerange(number, number + 1)  # ignores descriptors that are not open
    os.closerange(2 * len(DESCRIPTOR_NAMES), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return len(DESCRIPTOR_NAMES) if landlock_fd >= 0 else -1


def _address_space_bytes() -> int:
    """Bytes of address space of this process, which every forked process inherits."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # bubblewrap has no /proc
        return _INTERPRETER_BYTES


def main(descriptor: int, mechanism: isolation.Mechanism, source: str) -> None:
    """Isolate this process, report success or the error, and serve requests. `source`: directory that the package was imported from."""
    control = socket.socket(fileno=descriptor)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.set_int_max_str_digits(0)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel kills this process first if memory runs out
    try:
        for name in _PRELOADED:
            with suppress(ImportError):  # the interpreter may have been built without it
                importlib.import_module(name)
        sys.path.remove(source)
        zygote = Zygote(control, mechanism)
        zygote.test_isolation()
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    control.send(b"{}")
    try:
        zygote.serve()
    finally:
        zygote.close()
