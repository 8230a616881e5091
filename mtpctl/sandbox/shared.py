"""The sandbox of a process: shared by rewards, environments and agents, checked before a run, and described for reports."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.sandbox.isolation import Mechanism
from mtpctl.sandbox.sandbox import Isolation, Sandbox

_LOCK = threading.Lock()
_SANDBOXES: dict[tuple[int, Isolation], Sandbox] = {}

_FILTER = "no socket call passes the filter of system calls"
_NO_NETWORK = f"{_FILTER}, and there is no device in the network namespace"
_PRIVATE_ROOT = "a private root with interpreter and libraries, read-only"
_NO_PROCESSES = "no fork, no exec, no signal to another process"
_LIMITS = "CPU, wall, memory, output and open files for each run"
_THREADS_BY_MEMORY = f"{_LIMITS}; threads limited by memory"
_LAYERS: dict[Mechanism, tuple[str, str, str, str]] = {
    "namespaces": (
        _NO_NETWORK,
        f"{_PRIVATE_ROOT}; a private /tmp of bounded size; no /proc",
        f"{_NO_PROCESSES}; processes outside are in another namespace",
        f"{_LIMITS}; threads for each run, which has a separate user",
    ),
    "user namespaces": (
        _NO_NETWORK,
        f"{_PRIVATE_ROOT}; a private /tmp of bounded size; no /proc",
        f"{_NO_PROCESSES}; processes outside are in another namespace",
        f"{_LIMITS}; threads for all runs of a process together",
    ),
    "bubblewrap": (
        _NO_NETWORK,
        f"{_PRIVATE_ROOT}; no /proc, nothing writable",
        f"{_NO_PROCESSES}; processes outside are in another namespace",
        _THREADS_BY_MEMORY,
    ),
    "landlock": (
        _FILTER,
        "Landlock allows reading of interpreter and libraries, and no writing; names and sizes of files are visible",
        f"{_NO_PROCESSES}, by the filter alone",
        _THREADS_BY_MEMORY,
    ),
    "closed": (
        _FILTER,
        "no file can be opened: only preloaded modules can be imported; names and sizes of files are visible",
        f"{_NO_PROCESSES}, by the filter alone",
        _THREADS_BY_MEMORY,
    ),
}


def shared(isolation: Isolation) -> Sandbox:
    """The sandbox of this process. A forked process gets another one."""
    with _LOCK:
        return _SANDBOXES.setdefault((os.getpid(), isolation), Sandbox(isolation))


def require(field: str, isolation: object = "required") -> None:
    """Check before a run that the sandbox works. `field`: recipe key of the arguments that contain `isolation`.

    Raises UserError for an invalid value, and EnvironmentMissing if code of the model would run without isolation.
    """
    if isolation not in ("required", "none"):
        raise UserError(f"{field}.isolation: {isolation!r} is neither required nor none")
    try:
        with Sandbox("none" if isolation == "none" else "required") as sandbox:
            sandbox.mechanism()
    except EnvironmentMissing as error:
        raise EnvironmentMissing(f"{error}; set {field}.isolation: none to run it with your rights") from error


@dataclass(frozen=True, slots=True)
class Layer:
    """One restriction of runs. `by`: how it is enforced on this machine; None if it is not."""

    name: str
    by: str | None


def layers(sandbox: Sandbox) -> list[Layer]:
    """How network, files, processes and limits are restricted. Raises EnvironmentMissing if the sandbox does not start."""
    enforced_by = _LAYERS.get(sandbox.mechanism(), (None, None, None, _LIMITS))
    return [Layer(name, by) for name, by in zip(("network", "files", "processes", "limits"), enforced_by, strict=True)]
