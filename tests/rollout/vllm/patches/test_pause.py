"""A pause makes the very calls of vLLM's own, without the rest behind them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import pause, version


class Recorded:
    """What a pause asks of an `AsyncLLM`."""

    def __init__(self) -> None:
        self.renderer = self.engine_core = self
        self.calls: list[Any] = []

    async def clear_mm_cache_async(self) -> None:
        self.calls.append("clear")

    async def pause_scheduler_async(self, **options: Any) -> None:
        self.calls.append(options)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_what_upstream_does_less_its_rest(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    upstream, ours = Recorded(), Recorded()

    async def rest(seconds: float) -> None:
        upstream.calls.append(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", rest)
        asyncio.run(AsyncLLM.pause_generation(upstream, mode=mode, clear_cache=True))  # type: ignore[arg-type]
    asyncio.run(pause.pause(ours, mode))
    assert upstream.calls == [*ours.calls, 0.02]


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed", lambda: "0.33.0")
    with pytest.raises(UpstreamMoved, match=r"patches.pause was written for vLLM 0\.32\.0, found 0\.33\.0"):
        asyncio.run(pause.pause(Recorded(), "keep"))
