"""Every byte of every tensor is sent once, in order, in bounded and aligned buckets."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.families.reading import shape_of
from mtpctl.plan.buckets import (
    ALIGNMENT,
    DTYPE_BYTES,
    Bucket,
    TensorSpec,
    adapter_tensors,
    base_weight_bytes,
    plan_buckets,
    section_buckets,
    wire_tensors,
)
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.train import LoraConfig, adapter_targets
from tests.fakes.tiny import engine, mimo
from tests.fakes.trainer_cases import MODELS

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
spec_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))), max_size=12).map(
    lambda drawn: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(drawn)]
)
limits = st.integers(ALIGNMENT, 20_000)


def send(specs: list[TensorSpec], buckets: list[Bucket], payload: dict[str, bytes]) -> dict[str, bytes]:
    """Pack each bucket into a buffer and unpack it, like a transport."""
    items = {spec.name: spec.itemsize for spec in specs}
    arrived = {name: bytearray(len(data)) for name, data in payload.items()}
    for bucket in buckets:
        buffer = bytearray(bucket.nbytes)
        for e in bucket.entries:
            lo, hi = e.part_start * items[e.name], e.part_stop * items[e.name]
            buffer[e.offset : e.offset + e.nbytes] = payload[e.name][lo:hi]
        for e in bucket.entries:
            lo, hi = e.part_start * items[e.name], e.part_stop * items[e.name]
            arrived[e.name][lo:hi] = buffer[e.offset : e.offset + e.nbytes]
    return {name: bytes(data) for name, data in arrived.items()}


@given(specs=spec_lists, limit=limits, seed=st.integers(0, 2**16))
def test_packed_tensors_are_unpacked_equal(specs: list[TensorSpec], limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = {spec.name: rng.integers(1, 255, spec.nbytes, dtype=np.uint8).tobytes() for spec in specs}
    assert send(specs, plan_buckets(specs, limit), payload) == payload


@given(specs=spec_lists, limit=limits)
def test_buckets_are_bounded_aligned_ordered_and_do_not_overlap(specs: list[TensorSpec], limit: int) -> None:
    buckets = plan_buckets(specs, limit)
    assert [b.index for b in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert 0 <= bucket.nbytes <= limit
        end = 0
        for e in bucket.entries:
            assert e.offset % ALIGNMENT == 0 and e.offset >= end
            assert e.nbytes == (e.part_stop - e.part_start) * DTYPE_BYTES[e.dtype]
            end = e.offset + e.nbytes


@given(specs=spec_lists, limit=limits)
def test_each_tensor_is_sent_once_and_split_only_if_it_exceeds_a_bucket(specs: list[TensorSpec], limit: int) -> None:
    entries = [e for b in plan_buckets(specs, limit) for e in b.entries]
    parts: dict[str, list[tuple[int, int]]] = {}
    for e in entries:
        parts.setdefault(e.name, []).append((e.part_start, e.part_stop))
    assert list(parts) == [s.name for s in specs]
    for spec in specs:
        runs = parts[spec.name]
        assert runs[0][0] == 0 and runs[-1][1] == spec.numel
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(runs))
        assert (len(runs) == 1) == (spec.nbytes <= limit)
        assert [e.is_last for e in entries if e.name == spec.name] == [False] * (len(runs) - 1) + [True]


@given(specs=spec_lists, limit=limits)
def test_both_ends_compute_the_same_plan(specs: list[TensorSpec], limit: int) -> None:
    assert plan_buckets(iter(specs), limit) == plan_buckets(list(specs), limit)


@given(specs=spec_lists.filter(bool), limit=limits, data=st.data())
def test_an_alias_is_listed_on_its_tensor_and_not_sent(specs: list[TensorSpec], limit: int, data: st.DataObject) -> None:
    owner = data.draw(st.sampled_from(specs))
    listed = data.draw(st.booleans())
    tied = [*specs, TensorSpec("tied", owner.shape, owner.dtype)] if listed else specs
    buckets = plan_buckets(tied, limit, {"tied": owner.name, "tied2": "tied"})
    entries = [e for b in buckets for e in b.entries]
    assert "tied" not in {e.name for e in entries}
    assert {e.aliases for e in entries if e.name == owner.name} == {("tied", "tied2")}
    assert sum(e.nbytes for e in entries) == sum(s.nbytes for s in specs)


def test_a_large_tensor_spans_buckets_and_the_next_follows_its_last_part() -> None:
    buckets = plan_buckets([TensorSpec("a", (4,), "float32"), TensorSpec("big", (300,), "float32"), TensorSpec("b", (8,), "bfloat16")], 512)
    assert [[(e.name, e.offset, e.part_start, e.part_stop) for e in b.entries] for b in buckets] == [
        [("a", 0, 0, 4)],
        [("big", 0, 0, 128)],
        [("big", 0, 128, 256)],
        [("big", 0, 256, 300), ("b", 256, 0, 8)],
    ]


A, B = TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (2,), "float32")


@pytest.mark.parametrize(
    ("specs", "limit", "aliases", "message"),
    [
        ([A, A], 512, {}, "'a' is listed twice"),
        ([A], 255, {}, "at least 256 bytes, got 255"),
        ([A], 512, {"x": "y"}, "'x' stands for 'y', which is not among"),
        ([A], 512, {"x": "y", "y": "x"}, "leads back to itself"),
        ([A, B], 512, {"b": "a"}, "another shape or dtype"),
        ([TensorSpec("q", (2,), "int3")], 512, {}, "q: dtype 'int3' is unknown"),
    ],
)
def test_invalid_plans_are_errors(specs: list[TensorSpec], limit: int, aliases: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_buckets(specs, limit, aliases)


@pytest.mark.parametrize("model", ["mimo", "tied", "qwen3-moe", "deepseek", "qwen3.5"])
def test_planned_adapter_tensors_equal_the_trainers_export(tmp_path: Path, model: str) -> None:
    folder = mimo(tmp_path / "model", **MODELS[model])
    lora = LoraConfig(rank=3, targets=adapter_targets(folder.shape))
    with engine(folder, lora=lora) as created:
        exported = {name: tuple(tensor.shape) for name, tensor in created.export_adapter()}
    planned = adapter_tensors(folder.shape, lora.rank, lora.targets, "float32")
    assert {spec.name: spec.shape for spec in planned} == exported


def test_adapter_syncs_exclude_the_trunk() -> None:
    lora = ["train.lora={rank: 4}", "sync.sections=[adapter, draft]"]
    merged, alone = (load_recipe("tiny_mtp", sets=sets).recipe for sets in ([], lora))
    assert alone.model.config is not None
    shape = shape_of(alone.model.config)
    trunk = sum(spec.nbytes for spec in wire_tensors(shape, "target", "float32"))
    assert (list(section_buckets(merged, shape)), base_weight_bytes(merged, shape)) == (["target", "draft"], 0)
    assert (list(section_buckets(alone, shape)), base_weight_bytes(alone, shape)) == (["adapter", "draft"], trunk)
