"""Bounds of `bench sync-weights` are held against medians, each where it applies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mtpctl.bench.sync_results import GIB, ExtraMemory, Options, Result, misses, table

CARD = Options(
    config={},
    device="cuda",
    transports=("nccl",),
    repeats=3,
    batch=64,
    prompt=256,
    tokens=512,
    bucket_bytes=GIB,
    eager=True,
    shared=False,
    folder=Path(),
)


def result(transport: str = "nccl", **more: object) -> Result:
    found = Result(transport, 10_000_000_000, 10, link_gb_per_s=100.0, first_seconds=1.0, verified=3)
    found.seconds, found.stall_seconds, found.wire_seconds = [0.4, 0.3, 9.0], [0.2, 0.1, 0.3], [0.15, 0.19, 0.2]
    found.back_seconds, found.tokens_per_s = [0.5, 0.6, 0.7], [100.0, 100.0, 100.0]
    return replace(found, **more)  # type: ignore[arg-type]


def test_medians_within_their_bounds_miss_nothing() -> None:
    assert misses(result(), CARD) == []
    assert result().link_seconds == 0.1


def test_each_bound_is_told_with_its_figure() -> None:
    slow = result(
        seconds=[0.6], stall_seconds=[0.7], wire_seconds=[0.3], trainer_gib=ExtraMemory(2.0, 0.5, 1.0), engine_gib=ExtraMemory(4.0)
    )
    assert misses(slow, CARD) == [
        "wire over link 3.000 x, bound 2",
        "a sync 0.600 s, bound 0.5",
        "a stall 0.700 s, bound 0.6",
        "memory beside the trainer's 3.500 GiB, bound 3",
        "memory beside the engine's 4.000 GiB, bound 3",
    ]


def test_only_nccl_is_held_against_its_link_and_a_cpu_against_the_tiny_bound() -> None:
    assert misses(result("ipc", wire_seconds=[5.0]), CARD) == []
    assert misses(result("shm", seconds=[0.06]), replace(CARD, device="cpu")) == ["a sync 0.060 s, bound 0.05"]


def test_a_row_tells_medians_with_least_and_most() -> None:
    assert "| nccl | 10.000 | 10 | 100.0 | 0.190 (0.150–0.200) | 1.90 | 0.400 (0.300–9.000) |" in table([result()])


def test_memory_is_told_by_what_holds_it() -> None:
    before = {"allocated": 10 * GIB, "peak": 10 * GIB, "reserved": 12 * GIB, "peak_reserved": 12 * GIB, "used": 13 * GIB}
    after = {"allocated": 10 * GIB, "peak": 13 * GIB, "reserved": 16 * GIB, "peak_reserved": 16 * GIB, "used": 18 * GIB}
    found = ExtraMemory.between(before, after, alone=True)
    assert (found, found.total) == (ExtraMemory(tensors=3.0, kept=1.0, beside=1.0), 5.0)
    assert ExtraMemory.between(before, after, alone=False).beside == 0
