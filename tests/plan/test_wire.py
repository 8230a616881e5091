"""The tensors of an adapter, as they are planned from a model's shape alone, are those that the trainer exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.families.reading import shape_of
from mtpctl.plan.buckets import adapter_tensors, base_weight_bytes, section_buckets, wire_tensors
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.train import LoraConfig, adapter_targets
from tests.fakes.tiny import engine, mimo
from tests.fakes.trainer_cases import MODELS


@pytest.mark.parametrize("model", ["mimo", "tied", "qwen3-moe", "deepseek", "qwen3.5"])
def test_an_adapters_plan_is_what_the_trainer_exports(tmp_path: Path, model: str) -> None:
    folder = mimo(tmp_path / "model", **MODELS[model])
    lora = LoraConfig(rank=3, targets=adapter_targets(folder.shape))
    with engine(folder, lora=lora) as made:
        exported = {name: tuple(tensor.shape) for name, tensor in made.export_adapter()}
    planned = adapter_tensors(folder.shape, lora.rank, lora.targets, "float32")
    assert {spec.name: spec.shape for spec in planned} == exported


def test_an_adapters_syncs_leave_the_trunk_out_and_its_bytes_are_told_apart() -> None:
    lora = ["train.lora={rank: 4}", "sync.sections=[adapter, draft]"]
    merged, alone = (load_recipe("tiny_mtp", sets=sets).recipe for sets in ([], lora))
    assert alone.model.config is not None
    shape = shape_of(alone.model.config)
    trunk = sum(spec.nbytes for spec in wire_tensors(shape, "target", "float32"))
    assert (list(section_buckets(merged, shape)), base_weight_bytes(merged, shape)) == (["target", "draft"], 0)
    assert (list(section_buckets(alone, shape)), base_weight_bytes(alone, shape)) == (["adapter", "draft"], trunk)
