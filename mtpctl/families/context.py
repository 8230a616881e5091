"""Contexts beyond the one in a model's config, with or without scaled rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from mtpctl.errors import UserError
from mtpctl.families.fields import mapping
from mtpctl.families.reading import DRAFTER, shape_of
from mtpctl.families.shape import ModelShape

_ROPE_FIELDS = ("rope_scaling", "rope_parameters")


def with_context(config: Mapping[str, object], context: int, scaling: Mapping[str, object] | None = None) -> dict[str, object]:
    """A config with `context` positions, and with the fields `scaling` of its rotary embeddings (names of transformers).

    Without `scaling`, rotary embeddings stay as they are, so later positions are extrapolated. Raises UserError for fewer positions than
    the config has, and for a scaling that does not cover the context.
    """
    before = shape_of(config).max_positions
    if context < before:
        raise UserError(f"model.context: the model has {before:,} positions, got {context:,}; use rollout.context for a shorter context")
    result = dict(config)
    for key in ("text_config", DRAFTER):
        if nested := mapping(config, key):
            result[key] = _extended(nested, context, scaling, trained=before)
    if "text_config" not in result:
        result = _extended(result, context, scaling, trained=before)
    if (covered := shape_of(result).max_positions) < context:
        raise UserError(f"model.rope_scaling: covers {covered:,} positions, but model.context is {context:,}; raise its factor")
    return result


def _extended(fields: Mapping[str, object], context: int, scaling: Mapping[str, object] | None, *, trained: int) -> dict[str, object]:
    result = {**fields, "max_position_embeddings": context}
    if scaling is not None:
        # Except for linear scaling, it refers to the length that the model was trained with, which max_position_embeddings no longer is.
        length = {} if scaling.get("rope_type") == "linear" else {"original_max_position_embeddings": trained}
        field = next((name for name in _ROPE_FIELDS if fields.get(name)), _ROPE_FIELDS[0])
        result[field] = {**mapping(fields, field), **length, **scaling}
    return result


def describe_context(before: ModelShape, after: ModelShape) -> str:
    """How a longer context is reached, in one line."""
    times = f"{after.max_positions:,} positions, {after.max_positions / before.max_positions:.3g} times those of the config"
    if after.rope_scaling == before.rope_scaling:
        return f"{times}; RoPE as in the config, so later positions are extrapolated"
    assert after.rope_scaling is not None
    return f"{times}; RoPE scaled by {after.rope_scaling['rope_type']}, factor {after.rope_scaling.get('factor', 1):g}"
