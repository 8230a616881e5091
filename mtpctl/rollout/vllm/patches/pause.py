"""A pause without a rest (vLLM 0.32.0).

`AsyncLLM.pause_generation` sleeps for 20 ms once the engine core stands, so that outputs on their way are seen by whoever waits for
them before it returns; its own comment says that nothing depends on it. Here neither does anything: the core names the weight version
with every output. A weight sync would stand for those 20 ms.
"""

from __future__ import annotations

from typing import Any

from mtpctl.rollout.vllm.patches.version import require_pinned


async def pause(llm: Any, mode: str) -> None:
    """What `pause_generation(mode=mode, clear_cache=True)` does before it rests. `llm` is an `AsyncLLM`.

    Raises UpstreamMoved for another release.
    """
    require_pinned(__name__)
    await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)
