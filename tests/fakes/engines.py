"""Engines for tests: one event loop and one vLLM in this process for each module that requests them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from mtpctl.recipe.rollout import SglangConfig, SpeculationConfig, VllmConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.rollout.actor import EngineSettings
from mtpctl.rollout.engine import Engine
from mtpctl.rollout.sglang.settings import SglangSettings, build_sglang_settings
from mtpctl.rollout.vllm.settings import VllmSettings, build_engine_settings

T = TypeVar("T")


def cpu_settings(
    folder: Path,
    *,
    k: int = 1,
    routes: tuple[int, ...] = (),
    precision: Literal["fp32", "bf16"] = "fp32",
    adapter: LoraConfig | None = None,
    **rollout: Any,
) -> VllmSettings:
    """Settings of a tiny engine on one CPU thread. `routes`: see `VllmSettings`."""
    options: dict[str, Any] = {"max_in_flight": 64, "context": 256, "threads": 1, "kv_cache_bytes": 64 << 20}
    config = VllmConfig(**options | {"speculation": SpeculationConfig(num_tokens=k)} | rollout)
    return build_engine_settings(config, model=str(folder), precision=precision, device="cpu", seed=0, routes=routes, adapter=adapter)


def gpu_settings(folder: Path, *, k: int = 1, adapter: LoraConfig | None = None, **rollout: Any) -> VllmSettings:
    """Settings of a tiny vLLM engine on a GPU."""
    options: dict[str, Any] = {"max_in_flight": 16, "context": 4096, "kv_cache_bytes": 1 << 30, "gpu_memory": 0.2, "eager": True}
    config = VllmConfig(**options | {"speculation": SpeculationConfig(num_tokens=k)} | rollout)
    return build_engine_settings(config, model=str(folder), precision="bf16", device="cuda", seed=0, adapter=adapter)


def sglang_settings(folder: Path, *, k: int = 1, **rollout: Any) -> SglangSettings:
    """Settings of a tiny SGLang engine. Its attention is Triton's, which takes heads of any size."""
    engine_args = {"attention_backend": "triton", "mem_fraction_static": 0.2, "max_total_tokens": 1 << 16}
    options: dict[str, Any] = {"max_in_flight": 16, "context": 4096, "engine_args": engine_args}
    config = SglangConfig(**options | {"speculation": SpeculationConfig(num_tokens=k)} | rollout)
    return build_sglang_settings(config, model=str(folder), precision="bf16")


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs an asynchronous test, with a deadline."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run


START_S = 300.0
"""For an engine to start: on a GPU it may compile kernels first."""


class Loop:
    """An event loop that outlives a test, so that an engine living in it can too."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def __call__(self, step: Awaitable[T], seconds: float = 120.0) -> T:
        """Run `step` to its end, or fail the test after `seconds`."""
        return self._loop.run_until_complete(asyncio.wait_for(step, seconds))

    def close(self) -> None:
        """End what still runs."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


@pytest.fixture(scope="module")
def run() -> Iterator[Loop]:
    """Runs coroutines of this module in one loop."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def start_engine(run: Loop) -> Iterator[Callable[[EngineSettings], Engine]]:
    """Starts engines that end with the module."""
    engines: list[Engine] = []

    def start(settings: EngineSettings) -> Engine:
        if isinstance(settings, SglangSettings):
            from mtpctl.rollout.sglang.engine import SglangEngine

            engines.append(run(SglangEngine.start(settings), START_S))
        else:
            from mtpctl.rollout.vllm.engine import VllmEngine

            engines.append(run(VllmEngine.start(settings), START_S))
        return engines[-1]

    yield start
    for engine in engines:
        run(engine.shutdown())
