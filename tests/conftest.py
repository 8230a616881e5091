"""For all tests."""

import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import settings

# Ranks are forked from this process, and a fork hangs if OpenMP has started threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is; what hangs is pytest-timeout's business. A commit gets the same examples in each
# run.
settings.register_profile("mtpctl", deadline=None, derandomize=True)
settings.load_profile("mtpctl")


LIGHT = ("data", "families", "plan", "recipe", "telemetry")
"""Packages whose tests start neither engines nor ranks."""
THREADS = 50
"""New threads after which garbage is collected: more than a test leaves that starts no engine."""
MODULES = 100
"""New modules after which objects are frozen."""


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed out in the order of their collection, and what tests import is compiled once."""
    # pytest-xdist would hand out those with the most tests first, and what starts engines for its three tests last.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    _keep_bytecode(config)
    # Not while tests are collected: the imports leave no garbage, and looking for it takes a fifth of their time.
    gc.disable()
    if importlib.util.find_spec("modelopt") is None:
        sys.modules["modelopt"] = None  # type: ignore[assignment]  # Megatron-Bridge looks for it on the path at each parameter


@pytest.hookimpl(trylast=True)  # after those that -m leaves out have gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of GPUs are skipped where there is none. With workers, files whose tests may take the longest come first.

    After those come the files with the most tests, so that no worker is left with one of them. Light packages come last: pytest-xdist
    queues files of one or two tests ahead, so a worker would end with several that start an engine each.
    """
    _skip_without_a_gpu(items)
    if not hasattr(config, "workerinput"):
        return
    longest: dict[Path, float] = {}
    for item in items:
        allowed = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), float(allowed.args[0]) if allowed else 0.0)
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-longest[item.path], item.path.parent.name in LIGHT, -tests[item.path], item.path))


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws the same numbers in each run and in any order of the tests."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage is from now on looked for among what tests make, and not among all that they have imported."""
    if "torch" in sys.modules:
        _start_autograd_without_threads()
    _freeze()
    gc.enable()
    if "vllm" in sys.modules:
        _keep_engines_from_freezing()
        _register_kernels_once()


class Process:
    """What is known of this process.

    Attributes:
        threads: their number after the last collection of garbage, or fewer if some have ended since.
        modules: the number of imported modules whose objects are frozen.
    """

    threads = modules = 0


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    Process.modules = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let go of engines that a test has closed.

    Reference cycles keep them, and with them some twenty process groups each, whose threads gloo wakes a hundred times a second: after
    some dozen tests they would take more time than the tests. Threads that a collection leaves, such as those of engines in use, do not
    count again: a collection takes as long as many a test. Between files, when no engine is in use, what has been imported since is frozen.
    """
    threads = psutil.Process().num_threads()
    if threads > Process.threads + THREADS:
        gc.collect()
        Process.threads = psutil.Process().num_threads()
    Process.threads = min(Process.threads, threads)
    if nextitem is not None and nextitem.path != item.path and len(sys.modules) > Process.modules + MODULES:
        _freeze()


def _start_autograd_without_threads() -> None:
    """Run a first backward pass, so that tests can fork ranks that run theirs.

    torch.compile registers a CUDA device to trace with, even without a GPU. If the first backward pass comes after that, autograd starts
    a thread for this device, and refuses to run in any process that is forked later.
    """
    import torch

    if not torch.cuda.is_available():
        torch.ones(1, requires_grad=True).sum().backward()


def _keep_engines_from_freezing() -> None:
    """vLLM freezes all objects when an engine of this process starts, and unfreezes them when it ends.

    After the first engine, each collection would take half a second again, and the end of an engine makes two.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    core.freeze_gc_heap = lambda: None
    core.gc = parallel_state.gc = SimpleNamespace(**vars(gc) | {"unfreeze": lambda: None})


def _register_kernels_once() -> None:
    """Each engine on a CPU would look for its kernels in all modules again, for a third of a second."""
    from vllm.triton_utils import dispatcher

    register = dispatcher.register_kernels

    def register_new(overrides: Mapping[str, Callable[..., Any]]) -> None:
        if not overrides.keys() <= dispatcher._registry.keys():
            register(overrides)

    dispatcher.register_kernels = register_new


def _skip_without_a_gpu(items: list[pytest.Item]) -> None:
    on_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpus:
        return
    import torch  # not for every collection: it takes seconds

    if not torch.cuda.is_available():
        for item in on_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _keep_bytecode(config: pytest.Config) -> None:
    """Write bytecode even if the environment forbids it: in pytest's cache if packages have none, otherwise next to the sources.

    Tests start hundreds of processes that import this project, and dozens that import torch, Megatron or vLLM. Each would compile them
    again.
    """
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.cached is None:
        return
    if not Path(torch.cached).exists():
        cache: pytest.Cache | None = getattr(config, "cache", None)  # -p no:cacheprovider
        if cache is None:
            return
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(cache.mkdir("bytecode"))
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
