"""Aborts in SGLang, without SGLang, which ignores aborts of requests that are not registered yet."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from mtpctl.rollout.protocol import ABORTED, DEADLINE
from mtpctl.rollout.sglang.engine import SglangEngine
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engines import in_loop


class Manager:
    """Registers a request some iterations of the event loop after it was submitted; aborts of other requests are ignored."""

    context_len, num_reserved_tokens, max_req_input_len = 128, 2, 120

    def __init__(self) -> None:
        self.registered: dict[str, asyncio.Event] = {}

    def abort_request(self, *, rid: str) -> None:
        if rid in self.registered:
            self.registered[rid].set()

    async def generate(self, *, rid: str, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(0.02)
        self.registered[rid] = asyncio.Event()
        await self.registered[rid].wait()
        return {
            "output_ids": [7],
            "meta_info": {"output_token_logprobs": [(-0.5, 7)], "finish_reason": {"type": ABORTED}, "weight_version": "0"},
        }


@in_loop
async def test_a_request_that_is_aborted_at_once_ends() -> None:
    manager = Manager()
    upstream = SimpleNamespace(
        server_args=SimpleNamespace(speculative_algorithm=None),
        tokenizer_manager=manager,
        async_generate=manager.generate,
        get_all_child_pids=list,
    )
    engine = SglangEngine(upstream, SglangSettings({"max_running_requests": 4, "skip_tokenizer_init": True}), 0)

    def ask(name: str, deadline_s: float) -> asyncio.Future[Sample]:
        return asyncio.ensure_future(engine.generate(GenerationRequest(Sample(name, "g", [1, 2]), 50, deadline_s=deadline_s)))

    cut = ask("cut", 60)
    await asyncio.sleep(0)
    await asyncio.wait_for(engine._abort(list(engine._in_flight)), 5)
    assert (await asyncio.wait_for(cut, 5)).finish_reason == ABORTED
    engine._not_paused.clear()
    waiting = ask("waiting", 60)
    await asyncio.sleep(0.01)
    engine._end_waiting_requests()
    assert (await asyncio.wait_for(waiting, 5)).finish_reason == ABORTED, "it waits for the end of the pause"
    engine._not_paused.set()
    late = ask("late", 0.001)
    assert (await asyncio.wait_for(late, 5)).finish_reason == DEADLINE
