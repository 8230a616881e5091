"""Run code behind walls: programs, sessions that keep their state, and answers that are tested."""

from __future__ import annotations

import ast
import fcntl
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NoReturn

from mtpctl.errors import EnvironmentMissing
from mtpctl.sandbox import bubblewrap
from mtpctl.sandbox.limits import Judgement, Limits, Result
from mtpctl.sandbox.process import Process, wait
from mtpctl.sandbox.session import Session
from mtpctl.sandbox.values import encode
from mtpctl.sandbox.verdicts import VerdictReader, new_key
from mtpctl.sandbox.walls import ORDER, Walls
from mtpctl.sandbox.zygote import Request

Isolation = Literal["required", "none"]
START_S = 30.0
"""Seconds that the zygote has to import what runs use, also on a busy machine."""

_FD = "import sys; sys.path.insert(0, {source!r}); from mtpctl.sandbox.zygote import main; main({fd}, {kind!r}, {source!r})"
_SURROUNDINGS = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""All environment variables of a run; threads would be those of a library that takes one for each core."""
_FOR_THE_LOADER = ("LD_LIBRARY_PATH",)
"""The caller's variables that a run has as well, since without them its interpreter may not start."""


class Sandbox:
    """Starts runs. One zygote serves all of them, and any thread may ask; it starts with the first run, and again where it was killed.

    `isolation="none"` runs code also where no wall can be had. `only` tries one kind of walls alone.
    """

    def __init__(self, isolation: Isolation = "required", only: Walls | None = None) -> None:
        self._kinds: tuple[Walls, ...] = (only,) if only else ORDER + (("none",) if isolation == "none" else ())
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._kind: Walls | None = None
        self.refused: dict[str, str] = {}
        """Why walls that would be better could not be had, by their kind."""

    def walls(self) -> Walls:
        """The walls that runs are behind. Raises EnvironmentMissing where none can be had."""
        with self._lock:
            self._started()
            assert self._kind is not None, "it has started"
            return self._kind

    def run(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run a program. Raises EnvironmentMissing where no walls can be had, RuntimeFailure where the run could not begin."""
        with ExitStack() as stack:
            process = self.start({"kind": "program", "code": code}, limits or Limits(), stdin=stdin)
            stack.callback(process.close)
            return process.finish()

    def session(self, limits: Limits | None = None) -> Session:
        """A session whose cells share their state. Of `limits`, `wall_s` and `output_bytes` hold for a cell, the others for all together.

        Cells raise as `run` does.
        """
        return Session(lambda: self.start({"kind": "session"}, limits or Limits(), channel=True))

    def judge(self, code: str, tests: list[str], *, entry_point: str | None = None, limits: Limits | None = None) -> Judgement:
        """Test an answer: `tests` are Python, and one passes where it ends without an exception.

        The answer and the tests run in processes of their own (`questions`), within one set of `limits`. Tests run in order, in one
        namespace. Names that they neither define nor import are the answer's, but for Python's own built-ins and modules; `entry_point`
        is the answer's in any case. Raises as `run`, and SyntaxError where a test is no Python.
        """
        own = [entry_point] if entry_point else []
        job = {"kind": "tests", "tests": tests, "names": _names_in(tests, own), "builtins": own}
        return self._judged({"kind": "answer", "code": code}, job, len(tests), limits or Limits())

    def judge_calls(
        self, code: str, function: str, cases: Sequence[tuple[list[Any], list[Any]]], *, limits: Limits | None = None
    ) -> Judgement:
        """Test an answer by calls of `function`, or of the method of that name of its class `Solution`.

        A case has the arguments and the accepted results, as parsed from JSON. The answer may use common modules of the standard library
        without importing them (`prelude`). Raises as `run`.
        """
        coded = [encode(list(case), _refuse) for case in cases]  # mappings may have numeric keys, unlike in JSON
        job = {"kind": "calls", "function": function, "cases": coded}
        return self._judged({"kind": "answer", "code": code, "function": function}, job, len(cases), limits or Limits())

    def _judged(self, answer_job: Mapping[str, object], job: Mapping[str, object], count: int, limits: Limits) -> Judgement:
        """Run an answer and its tests in separate processes (`questions`)."""
        ours, theirs = socket.socketpair()
        key = new_key()
        with ExitStack() as stack:
            for end in (ours, theirs):
                stack.callback(end.close)
            answer = self.start(answer_job, limits, link=theirs)
            stack.callback(answer.close)
            judge = self.start({**job, "key": key}, limits, channel=True, link=ours)
            stack.callback(judge.close)
            for end in (ours, theirs):
                end.close()
            return _judgement(answer, judge, VerdictReader(key, count), count)

    def close(self) -> None:
        """Kill all runs. Calling again, and after that using the sandbox again, are both fine."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, job: Mapping[str, object], limits: Limits, *, stdin: str = "", channel: bool = False, link: socket.socket | None = None
    ) -> Process:
        """Have the zygote fork a run for `job` (`inside.Job`)."""
        with ExitStack() as stack:

            def passed(descriptor: int) -> int:
                stack.callback(os.close, descriptor)
                return descriptor

            given = {"stdin": passed(_file("stdin", stdin.encode(errors="surrogateescape")))}
            stdout, given["stdout"] = _pipe(passed)
            stderr = None
            if job["kind"] == "session":
                given["stderr"] = passed(os.dup(given["stdout"]))
            else:
                stderr, given["stderr"] = _pipe(passed)
            given["job"] = passed(_file("job", json.dumps(job).encode()))
            ours = None
            if channel:
                ours, theirs = socket.socketpair()
                given["channel"] = passed(theirs.detach())
            if link is not None:
                given["link"] = link.fileno()
            status, for_zygote = socket.socketpair()
            process = Process(status, stdout, stderr, ours, limits)
            request: Request = {
                "names": list(given),
                "cpu_s": limits.cpu_s,
                "memory_mb": limits.memory_mb,
                "tmp_mb": limits.tmp_mb,
                "threads": limits.threads,
            }
            try:
                self._ask(json.dumps(request).encode(), [passed(for_zygote.detach()), *given.values()])
            except BaseException:
                process.close()
                raise
            return process

    def _ask(self, request: bytes, descriptors: list[int]) -> None:
        with self._lock:
            control = self._started()
            try:
                socket.send_fds(control, [request], descriptors)
            except OSError:  # it was killed since: once more, with a new one
                self._stop()
                socket.send_fds(self._started(), [request], descriptors)

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._control is None:
            for kind in (self._kind,) if self._kind else self._kinds:
                trouble = self._try(kind)
                if not trouble:
                    break
                self.refused[kind] = trouble
        if self._control is None:
            told = "; ".join(f"{kind}: {why}" for kind, why in self.refused.items())
            raise EnvironmentMissing(f"sandbox: code of the model cannot be kept from network and files here ({told})")
        return self._control

    def _try(self, kind: Walls) -> str:
        """Start a zygote behind these walls; why that did not work, or an empty text."""
        source = str(Path(__file__).parents[2])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-I", "-B", "-X", "utf8", "-c", _FD.format(source=source, fd=theirs.fileno(), kind=kind)]
            if kind == "bubblewrap":
                wrapped = bubblewrap.command(command, source)
                if wrapped is None:
                    ours.close()
                    return "bwrap is not installed"
                command = wrapped
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=_SURROUNDINGS | {name: os.environ[name] for name in _FOR_THE_LOADER if name in os.environ},
                cwd="/",
                start_new_session=True,  # Ctrl-C is the caller's to handle
            )
        ours.settimeout(START_S)
        try:
            answer = ours.recv(1 << 12)
        except TimeoutError:
            answer = b""
        assert process.stderr is not None
        told = json.loads(answer) if answer else {"error": ""}
        if "error" in told:
            ours.close()
            process.kill()
            output = process.communicate()[1].decode(errors="replace").strip()
            return told["error"] or (output.splitlines() or ["no answer"])[-1]
        process.stderr.close()
        ours.settimeout(None)
        self._control, self._process, self._kind = ours, process, kind
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


