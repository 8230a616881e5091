"""What confines a run on this machine, in a line each."""

from __future__ import annotations

from dataclasses import dataclass

from mtpctl.sandbox.sandbox import Sandbox
from mtpctl.sandbox.walls import Walls

_FILTER = "no socket call passes the filter of system calls"
_NETWORK: dict[Walls, str] = {
    "namespaces": f"{_FILTER}, and there is no device in the network namespace",
    "user namespaces": f"{_FILTER}, and there is no device in the network namespace",
    "bubblewrap": f"{_FILTER}, and there is no device in the network namespace",
    "landlock": _FILTER,
    "closed": _FILTER,
}
_FILES: dict[Walls, str] = {
    "namespaces": "a root of its own with interpreter and libraries, read-only; a private /tmp of bounded size; no /proc",
    "user namespaces": "a root of its own with interpreter and libraries, read-only; a private /tmp of bounded size; no /proc",
    "bubblewrap": "a root of its own with interpreter and libraries, read-only; no /proc, and nothing to write to",
    "landlock": "Landlock lets interpreter and libraries be read, and nothing be written; names and sizes of files can be seen",
    "closed": "no file can be opened: only modules that are preloaded can be imported; names and sizes of files can be seen",
}
_PROCESSES: dict[Walls, str] = {
    "namespaces": "no fork, no exec, no signal to another process; processes outside are in another namespace",
    "user namespaces": "no fork, no exec, no signal to another process; processes outside are in another namespace",
    "bubblewrap": "no fork, no exec, no signal to another process; processes outside are in another namespace",
    "landlock": "no fork, no exec, no signal to another process, by the filter alone",
    "closed": "no fork, no exec, no signal to another process, by the filter alone",
}
_LIMITED = "CPU, wall, memory, output and open files for each run"
_LIMITS: dict[Walls, str] = {
    "namespaces": f"{_LIMITED}; threads for each run, as a user of its own",
    "user namespaces": f"{_LIMITED}; threads for all runs of a process together",
    "bubblewrap": f"{_LIMITED}; threads only as far as their memory goes",
    "landlock": f"{_LIMITED}; threads only as far as their memory goes",
    "closed": f"{_LIMITED}; threads only as far as their memory goes",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One thing that a run is kept from. `by`: what does it here, in a line; None where nothing does."""

    name: str
    by: str | None


def layers(sandbox: Sandbox) -> list[Layer]:
    """Network, files, processes, limits. Raises EnvironmentMissing where the sandbox does not start here."""
    walls = sandbox.walls()
    held = {"network": _NETWORK, "files": _FILES, "processes": _PROCESSES, "limits": _LIMITS}
    found = [Layer(name, by.get(walls)) for name, by in held.items()]
    return [*found[:-1], Layer("limits", found[-1].by or _LIMITED)]
