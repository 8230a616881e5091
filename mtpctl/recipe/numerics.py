"""The key `numerics`: whether the engine's log-probs equal the trainer's to the last bit, and what that does not support yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.section import Complaints

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

Numerics = Literal["usual", "bitwise"]

MAX_CONTEXT = 8192
"""Maximum number of keys of a query with exact sums (`mtpctl.kernels.exact`)."""
FAMILIES = ("mimo",)
ENGINE_ARGS = ("attention_backend", "attention_config", "dtype", "enable_lora", "kv_cache_dtype", "logprobs_mode", "quantization")
"""Options of vLLM that change its arithmetic or its log-probs."""


def check_numerics(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    """Report settings that `numerics: bitwise` does not support yet."""
    if recipe.numerics != "bitwise":
        return
    rollout, train, needs = recipe.rollout, recipe.train, "numerics: bitwise needs"
    if recipe.device != "cpu":
        yield f"cluster.device: {needs} a CPU; set cpu, or numerics: usual"
    if train.precision != "fp32":
        yield f"train.precision: {needs} fp32; set fp32, or numerics: usual"
    if train.lora is not None:
        yield f"train.lora: {needs} full weights; take the section out, or set numerics: usual"
    if recipe.kernels.linear_logprob != "auto":
        yield f"kernels.linear_logprob: {needs} its own kernel; set auto, or numerics: usual"
    parallels = {"train.parallel": train.parallel} | ({"logprob.parallel": recipe.logprob.parallel} if recipe.logprob.standalone else {})
    for name, parallel in parallels.items():
        for axis in ("tp", "cp"):
            if (ranks := getattr(parallel, axis)) > 1:
                yield f"{name}.{axis}: {needs} unsplit layers and samples, got {ranks}; set 1, or numerics: usual"
    yield from _rollout(recipe, needs)
    if shape is None:
        return
    if shape.family not in FAMILIES or shape.rope_scaling is not None:
        family = f"{shape.family} with scaled rope" if shape.rope_scaling is not None else shape.family
        yield f"model: {needs} a model of the family {', '.join(FAMILIES)}, got {family}; use one, or set numerics: usual"
    if (context := rollout.context or shape.max_positions) > MAX_CONTEXT:
        yield f"rollout.context: {needs} at most {MAX_CONTEXT} tokens, got {context}; lower it, or set numerics: usual"


def _rollout(recipe: Recipe, needs: str) -> Complaints:
    rollout = recipe.rollout
    if rollout.engine != "vllm":
        yield f"rollout.engine: {needs} vllm; set it, or numerics: usual"
        return
    if rollout.dtype == "bf16":
        yield f"rollout.dtype: {needs} fp32; set auto, or numerics: usual"
    if rollout.tp > 1:
        yield f"rollout.tp: {needs} unsplit layers, got {rollout.tp}; set 1, or numerics: usual"
    if rollout.temperature != 1:
        yield f"rollout.temperature: {needs} 1, got {rollout.temperature:g}; set 1, or numerics: usual"
    if rollout.top_p < 1 or rollout.top_k:
        name = "top_p" if rollout.top_p < 1 else "top_k"
        yield f"rollout.{name}: {needs} the whole distribution; leave {name} out, or set numerics: usual"
    for name in ENGINE_ARGS:
        if name in rollout.engine_args:
            yield f"rollout.engine_args: {needs} vLLM's default of {name}; take it out, or set numerics: usual"
