"""Contexts longer than a model's config allows, with or without RoPE scaling."""

from __future__ import annotations

from collections.abc import Mapping

from mtpctl.errors import UserError
from mtpctl.families.fields import mapping
from mtpctl.families.reading import DRAFTER, shape_of
from mtpctl.families.shape import ModelShape

_ROPE_FIELDS = ("rope_scaling", "rope_parameters")


def with_context(config: Mapping[str, object], context: int, scaling: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return a copy of `config` with `context` positions.

    Args:
        context: at least the positions of `config`.
        scaling: fields of RoPE scaling, with transformers' names. None: RoPE is unchanged, so later positions are extrapolated.

    Raises:
        UserError: if `context` is shorter than in `config`, or if `scaling` does not reach it.
    """
    original = shape_of(config).max_positions
    if context < original:
        raise UserError(f"model.context: the model has {original:,} positions, got {context:,}; use rollout.context for a shorter context")
    result = dict(config)
    for key in ("text_config", DRAFTER):
        if nested := mapping(config, key):
            result[key] = _extended(nested, context, scaling, trained=original)
    if "text_config" not in result:
        result = _extended(result, context, scaling, trained=original)
    if (covered := shape_of(result).max_positions) < context:
        raise UserError(f"model.rope_scaling: covers {covered:,} positions, but model.context is {context:,}; raise its factor")
    return result


def _extended(fields: Mapping[str, object], context: int, scaling: Mapping[str, object] | None, *, trained: int) -> dict[str, object]:
    """One level of a config with `context` positions. `trained`: the positions that the model was trained with."""
    result = {**fields, "max_position_embeddings": context}
    if scaling is not None:
        # All scalings except linear need the trained length, which max_position_embeddings no longer states.
        length = {} if scaling.get("rope_type") == "linear" else {"original_max_position_embeddings": trained}
        field = next((name for name in _ROPE_FIELDS if fields.get(name)), _ROPE_FIELDS[0])
        result[field] = {**mapping(fields, field), **length, **scaling}
    return result


def describe_context(before: ModelShape, after: ModelShape) -> str:
    """Describe in one line how `after` reaches more positions than `before`."""
    positions = f"{after.max_positions:,} positions, {after.max_positions / before.max_positions:.3g} times those of the config"
    if after.rope_scaling == before.rope_scaling:
        return f"{positions}; RoPE as in the config, so later positions are extrapolated"
    assert after.rope_scaling is not None
    return f"{positions}; RoPE scaled by {after.rope_scaling['rope_type']}, factor {after.rope_scaling.get('factor', 1):g}"
