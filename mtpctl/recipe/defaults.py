"""Defaults that depend on the model and the machine. They are filled in when a recipe is loaded, unless the recipe sets the value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.model_source import has_mtp_head, hf_config
from mtpctl.recipe.schema import Recipe

CPU_INFO = Path("/proc/cpuinfo")
AMX = {"amx_tile", "amx_bf16"}
"""CPU flags with which matrix products are faster in bf16 than in fp32. Without them they are 5 to 10 times slower."""


def filled(recipe: Recipe, given: Callable[[str], bool]) -> tuple[Recipe, list[str]]:
    """The recipe with these defaults, and a line for each that differs from the schema's.

    given: whether the recipe sets a dotted key. Unreadable models are reported by the recipe's checks.
    """
    try:
        config = hf_config(recipe.model, fetch=False)
        shape = None if config is None else shape_of(config)
    except UserError:
        return recipe, []
    notes: list[str] = []
    recipe = _without_head(recipe, shape, given, notes)
    return _in_precision(recipe, shape, given, notes), notes


def _without_head(recipe: Recipe, shape: ModelShape | None, given: Callable[[str], bool], notes: list[str]) -> Recipe:
    """If there is no MTP head, turn speculation and MTP training off."""
    drafts = "rollout.speculation.num_tokens"
    headless = shape is not None and not has_mtp_head(recipe.model, shape)
    if headless and not given("mtp.mode"):
        recipe = recipe.model_copy(update={"mtp": recipe.mtp.model_copy(update={"mode": "off"})})
    if (headless or recipe.mtp.mode == "off") and recipe.rollout.speculation.num_tokens and not given(drafts):
        speculation = recipe.rollout.speculation.model_copy(update={"num_tokens": 0})
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"speculation": speculation})})
        notes.append(f"{drafts}: 0, because {'the model has no MTP head' if headless else 'mtp.mode is off'}: speculation is off")
    return recipe


def _in_precision(recipe: Recipe, shape: ModelShape | None, given: Callable[[str], bool], notes: list[str]) -> Recipe:
    """bf16 on a card, on a CPU with AMX, and for linear attention, which vLLM computes on a CPU in bf16 alone; else fp32."""
    linear = shape is not None and "linear_attention" in shape.layer_kinds
    if given("train.precision") or recipe.device == "cuda" or linear or has_amx():
        return recipe
    notes.append("train.precision: fp32, because this CPU has no AMX, without which bf16 is slower")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "fp32"})})


def has_amx() -> bool:
    """Whether this machine's CPU multiplies matrices of bf16 by AMX."""
    try:
        flags = next((line for line in CPU_INFO.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return False
    return set(flags.split()) >= AMX
