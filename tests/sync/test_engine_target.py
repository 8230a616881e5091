"""The engine's side of an update continues after its caller has timed out, and later calls are queued behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpctl.sync.engine_target import EngineTarget
from mtpctl.sync.protocol import ABORTED_BY_SENDER, SyncError
from mtpctl.sync.update import update_target
from tests.fakes import adapters
from tests.fakes.adapters import BASE

SECTIONS = ("target", "draft")


class Core:
    """An `EngineClient` that executes calls sequentially even if their caller is cancelled, with vLLM's rules of sessions."""

    def __init__(self) -> None:
        self.slow, self.live, self.active, self.label = "", 0, False, 0
        self.refused = ""
        self._version = 0
        self._busy = asyncio.Lock()

    async def _do(self, name: str, change: Any) -> None:
        async def run() -> None:
            async with self._busy:
                if self.slow == name:
                    self.slow = ""
                    await asyncio.sleep(0.9)
                change()

        await asyncio.shield(asyncio.ensure_future(run()))

    async def start(self, *, draft: bool) -> None:
        def change() -> None:
            if self.active:
                raise RuntimeError("start_weight_update called while a weight update is already active")
            self.active = True

        await self._do("start", change)

    async def step(self, info: dict[str, Any]) -> None:
        def change() -> None:
            if not self.active:
                raise RuntimeError("start_weight_update must be called before update_weights.")
            if info["action"] == "abort":
                self.active = False
                raise RuntimeError(f"a worker failed: {ABORTED_BY_SENDER}")
            if info["section"] == self.refused:
                self.active = False
                raise RuntimeError("lm_head.weight does not fit")
            self._version = info.get("version", self._version)
            if info["action"] == "buckets":
                self.live = self._version

        await self._do(info["action"], change)

    async def finish(self, version: int) -> None:
        def change() -> None:
            self.active, self.label = False, version

        await self._do("finish", change)

    async def rpc(self, method: str, *args: str) -> list[Any]:
        return []

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        raise AssertionError("there is none")


@pytest.mark.parametrize("slow", ["start", "begin", "buckets", "finish"])
def test_an_update_that_times_out_is_restored_before_the_next(tmp_path: Path, slow: str) -> None:
    sends = adapters.publisher(tmp_path, sections=SECTIONS)

    async def within(step: Awaitable[Any], what: str) -> Any:
        return await step

    async def drive() -> Core:
        core = Core()
        target = EngineTarget(core, 0, with_deadline=within, paused=lambda: True)
        await update_target(target, sends.publish(BASE.items(), 1))
        core.slow = slow
        with pytest.raises(SyncError, match=r"took longer than sync\.deadline_s"):
            await update_target(target, sends.publish(BASE.items(), 2), deadline_s=0.6)
        assert (core.live, core.label, target.version, target.dirty, core.active) == (1, 1, 1, False, False)
        await update_target(target, sends.publish(BASE.items(), 3))
        return core

    core = asyncio.run(drive())
    assert (core.live, core.label) == (3, 3)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_a_dropped_section_does_not_change_the_version(tmp_path: Path, transport: str) -> None:
    """The draft section, which an engine without speculation drops, is followed by a refused target section."""
    sends = adapters.publisher(tmp_path, sections=("draft", "target"))

    async def within(step: Awaitable[Any], what: str) -> Any:
        return await step

    async def drive() -> None:
        core = Core()
        target = EngineTarget(core, 0, with_deadline=within, paused=lambda: True, sections=("target",))
        await update_target(target, replace(sends.publish(BASE.items(), 1), transport=transport))
        second = replace(sends.publish(BASE.items(), 2), transport=transport)
        core.refused = "target"
        with pytest.raises(SyncError, match=r"lm_head\.weight does not fit"):
            await update_target(target, second)
        assert (core.label, target.version) == (1, 1)
        core.refused = ""
        await update_target(target, second)
        assert (core.label, target.version, core.live) == (2, 2, 2)

    asyncio.run(drive())
