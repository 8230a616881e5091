"""Engine cores are forked from a process that imports vLLM while the engine's own process does (vLLM 0.32.0).

vLLM spawns the core of an engine in a Ray actor, and the core imports vLLM again, after the actor has: 20 s on a host with an H100. An
actor must not fork, because it has threads. Python's fork server has none. It imports what a core needs at the same time as the actor.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

from mtpctl.rollout.vllm.patches.guard import assign, patch

IMPORTS = "mtpctl.rollout.vllm.core_imports"
"""The module that the fork server imports."""


def prepare() -> None:
    """Start the fork server, unless it runs. Cores get the environment of the process that starts them, except what imports read."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTS])
    forkserver.ensure_running()


@patch
def install_forked_cores() -> None:
    """Start engine cores from the fork server in processes that called `prepare`."""
    from vllm.v1.engine import utils

    upstream: Callable[[], object] = utils.get_mp_context

    def get_mp_context() -> object:
        context = upstream()
        return CoreContext() if _running() else context

    assign(utils, get_mp_context=get_mp_context)


def _running() -> bool:
    return forkserver._forkserver._forkserver_pid is not None  # type: ignore[attr-defined]


class CoreContext(ForkServerContext):
    """The fork server's processes, with the environment of their parent."""

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., object], name: str, kwargs: Mapping[str, object]
    ) -> ForkServerProcess:
        return ForkServerProcess(target=_run, name=name, args=(_Environment(), target, kwargs))


class _Environment:
    """Becomes the environment of the process when a child is started."""

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(os.environ),)


def _run(environment: dict[str, str], target: Callable[..., object], kwargs: Mapping[str, object]) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    # torch has read this variable in the fork server.
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    target(**kwargs)
