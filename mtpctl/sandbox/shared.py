"""One sandbox for all rewards and environments of a process, and the check that there can be one."""

from __future__ import annotations

import os
import threading

from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.sandbox.sandbox import Isolation, Sandbox

_LOCK = threading.Lock()
_SANDBOXES: dict[tuple[int, Isolation], Sandbox] = {}


def shared(isolation: Isolation) -> Sandbox:
    """The sandbox of this process; a process that was forked from it gets one of its own."""
    with _LOCK:
        return _SANDBOXES.setdefault((os.getpid(), isolation), Sandbox(isolation))


def require(field: str, isolation: object = "required") -> None:
    """Try the sandbox before anything starts. `field`: `reward.args` or `rollout.environment_args`, which holds `isolation`.

    Raises UserError for another value, EnvironmentMissing where code of the model would run without walls.
    """
    if isolation not in ("required", "none"):
        raise UserError(f"{field}.isolation: {isolation!r} is neither required nor none")
    try:
        with Sandbox("none" if isolation == "none" else "required") as sandbox:
            sandbox.walls()
    except EnvironmentMissing as error:
        raise EnvironmentMissing(f"{error}; set {field}.isolation: none to run it with your rights") from error
