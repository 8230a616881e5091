"""Engine cores are forked from a process that imports vLLM while the engine's own process does (vLLM 0.32.0).

vLLM spawns the core of an engine in a Ray actor, and the core imports vLLM again, after the actor has: 20 s on a host with an H100. An
actor must not fork, because it has threads. Python's fork server has none. It imports what a core needs at the same time as the actor.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

import psutil

from mtpctl.rollout.vllm.patches.guard import assign, patch

logger = logging.getLogger(__name__)

IMPORTS = "mtpctl.rollout.vllm.core_imports"
"""The module that the fork server imports."""
_SAFE_PATH = "PYTHONSAFEPATH"
"""Without it, the server would search the working directory first, where a user's modules may have names that vLLM imports."""

_started: set[int] = set()
"""Ids of the fork servers that `prepare` has started."""


def prepare() -> None:
    """Start the fork server, unless this process has one."""
    if _server() is not None:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTS])
    previous = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if previous is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = previous
    if (server := _server()) is not None:
        _started.add(server)


def stop() -> None:
    """End the fork server that `prepare` started, unless a child of this process runs."""
    if _server() in _started and not multiprocessing.active_children():
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@patch
def install_forked_cores() -> None:
    """Start engine cores from the fork server in processes that called `prepare`."""
    from vllm.v1.engine import utils

    upstream: Callable[[], object] = utils.get_mp_context

    def get_mp_context() -> object:
        context = upstream()
        server = _server()
        if server not in _started:
            return context
        if not _runs(server):
            logger.warning("the process that imports vLLM for engine cores has ended, so the core imports vLLM itself")
            return context
        return CoreContext()

    assign(utils, get_mp_context=get_mp_context)


def _server() -> int | None:
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return server


def _runs(process: int | None) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class CoreContext(ForkServerContext):
    """Processes of the fork server with the environment of this process, which end when this process does."""

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., object], name: str, kwargs: Mapping[str, object]
    ) -> ForkServerProcess:
        return ForkServerProcess(target=_run, name=name, args=(_Environment(), target, kwargs))


class _Environment:
    """Pickles as a copy of os.environ, taken when the process is started."""

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(os.environ),)


def _run(environment: dict[str, str], target: Callable[..., object], kwargs: Mapping[str, object]) -> None:
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    # torch has read this variable in the fork server. With several numbers, the first is for threads outside of parallel regions.
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads.split(",")[0]))
    target(**kwargs)


def _end_with_parent() -> None:
    """Kill this process when the one that started it ends.

    Ray kills the children of a killed actor, but a core is a child of the fork server. Without its core, a worker of vLLM ends by itself.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
