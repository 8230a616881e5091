"""The weight updates of an `AsyncLLM` in this process, behind the calls that an `EngineTarget` makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpctl.sync.receiver import UpdateStep

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmClient:
    """An `EngineClient` of an `AsyncLLM` in this process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def start(self, *, draft: bool) -> None:
        await (self._llm.start_draft_weight_update() if draft else self._llm.start_weight_update())

    async def step(self, info: UpdateStep) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def finish(self, version: int) -> None:
        await self._llm.finish_weight_update(str(version))

    async def rpc(self, method: str, *args: str) -> list[object]:
        return list(await self._llm.collective_rpc(method, args=args))

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        await self._llm.add_lora(adapter_request(name, number, folder, replaces=True))


def adapter_request(name: str, number: int, folder: str, *, replaces: bool = False) -> LoRARequest:
    """vLLM's name for an adapter, in requests and, where it `replaces` the one of this number, when it is loaded."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder, load_inplace=replaces)
