"""A pause makes the same calls as vLLM's own, without the sleep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mtpctl.rollout.vllm.patches import pauses


class Recorded:
    """Records the calls of a pause."""

    def __init__(self) -> None:
        self.renderer = self.engine_core = self
        self.calls: list[Any] = []

    async def clear_mm_cache_async(self) -> None:
        self.calls.append("clear")

    async def pause_scheduler_async(self, **options: Any) -> None:
        self.calls.append(options)


@pytest.mark.parametrize(("mode", "clear"), [("keep", True), ("abort", True), ("wait", True), ("keep", False)])
def test_pause_makes_upstreams_calls_without_the_sleep(monkeypatch: pytest.MonkeyPatch, mode: Any, clear: bool) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    upstream, ours = Recorded(), Recorded()

    async def sleep(seconds: float) -> None:
        upstream.calls.append(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        asyncio.run(AsyncLLM.pause_generation(upstream, mode=mode, clear_cache=clear))  # type: ignore[arg-type]
    asyncio.run(pauses.pause(ours, mode, clear_cache=clear))
    assert upstream.calls == [*ours.calls, 0.02]
