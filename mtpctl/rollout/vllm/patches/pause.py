"""A pause without vLLM's sleep (vLLM 0.32.0).

`AsyncLLM.pause_generation` sleeps for 20 ms once the engine core is paused, so that callers see outputs on their way before it returns;
its own comment says that nothing depends on it. Nothing here does either: the core names the weight version with every output. Every
weight sync would be 20 ms longer for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.v1.engine import PauseMode
    from vllm.v1.engine.async_llm import AsyncLLM


async def pause(llm: AsyncLLM, mode: PauseMode) -> None:
    """Do what `pause_generation(mode=mode, clear_cache=True)` does before it sleeps.

    Raises UpstreamMoved for another release.
    """
    require_pinned(__name__)
    await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)
