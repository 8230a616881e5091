"""What every engine does the same way, on one whose core is made up: how long it is waited for, and how its death is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.rollout.engine import Engine, GenerationChunk
from mtpctl.rollout.protocol import ABORTED, DEADLINE, EngineDead, SpeculationState
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PauseMode, TargetDirty
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engines import in_loop


class Core:
    """An `EngineClient` that takes its time, and dies, where it is told to."""

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
        super().__init__(core, version=0, context=256, slots=1, holds=("target",))
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

    async def speculate(self, drafts: int | None = None, *, look_again: bool = False) -> SpeculationState:
        raise NotImplementedError

    async def shutdown(self) -> None:
        raise NotImplementedError

    def _read(self, tokens: list[int]) -> str:
        raise NotImplementedError

    @property
    def _errored(self) -> bool:
        return self.core.dead


class InLine(Made):
    """Answers one request after the other, each with a token every 10 ms."""

    def __init__(self) -> None:
        super().__init__(Core())
        self.turn, self.cut = asyncio.Lock(), set[str]()

    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> GenerationChunk:
        async with self.turn:
            for created in range(room):
                if request_id in self.cut:
                    return GenerationChunk([7] * created, [-1.0] * created, [(0, created, 0)], ABORTED)
                await asyncio.sleep(0.01)
        return GenerationChunk([7] * room, [-1.0] * room, [(0, room, 0)], "length")

    async def _abort(self, request_ids: list[str]) -> None:
        self.cut |= set(request_ids)


@in_loop
async def test_deadline_starts_when_the_request_gets_a_slot() -> None:
    """The pool sends a few requests more than an engine has places for."""
    engine = InLine()
    stored = engine.generate(GenerationRequest(Sample("p0", "g", [1]), 120))  # 1.2 s
    waiting = engine.generate(GenerationRequest(Sample("p1", "g", [1]), 5, deadline_s=1.0))
    _, sample = await asyncio.gather(stored, waiting)
    assert (sample.finish_reason, len(sample.response_ids)) == ("length", 5)
    assert 0 < sample.spent_s < 1.0


@in_loop
async def test_response_over_its_deadline_is_aborted_and_the_next_one_is_not() -> None:
    engine = InLine()
    requested = [GenerationRequest(Sample(f"p{index}", "g", [1]), tokens, deadline_s=1.0) for index, tokens in enumerate((200, 5))]
    late, next_one = await asyncio.gather(*(engine.generate(request) for request in requested))
    assert late.finish_reason == DEADLINE and 0 < len(late.response_ids) < 200
    assert (next_one.finish_reason, len(next_one.response_ids)) == ("length", 5)


def manifest(root: Path, version: int = 1) -> Manifest:
    return Publisher(VersionStore(root), bucket_bytes=1 << 10).publish([("w", torch.ones(3))], version)


@pytest.mark.parametrize("paused", [False, True])
def test_an_update_leaves_an_engine_as_it_was_paused_or_not(tmp_path: Path, paused: bool) -> None:
    @in_loop
    async def drive() -> None:
        engine = Made(Core())
        if paused:
            await engine.pause()
        await engine.update(manifest(tmp_path))
        assert (engine.version, engine.paused) == (1, paused)

    drive()


def test_weights_may_take_as_long_as_the_sync_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.rollout.engine.CONTROL_DEADLINE_S", 0.1)

    @in_loop
    async def drive() -> None:
        engine = Made(Core(slow_in="buckets"))
        await engine.update(manifest(tmp_path), deadline_s=5)
        assert engine.version == 1 and (await engine.health()).alive
        engine.core.slow_in = "pause"
        with pytest.raises(EngineDead, match="pausing took longer than 0 s"):
            await engine.pause()

    drive()


@pytest.mark.parametrize("dies_in", ["pause", "start", "begin", "buckets", "finish", "resume"])
def test_engine_that_dies_in_an_update_reports_the_cause(tmp_path: Path, dies_in: str) -> None:
    @in_loop
    async def drive() -> None:
        engine = Made(Core(dies_in=dies_in))
        # With weights half taken in it is dirty as well.
        with pytest.raises((EngineDead, TargetDirty), match=r"ValueError: no kernel image$"):
            await engine.update(manifest(tmp_path))
        assert (await engine.health()).reason == "ValueError: no kernel image"

    drive()
