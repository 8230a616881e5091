"""An engine whose client is slow, or dies, in a chosen call."""

from __future__ import annotations

import asyncio
from typing import Any

from mtpctl.rollout.engine import Engine, GenerationChunk
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.samples import GenerationRequest
from mtpctl.sync.protocol import PauseMode


class Core:
    """An `EngineClient` that delays calls and dies as configured."""

    def __init__(self, slow_in: str = "", dies_in: str = "") -> None:
        self.slow_in, self.dies_in, self.dead = slow_in, dies_in, False

    async def _do(self, what: str) -> None:
        if what == self.slow_in:
            await asyncio.sleep(0.2)
        if what == self.dies_in:
            self.dead = True
        if self.dead:
            raise ValueError("no kernel image")

    async def start(self, *, draft: bool) -> None:
        await self._do("start")

    async def step(self, info: dict[str, Any]) -> None:
        await self._do(info["action"])

    async def finish(self, version: int) -> None:
        await self._do("finish")

    async def rpc(self, method: str, *args: str) -> list[Any]:
        await self._do(method)
        return []

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        raise AssertionError("there is none")


class Made(Engine):
    """An engine around a `Core`, which generates nothing."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, version=0, context=256, slots=1, sections=("target",))
        self.core, self.paused = core, False

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._with_deadline(self.core._do("pause"), "pausing")
        self._paused = self.paused = True

    async def resume(self) -> None:
        self._check_alive()
        await self._with_deadline(self.core._do("resume"), "resuming")
        self._paused = self.paused = False

    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> GenerationChunk:
        raise NotImplementedError

    async def _abort(self, request_ids: list[str]) -> None:
        raise NotImplementedError

    async def control_speculation(self, drafts: int | None = None, *, weights_changed: bool = False) -> SpeculationState:
        raise NotImplementedError

    async def shutdown(self) -> None:
        raise NotImplementedError

    def _decode(self, tokens: list[int]) -> str:
        raise NotImplementedError

    @property
    def _errored(self) -> bool:
        return self.core.dead
