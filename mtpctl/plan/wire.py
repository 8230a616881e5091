"""The tensors and buckets of a weight sync, section by section, from the model's shape alone."""

from __future__ import annotations

from collections.abc import Sequence

from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.plan.buckets import Bucket, TensorSpec, plan_buckets
from mtpctl.recipe.model import DTYPES
from mtpctl.recipe.schema import Recipe

ADAPTER_PREFIX = "base_model.model."
"""PEFT's prefix of the names of layers that it adapts."""

ADAPTED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
    "out_proj": ("out_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The layers of a Hugging Face folder that make up each Megatron layer of `train.lora.targets`, over all families."""


def wire_tensors(shape: ModelShape, section: str, dtype: str) -> list[TensorSpec]:
    """Tensors of `target` or `draft` under their Hugging Face names, all in `dtype`. Aliases are left to the receiver."""
    same = aliases(shape)
    return [
        TensorSpec(name, size, dtype)
        for name, size in tensor_shapes(shape).items()
        if name not in same and section_of(name, shape) == section
    ]


def adapted_weights(shape: ModelShape, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Weights `[rows, columns]` of every layer of the trunk that `train.lora.targets` name."""
    leaves = {leaf for target in targets for leaf in ADAPTED[target]}
    return {
        name: size
        for name, size in tensor_shapes(shape).items()
        if name.endswith(".weight") and name.split(".")[-2] in leaves and section_of(name, shape) == "target"
    }


def adapter_tensors(shape: ModelShape, rank: int, targets: Sequence[str], dtype: str) -> list[TensorSpec]:
    """A `[rank, columns]` and B `[rows, rank]`, by PEFT's names, of every layer of the trunk that `targets` name."""
    found = []
    for name, (rows, columns) in adapted_weights(shape, targets).items():
        layer = ADAPTER_PREFIX + name.removesuffix(".weight")
        found.append(TensorSpec(f"{layer}.lora_A.weight", (rank, columns), dtype))
        found.append(TensorSpec(f"{layer}.lora_B.weight", (rows, rank), dtype))
    return found


def _dtype(recipe: Recipe) -> str:
    return DTYPES[recipe.train.precision if recipe.rollout.dtype == "auto" else recipe.rollout.dtype]


def base_weight_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of the base weights, which the first sync sends with an adapter; 0 where no adapter is synced."""
    return sum(spec.nbytes for spec in wire_tensors(shape, "target", _dtype(recipe))) if "adapter" in recipe.sync.sections else 0


def section_buckets(recipe: Recipe, shape: ModelShape) -> dict[str, list[Bucket]]:
    """Buckets of each section that the recipe syncs; no draft where the MTP layers are off."""
    lora, dtype = recipe.train.lora, _dtype(recipe)
    found: dict[str, list[TensorSpec]] = {}
    for section in recipe.sync.sections:
        if section == "adapter" and lora is not None:
            found[section] = adapter_tensors(shape, lora.rank, lora.targets, dtype)
        elif section == "target" or (shape.mtp_layers and recipe.mtp.mode != "off"):
            found[section] = wire_tensors(shape, section, dtype)
    return {section: plan_buckets(specs, recipe.sync.bucket_bytes) for section, specs in found.items()}
