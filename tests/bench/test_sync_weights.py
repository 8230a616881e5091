"""What `bench sync-weights` measures on, and beside what; the figures themselves come from the command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench import sync_weights
from mtpctl.bench.sync_ends import Load
from mtpctl.errors import RuntimeFailure
from tests.bench.test_sync_results import CARD


def test_trainer_and_engine_take_cards_that_this_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others belong to another measurement of `bench all`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert sync_weights.cards(CARD) == ("4", "6")
    assert sync_weights.cards(replace(CARD, shared=True)) == ("4", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sync_weights.cards(CARD) == ("0", "1")
    assert sync_weights.cards(replace(CARD, device="cpu")) == ("", "")


async def steady(engine: Any) -> None:
    """Wait for a load of one request on `engine`."""
    options = replace(CARD, device="cpu", batch=1)
    load = Load(engine, options)
    try:
        await sync_weights._steady(load, options)
    finally:
        load.end()


class Dead:
    """An engine that answers nothing."""

    async def generate(self, *given: Any) -> AsyncIterator[Any]:
        raise RuntimeError("the engine is dead")
        yield


def test_a_load_that_ended_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without requests in flight a sync stalls nobody, and throughput is back at once."""
    monkeypatch.setattr(type(CARD), "window_s", 0.01)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        asyncio.run(steady(Dead()))


class Silent:
    """An engine that takes requests and says nothing."""

    async def generate(self, *given: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield


def test_nothing_is_measured_beside_an_engine_that_generates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CARD), "window_s", 0.001)
    with pytest.raises(RuntimeFailure, match=r"generated nothing in 0\.002 s, with 1 requests in flight"):
        asyncio.run(steady(Silent()))


def test_a_store_in_memory_is_gone_when_a_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"

    class Trainer:
        async def call(self, method: str, *given: Any) -> None:
            if method != "use":
                (memory / "v00000001").mkdir(parents=True)
                raise RuntimeError("out of memory")

    class Engine:
        _llm = Dead()

    async def steady(*given: Any) -> None: ...

    monkeypatch.setattr("mtpctl.sync.store.default_root", lambda *given: memory)
    monkeypatch.setattr(sync_weights, "_steady", steady)
    monkeypatch.setattr(sync_weights, "model_bytes", lambda options: 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        options = replace(CARD, device="cpu", folder=tmp_path, batch=1)
        asyncio.run(sync_weights._one(options, sync_weights.recipe_of(options), Trainer(), Engine(), "shm", 0, print))  # type: ignore[arg-type]
    assert not memory.exists()
