"""Runs untrusted code in isolation: programs, sessions that keep their state, and answers that are tested."""

from __future__ import annotations

import ast
import fcntl
import json
import math
import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.sandbox.isolation import MECHANISMS_BY_STRENGTH, Mechanism, library_links, readable_paths
from mtpctl.sandbox.messages import VerdictReader, new_key
from mtpctl.sandbox.session import Judgement, Limits, Process, Result, Session, wait_for_processes
from mtpctl.sandbox.values import encode, reject_references
from mtpctl.sandbox.zygote import Request

Isolation = Literal["required", "none"]
START_TIMEOUT_S = 30.0
"""Startup timeout of the zygote in seconds. On a busy machine its imports take long."""

_ZYGOTE_PROGRAM = (
    "import sys; sys.path.insert(0, {source!r}); from mtpctl.sandbox.zygote import main; main({fd}, {mechanism!r}, {source!r})"
)
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""All environment variables of a sandboxed process. Without the last two, libraries start a thread for each core."""
_LOADER_VARIABLES = ("LD_LIBRARY_PATH",)
"""Variables of the caller that a sandboxed process inherits, because its interpreter may not start without them."""


class Sandbox:
    """Starts processes, from any thread. One zygote forks all of them; it starts with the first process, and again if it was killed.

    `isolation="none"` allows processes without isolation if no mechanism works. `only` tries a single mechanism.
    """

    def __init__(self, isolation: Isolation = "required", only: Mechanism | None = None) -> None:
        self._mechanisms: tuple[Mechanism, ...] = (only,) if only else MECHANISMS_BY_STRENGTH + (("none",) if isolation == "none" else ())
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._mechanism: Mechanism | None = None
        self.refused: dict[str, str] = {}
        """Why stronger mechanisms do not work on this machine."""

    def mechanism(self) -> Mechanism:
        """The isolation mechanism. Raises PrerequisiteMissing if none works."""
        with self._lock:
            self._connect()
            assert self._mechanism is not None, "it has started"
            return self._mechanism

    def run(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run a program. Raises PrerequisiteMissing if no isolation works, RuntimeFailure if its process could not start."""
        with ExitStack() as stack:
            process = self.start({"kind": "program", "code": code}, limits or Limits(), stdin=stdin)
            stack.callback(process.close)
            return process.finish()

    def session(self, limits: Limits | None = None) -> Session:
        """A session, whose cells share state and all limits except `wall_s` and `output_bytes`. Cells raise the errors of `run`."""
        return Session(lambda: self.start({"kind": "session"}, limits or Limits(), channel=True))

    def judge(self, code: str, tests: list[str], *, entry_point: str | None = None, limits: Limits | None = None) -> Judgement:
        """Test an answer. A test is Python code, and passes if it raises no exception.

        The answer and the tests run in separate processes (see `sandbox.questions`), each within `limits`. Tests run in order, in one
        namespace. Names that they neither define nor import refer to the answer, except built-ins and modules of Python; `entry_point`
        always refers to the answer. Raises the errors of `run`, and SyntaxError if a test is not valid Python.
        """
        entry_points = [entry_point] if entry_point else []
        nodes = (node for test in tests for node in ast.walk(ast.parse(test)))
        names = sorted({node.id for node in nodes if isinstance(node, ast.Name)}.union(entry_points))
        job = {"kind": "tests", "tests": tests, "names": names, "builtins": entry_points}
        return self._run_judgement({"kind": "answer", "code": code}, job, len(tests), limits or Limits())

    def judge_calls(
        self, code: str, function: str, cases: Sequence[tuple[list[Any], list[Any]]], *, limits: Limits | None = None
    ) -> Judgement:
        """Test an answer by calls of `function`, or of the method of that name of its class `Solution`.

        A case has the arguments and the accepted results, as parsed from JSON. The answer may use common modules of the standard library
        without importing them. Raises the errors of `run`.
        """
        encoded = [encode(list(case), reject_references) for case in cases]  # unlike JSON, this preserves numeric keys of mappings
        job = {"kind": "calls", "function": function, "cases": encoded}
        return self._run_judgement({"kind": "answer", "code": code, "function": function}, job, len(cases), limits or Limits())

    def _run_judgement(self, answer_job: Mapping[str, object], job: Mapping[str, object], count: int, limits: Limits) -> Judgement:
        """Run an answer and its tests in separate processes (see `sandbox.questions`)."""
        judge_end, answer_end = socket.socketpair()
        key = new_key()
        with ExitStack() as stack:
            for end in (judge_end, answer_end):
                stack.callback(end.close)
            answer = self.start(answer_job, limits, link=answer_end)
            stack.callback(answer.close)
            judge = self.start({**job, "key": key}, limits, channel=True, link=judge_end)
            stack.callback(judge.close)
            for end in (judge_end, answer_end):
                end.close()
            return _collect_judgement(answer, judge, VerdictReader(key, count), count)

    def close(self) -> None:
        """Kill all processes. May be called again, and the sandbox may be used afterwards."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, job: Mapping[str, object], limits: Limits, *, stdin: str = "", channel: bool = False, link: socket.socket | None = None
    ) -> Process:
        """Fork a process for `job` (`inside.Job`).

        channel: open a socket to the caller, for cells or verdicts. link: the process's end of the socket between an answer and its tests.
        """
        with ExitStack() as stack:

            def close_later(descriptor: int) -> int:
                stack.callback(os.close, descriptor)
                return descriptor

            descriptors = {"stdin": close_later(_memory_file("stdin", stdin.encode(errors="surrogateescape")))}
            stdout, descriptors["stdout"] = _pipe(close_later)
            stderr = None
            if job["kind"] == "session":
                descriptors["stderr"] = close_later(os.dup(descriptors["stdout"]))
            else:
                stderr, descriptors["stderr"] = _pipe(close_later)
            descriptors["job"] = close_later(_memory_file("job", json.dumps(job).encode()))
            channel_end = None
            if channel:
                channel_end, zygote_channel = socket.socketpair()
                descriptors["channel"] = close_later(zygote_channel.detach())
            if link is not None:
                descriptors["link"] = link.fileno()
            status, zygote_status = socket.socketpair()
            process = Process(status, stdout, stderr, channel_end, limits)
            request: Request = {
                "names": list(descriptors),
                "cpu_s": limits.cpu_s,
                "memory_mb": limits.memory_mb,
                "tmp_mb": limits.tmp_mb,
                "threads": limits.threads,
            }
            try:
                self._send_request(json.dumps(request).encode(), [close_later(zygote_status.detach()), *descriptors.values()])
            except BaseException:
                process.close()
                raise
            return process

    def _send_request(self, request: bytes, descriptors: list[int]) -> None:
        with self._lock:
            control = self._connect()
            try:
                socket.send_fds(control, [request], descriptors)
            except OSError:  # the zygote was killed
                self._stop()
                socket.send_fds(self._connect(), [request], descriptors)

    def _connect(self) -> socket.socket:
        """The control socket of the zygote, which is started if necessary."""
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._control is None:
            for mechanism in (self._mechanism,) if self._mechanism else self._mechanisms:
                failure = self._start_zygote(mechanism)
                if not failure:
                    break
                self.refused[mechanism] = failure
        if self._control is None:
            reasons = "; ".join(f"{mechanism}: {reason}" for mechanism, reason in self.refused.items())
            raise PrerequisiteMissing(f"sandbox: the model's code cannot be isolated from network and files here ({reasons})")
        return self._control

    def _start_zygote(self, mechanism: Mechanism) -> str:
        """Start a zygote with this isolation. Returns why it failed, or an empty string."""
        source = str(Path(__file__).parents[2])
        control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with zygote_end:
            command = [
                sys.executable,
                "-I",
                "-B",
                "-X",
                "utf8",
                "-c",
                _ZYGOTE_PROGRAM.format(source=source, fd=zygote_end.fileno(), mechanism=mechanism),
            ]
            if mechanism == "bubblewrap":
                bubblewrap_command = _bubblewrap_command(command, source)
                if bubblewrap_command is None:
                    control.close()
                    return "bwrap is not installed"
                command = bubblewrap_command
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(zygote_end.fileno(),),
                env=_ENVIRONMENT | {name: os.environ[name] for name in _LOADER_VARIABLES if name in os.environ},
                cwd="/",
                start_new_session=True,  # the caller handles Ctrl-C
            )
        control.settimeout(START_TIMEOUT_S)
        try:
            message = control.recv(1 << 12)
        except TimeoutError:
            message = b""
        assert process.stderr is not None
        reply = json.loads(message) if message else {"error": ""}
        if "error" in reply:
            control.close()
            process.kill()
            output = process.communicate()[1].decode(errors="replace").strip()
            return reply["error"] or (output.splitlines() or ["no answer"])[-1]
        process.stderr.close()
        control.settimeout(None)
        self._control, self._process, self._mechanism = control, process, mechanism
        return ""

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _collect_judgement(answer: Process, judge: Process, verdicts: VerdictReader, count: int) -> Judgement:
    channel = judge.channel
    assert channel is not None, "it was requested"

    def read(selector: selectors.BaseSelector, ready: selectors.SelectorKey) -> None:
        data = channel.recv(1 << 16)
        if not data:
            selector.unregister(channel)
        verdicts.feed(data)

    with selectors.DefaultSelector() as selector:
        for process in (answer, judge):
            process.register(selector)
        selector.register(channel, selectors.EVENT_READ, read)
        # The judge's channel closes when its process ends, and all verdicts have been read by then.
        deadline = time.monotonic() + answer.limits.deadline_s
        wait_for_processes([answer, judge], selector, deadline, lambda: judge.ended and channel not in selector.get_map())
        answer.kill()  # the answer may still sleep or have threads
        wait_for_processes([answer, judge], selector, math.inf, lambda: answer.ended)
    answer_result = answer.result()
    timed_out = answer_result.timed_out or judge.result().timed_out
    if verdicts.forged:
        return Judgement(["a verdict was not authentic"] * count, timed_out)
    missing_verdict = "not ended in time" if timed_out else "too much output" if answer_result.too_much_output else "the process ended"
    num_decided = len(verdicts.failures)
    return Judgement([*verdicts.failures, *[missing_verdict] * (count - num_decided)], timed_out, num_decided)


def _memory_file(name: str, content: bytes) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def _pipe(close_later: Callable[[int], int]) -> tuple[int, int]:
    read, write = os.pipe()
    return read, close_later(write)


def _bubblewrap_command(command: list[str], source: str) -> list[str] | None:
    """The command in bubblewrap, for systems that allow namespaces only to `bwrap`; None if that is not installed.

    The command has no network, and can read the paths of `isolation.readable_paths`, the interpreter and `source`. Nothing is writable,
    because all processes of a zygote share its mounts.
    """
    program = shutil.which("bwrap")
    if program is None:
        return None
    # sys.executable of a virtual environment is a link: both the link and its target are needed.
    interpreter = {sys.executable, os.path.realpath(sys.executable), f"{sys.prefix}/pyvenv.cfg", f"{source}/mtpctl"}
    paths = [*readable_paths(), *sorted(path for path in interpreter if os.path.exists(path))]
    binds = [argument for path in paths for argument in (("--dev-bind" if path.startswith("/dev/") else "--ro-bind"), path, path)]
    symlinks = [argument for path, target in library_links().items() for argument in ("--symlink", target, path)]
    isolation_options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    return [program, *isolation_options, *symlinks, *binds, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--", *command]


_LOCK = threading.Lock()
_SANDBOXES: dict[tuple[int, Isolation], Sandbox] = {}

_NETWORK_FILTER = "no socket call passes the filter of system calls"
_NO_NETWORK = f"{_NETWORK_FILTER}, and there is no device in the network namespace"
_PRIVATE_ROOT = "a private root with interpreter and libraries, read-only"
_NO_PROCESSES = "no fork, no exec, no signal to another process"
_LIMITS = "CPU, wall, memory, output and open files for each process"
_LIMITS_WITHOUT_THREADS = f"{_LIMITS}; threads limited by memory"
_ENFORCEMENT: dict[Mechanism, tuple[str, str, str, str]] = {
    "namespaces": (
        _NO_NETWORK,
        f"{_PRIVATE_ROOT}; a private /tmp of bounded size; no /proc",
        f"{_NO_PROCESSES}; processes outside are in another namespace",
        f"{_LIMITS}; threads for each process, which has a separate user",
    ),
    "user namespaces": (
        _NO_NETWORK,
        f"{_PRIVATE_ROOT}; a private /tmp of bounded size; no /proc",
        f"{_NO_PROCESSES}; processes outside are in another namespace",
        f"{_LIMITS}; threads for all processes of a sandbox together",
    ),
    "bubblewrap": (
        _NO_NETWORK,
        f"{_PRIVATE_ROOT}; no /proc, nothing writable",
        f"{_NO_PROCESSES}; processes outside are in another namespace",
        _LIMITS_WITHOUT_THREADS,
    ),
    "landlock": (
        _NETWORK_FILTER,
        "Landlock allows reading of interpreter and libraries, and no writing; names and sizes of files are visible",
        f"{_NO_PROCESSES}, by the filter alone",
        _LIMITS_WITHOUT_THREADS,
    ),
    "closed": (
        _NETWORK_FILTER,
        "no file can be opened: only preloaded modules can be imported; names and sizes of files are visible",
        f"{_NO_PROCESSES}, by the filter alone",
        _LIMITS_WITHOUT_THREADS,
    ),
}
"""How each mechanism restricts network, files, processes and resources, in this order."""


def shared(isolation: Isolation) -> Sandbox:
    """The sandbox of this process for `isolation`. A forked process gets another one."""
    with _LOCK:
        return _SANDBOXES.setdefault((os.getpid(), isolation), Sandbox(isolation))


def require(field: str, isolation: object = "required") -> None:
    """Check that the sandbox works, before engines or a trainer start. `field`: recipe key of the arguments that contain `isolation`.

    Raises UserError for an invalid value, and PrerequisiteMissing if code of the model would run without isolation.
    """
    if isolation not in ("required", "none"):
        raise UserError(f"{field}.isolation: {isolation!r} is neither required nor none")
    try:
        with Sandbox("none" if isolation == "none" else "required") as sandbox:
            sandbox.mechanism()
    except PrerequisiteMissing as error:
        raise PrerequisiteMissing(f"{error}; set {field}.isolation: none to run it with your rights") from error


@dataclass(frozen=True, slots=True)
class Layer:
    """One restriction of sandboxed processes. `by`: how it is enforced on this machine; None if it is not enforced."""

    name: str
    by: str | None


def describe_layers(sandbox: Sandbox) -> list[Layer]:
    """Describe how network, files, processes and resources are restricted. Raises PrerequisiteMissing if the sandbox does not start."""
    enforced_by = _ENFORCEMENT.get(sandbox.mechanism(), (None, None, None, _LIMITS))
    return [Layer(name, by) for name, by in zip(("network", "files", "processes", "limits"), enforced_by, strict=True)]
