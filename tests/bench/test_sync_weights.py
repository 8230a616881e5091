"""`bench sync-weights`: bounds, GPUs and load. Figures are measured by the command itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench import sync_weights
from mtpctl.bench.sync_ends import RequestLoad
from mtpctl.bench.sync_weights import compute_extra_gib, find_misses, format_phases, format_table
from mtpctl.errors import RuntimeFailure
from mtpctl.plan.memory import GIB
from tests.fakes.bench_results import SYNC_OPTIONS, sync_result


def test_trainer_and_engine_use_gpus_visible_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert sync_weights.select_gpus(SYNC_OPTIONS) == ("4", "6")
    assert sync_weights.select_gpus(replace(SYNC_OPTIONS, shared=True)) == ("4", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sync_weights.select_gpus(SYNC_OPTIONS) == ("0", "1")
    assert sync_weights.select_gpus(replace(SYNC_OPTIONS, device="cpu")) == ("", "")


async def steady(engine: Any) -> None:
    """Wait for a load of one request on `engine`."""
    options = replace(SYNC_OPTIONS, device="cpu", batch=1)
    load = RequestLoad(engine, options)
    try:
        await sync_weights._wait_until_steady(load, options)
    finally:
        load.end()


class DeadEngine:
    async def generate(self, *inputs: Any) -> AsyncIterator[Any]:
        raise RuntimeError("the engine is dead")
        yield


def test_error_of_a_request_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without requests in flight a sync would stall nothing."""
    monkeypatch.setattr(type(SYNC_OPTIONS), "window_s", 0.01)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        asyncio.run(steady(DeadEngine()))


class SilentEngine:
    async def generate(self, *inputs: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield


def test_engine_that_generates_nothing_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(SYNC_OPTIONS), "window_s", 0.001)
    with pytest.raises(RuntimeFailure, match=r"generated nothing in 0\.002 s, with 1 requests in flight"):
        asyncio.run(steady(SilentEngine()))


def test_store_in_memory_is_removed_when_a_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"

    class Trainer:
        async def call(self, method: str, *inputs: Any) -> None:
            if method != "use":
                (memory / "v00000001").mkdir(parents=True)
                raise RuntimeError("out of memory")

    class Engine:
        _llm = DeadEngine()

    async def steady(*inputs: Any) -> None: ...

    monkeypatch.setattr("mtpctl.sync.store.default_root", lambda *inputs: memory)
    monkeypatch.setattr(sync_weights, "_wait_until_steady", steady)
    monkeypatch.setattr(sync_weights, "model_bytes", lambda options: 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        options = replace(SYNC_OPTIONS, device="cpu", folder=tmp_path, batch=1)
        asyncio.run(sync_weights._measure_transport(options, sync_weights.make_recipe(options), Trainer(), Engine(), "shm", 0, print))  # type: ignore[arg-type]
    assert not memory.exists()


def test_medians_within_the_bounds_miss_nothing() -> None:
    assert find_misses(sync_result(), SYNC_OPTIONS) == []
    assert sync_result().link_seconds == 0.1


def test_missed_bounds_are_reported_with_their_figures() -> None:
    slow = sync_result(seconds=[0.6], stall_seconds=[0.7], wire_seconds=[0.3], trainer_gib=3.5, engine_gib=4.0)
    assert find_misses(slow, SYNC_OPTIONS) == [
        "wire over link 3.000 x, bound 2",
        "a sync 0.600 s, bound 0.15",
        "a stall 0.700 s, bound 0.6",
        "extra memory of the trainer 3.500 GiB, bound 3",
        "extra memory of the engine 4.000 GiB, bound 3",
    ]


def test_link_bound_applies_to_nccl_and_the_tiny_bound_to_a_cpu() -> None:
    assert find_misses(sync_result("ipc", wire_seconds=[5.0]), SYNC_OPTIONS) == []
    assert find_misses(sync_result("shm", seconds=[0.06]), replace(SYNC_OPTIONS, device="cpu")) == ["a sync 0.060 s, bound 0.05"]


def test_fp8_has_its_own_bound_for_a_sync() -> None:
    assert find_misses(sync_result(seconds=[0.1]), replace(SYNC_OPTIONS, fp8=True)) == ["a sync 0.100 s, bound 0.09"]


def test_table_has_medians_with_least_and_most() -> None:
    assert "| nccl | 10.000 | 10 | 100.0 | 0.190 (0.150–0.200) | 1.90 | 0.140 (0.130–9.000) |" in format_table([sync_result()])


def test_phases_are_in_order_with_medians_in_milliseconds() -> None:
    phases = {"plan": [0.001], "pause": [0.02], "receive target": [0.03, 0.05, 0.04], "resume": [0.001]}
    results = [sync_result(phase_seconds=phases), sync_result("ipc", phase_seconds={"plan": [0.002]})]
    assert [line.split("|")[1:4] for line in format_phases(results).splitlines()[2:]] == [
        [" plan ", " 1.0 (1.0–1.0) ", " 2.0 (2.0–2.0) "],
        [" pause ", " 20.0 (20.0–20.0) ", "  "],
        [" receive target ", " 40.0 (30.0–50.0) ", "  "],
        [" resume ", " 1.0 (1.0–1.0) ", "  "],
    ]


def test_extra_memory_has_tensors_reserved_memory_and_other_buffers() -> None:
    before = {"allocated": 10 * GIB, "peak": 10 * GIB, "reserved": 12 * GIB, "peak_reserved": 12 * GIB, "used": 13 * GIB}
    after = {"allocated": 10 * GIB, "peak": 13 * GIB, "reserved": 16 * GIB, "peak_reserved": 16 * GIB, "used": 18 * GIB}
    assert compute_extra_gib(before, after, exclusive=True) == 3 + 1 + 1
    assert compute_extra_gib(before, after, exclusive=False) == 3 + 1
