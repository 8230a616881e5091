"""Faster starts: engine cores are forked, and engines of one host compile a model once (vLLM 0.32.0).

An engine runs in a Ray actor, which imports vLLM and then spawns the engine's core. A spawned core imports vLLM again, which takes 20 s on
a host with an H100. The actor itself must not fork, because it has threads. Python's fork server has none: it imports vLLM at the same
time as the actor, and then forks the core.

vLLM stores compiled graphs in a cache on disk, but engines that start at the same time all miss it: each compiles, and they compete for
the host's cores. Here the first one compiles while the others wait, and then all others load its graphs from the cache at the same time.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mtpctl.rollout.vllm.patches import assign, patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor import Executor


logger = logging.getLogger(__name__)

PRELOADED_MODULE = "mtpctl.rollout.vllm.core_imports"
"""The module that the fork server imports."""
_SAFE_PATH = "PYTHONSAFEPATH"
"""Python variable that keeps the working directory off `sys.path`, where a user's module could shadow one that vLLM imports."""

_started_pids: set[int] = set()
"""Process ids of the fork servers that `start_fork_server` started."""


def start_fork_server() -> None:
    """Start the fork server, unless this process has one."""
    if _fork_server_pid() is not None:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED_MODULE])
    previous = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if previous is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = previous
    if (server := _fork_server_pid()) is not None:
        _started_pids.add(server)


def stop_fork_server() -> None:
    """Stop the fork server if `start_fork_server` started it and no child of this process is running."""
    if _fork_server_pid() in _started_pids and not multiprocessing.active_children():
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@patch
def install_forked_cores() -> None:
    """In processes that called `start_fork_server`, fork engine cores from the fork server, unless the server has ended."""
    from vllm.v1.engine import utils

    upstream: Callable[[], object] = utils.get_mp_context

    def get_mp_context() -> object:
        context = upstream()
        server = _fork_server_pid()
        if server not in _started_pids:
            return context
        if not _is_running(server):
            logger.warning("the fork server of engine cores has ended: the core imports vLLM itself, so the engine starts more slowly")
            return context
        return CoreContext()

    assign(utils, get_mp_context=get_mp_context)


def _fork_server_pid() -> int | None:
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return server


def _is_running(process: int | None) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class CoreContext(ForkServerContext):
    """Forks processes from the fork server. They get the environment of this process, and are killed when it ends."""

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., object], name: str, kwargs: Mapping[str, object]
    ) -> ForkServerProcess:
        return ForkServerProcess(target=_core_main, name=name, args=(_EnvironmentSnapshot(), target, kwargs))


class _EnvironmentSnapshot:
    """Unpickled as a dict, with the environment at the time of pickling, which is when the process is started."""

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(os.environ),)


def _core_main(environment: dict[str, str], target: Callable[..., object], kwargs: Mapping[str, object]) -> None:
    import torch

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    # torch read OMP_NUM_THREADS in the fork server, before this environment was set. It may list a number for each level of nested
    # parallelism, the outermost first.
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads.split(",")[0]))
    target(**kwargs)


def _exit_with_parent() -> None:
    """Kill this process when the one that started it ends.

    Ray kills the children of a killed actor, but a core is a child of the fork server. vLLM's workers exit by themselves after their core.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


@patch
def install_shared_compilation() -> None:
    """Let one engine of a host compile the model first, during vLLM's memory profiling, while the other engines wait."""
    from vllm.v1.executor import Executor

    upstream = Executor.determine_available_memory

    def determine_available_memory(self: Executor) -> list[int]:
        if not _compiles(self.vllm_config):
            return upstream(self)
        with run_first_exclusively(lock_path(self.vllm_config)):
            return upstream(self)

    assign(Executor, determine_available_memory=determine_available_memory)


def _compiles(config: VllmConfig) -> bool:
    from vllm.config import CompilationMode

    return config.compilation_config.mode not in (None, CompilationMode.NONE)


def lock_path(config: VllmConfig) -> Path:
    """Lock file of this user's engines on this host that compile the same graphs."""
    return Path(tempfile.gettempdir()) / f"mtpctl-compilation-{os.getuid()}-{config.compute_hash()}.lock"


@contextmanager
def run_first_exclusively(path: Path) -> Iterator[None]:
    """Run the block exclusively in the first process that enters it. Processes that enter later wait for it, and then run concurrently.

    If a process ends in the block, the operating system releases its lock.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
