"""What a weight sync moves, section by section, planned from the model's shape alone."""

from __future__ import annotations

from mtpctl import families
from mtpctl.families import ModelShape
from mtpctl.plan.buckets import Bucket, TensorSpec, plan_buckets
from mtpctl.recipe.schema import Recipe

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def wire_tensors(shape: ModelShape, section: str, dtype: str) -> list[TensorSpec]:
    """Tensors of `target` or `draft` under their Hugging Face names, all in `dtype`. Aliases are left to the receiver."""
    same = families.aliases(shape)
    return [
        TensorSpec(name, size, dtype)
        for name, size in families.tensors(shape).items()
        if name not in same and families.section_of(name, shape) == section
    ]


def section_buckets(recipe: Recipe, shape: ModelShape) -> dict[str, list[Bucket]]:
    """Buckets of each section that the recipe syncs. There is no draft where the MTP layers are off."""
    dtype = DTYPES[recipe.train.precision if recipe.rollout.dtype == "auto" else recipe.rollout.dtype]
    sections = [section for section in recipe.sync.sections if section == "target" or (shape.mtp_layers and recipe.mtp.mode != "off")]
    return {section: plan_buckets(wire_tensors(shape, section, dtype), recipe.sync.bucket_bytes) for section in sections}
