"""Behavior that all engines share, with a fake core: time limits and failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mtpctl.rollout.engine import GenerationChunk
from mtpctl.rollout.protocol import ABORTED, DEADLINE, EngineDead
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, TargetDirty
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_core import Core, Made
from tests.fakes.engines import in_loop


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
    """The pool sends a few requests more than an engine has slots."""
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
def test_update_does_not_change_whether_an_engine_is_paused(tmp_path: Path, paused: bool) -> None:
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