def _names_in(tests: list[str], own: list[str]) -> list[str]:
    """Names that the tests read, with the answer's `own`. Raises SyntaxError where a test is no Python."""
    trees = [ast.parse(test) for test in tests]
    return sorted({node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}.union(own))


def _judgement(answer: Process, judge: Process, verdicts: VerdictReader, count: int) -> Judgement:
    channel = judge.channel
    assert channel is not None, "it was requested"

    def read(selector: selectors.BaseSelector, ready: selectors.SelectorKey) -> None:
        piece = channel.recv(1 << 16)
        if not piece:
            selector.unregister(channel)
        verdicts.feed(piece)

    with selectors.DefaultSelector() as selector:
        for each in (answer, judge):
            each.watch(selector)
        selector.register(channel, selectors.EVENT_READ, read)
        # The judge's channel closes with its process, so that all of its verdicts are here when it has ended.
        deadline = time.monotonic() + answer.limits.deadline_s
        wait([answer, judge], selector, deadline, lambda: judge.ended and channel not in selector.get_map())
        answer.kill()  # it may have left threads behind, or sleep
        wait([answer, judge], selector, math.inf, lambda: answer.ended)
    ended = answer.result()
    late = ended.timed_out or judge.result().timed_out
    if verdicts.forged:
        return Judgement(["a verdict was not authentic"] * count, late, ended)
    missing = "not ended in time" if late else "too much output" if ended.too_much_output else "the process ended"
    decided = len(verdicts.failures)
    return Judgement([*verdicts.failures, *[missing] * (count - decided)], late, ended, decided)


def _refuse(value: object) -> NoReturn:
    raise ValueError(f"a {type(value).__name__} in a case")


def _file(name: str, content: bytes) -> int:
    """A file in memory that holds `content`, and that nobody can change."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def _pipe(passed: Callable[[int], int]) -> tuple[int, int]:
    read, write = os.pipe()
    return read, passed(write)
