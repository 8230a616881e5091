"""Starts the daemons of a local Ray cluster in separate sessions, on the loopback interface.

Ray 2.60 starts the GCS server, the raylet and its helpers in the driver's process group. `timeout`, a shell that ends a job, or a closed
terminal signals the whole group. The daemons then end first, and the driver can no longer save a checkpoint. To reproduce, call
`ray.init()` in a script and send SIGTERM to its process group.

If the host has an interface other than loopback, Ray resolves 127.0.0.1 to the address of that interface, and is then reachable from
outside, unless multi-host clusters are disabled (the default on macOS only). Ray also replaces the driver's SIGTERM handler by one that
exits immediately.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from mtpctl.compat import replace_temporarily
from mtpctl.errors import UpstreamMoved

RELEASE = "2.60.0"
ONE_HOST = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If this variable is false, Ray uses the loopback address. Despite its name, it applies to every operating system."""


def make_session_popen(register: Callable[[], None], started: dict[str, subprocess.Popen[bytes]]) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a replacement for `Popen`. It starts each process in a new session, and stores it in `started` by the program's name.

    `register` is called in the new process before its program is executed.
    """

    def start(command: list[str], *, preexec_fn: Callable[[], None], **options: Any) -> subprocess.Popen[bytes]:
        def run_in_child() -> None:
            register()
            preexec_fn()

        process: subprocess.Popen[bytes] = subprocess.Popen(command, preexec_fn=run_in_child, start_new_session=True, **options)
        started[os.path.basename(command[0])] = process
        return process

    return start


@contextmanager
def start_in_sessions(register: Callable[[], None], started: dict[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Make `ray.init` within the block start its daemons with `make_session_popen` and on loopback, and keep the driver's SIGTERM handler.

    Raises UpstreamMoved if the installed release of Ray is not the pinned one.
    """
    if ray.__version__ != RELEASE:
        raise UpstreamMoved(f"{__name__} was written for Ray {RELEASE}, found {ray.__version__}: compare ray._private.services first")
    moved = f"{__name__}: Ray starts its processes in another way"
    previous = os.environ.get(ONE_HOST)
    os.environ[ONE_HOST] = "0"  # For child processes. This process read the variable at import, so its constant is replaced below.
    try:
        with (
            replace_temporarily("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", False, moved),
            replace_temporarily("ray._private.services", "ConsolePopen", make_session_popen(register, started), moved),
            replace_temporarily("ray._private.utils", "set_sigterm_handler", lambda handler: None, moved),
        ):
            yield
    finally:
        if previous is None:
            del os.environ[ONE_HOST]
        else:
            os.environ[ONE_HOST] = previous
