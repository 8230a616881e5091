"""The keys `rollout.quantization` and `rollout.speculation.quantization`: engines with FP8 weights, and what does not support them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from mtpctl.families.quantization import FP8_BLOCK, cut_blocks, fp8_names
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import section_of
from mtpctl.recipe.model import model_folder, tensor_names
from mtpctl.recipe.section import Complaints

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

_FIELD = "rollout.quantization: fp8"
ENGINE_ARGS = ("hf_overrides", "load_format", "model_loader_extra_config", "quantization")
"""Options of vLLM that `rollout.quantization` sets itself."""
QUANTIZED_FOLDER = (
    "its weights are quantized, and rollout.quantization: fp8 quantizes unquantized ones; convert it with mtpctl convert-hf to a "
    "checkpoint and back, and name that folder"
)
"""Why a folder with a `quantization_config` is rejected."""


def sent_in_fp8(recipe: Recipe, shape: ModelShape) -> frozenset[str]:
    """The matrices that a weight sync sends to the engines in FP8."""
    rollout = recipe.rollout
    drafter = rollout.drafter_quantization == "fp8" and recipe.mtp.mode != "off"
    return fp8_names(shape, drafter=drafter) if rollout.quantization == "fp8" else frozenset()


def syncs_both_forms(recipe: Recipe) -> bool:
    """Whether each version is sent twice: quantized to the engines, and unquantized to the log-prob server."""
    return recipe.rollout.quantization == "fp8" and recipe.logprob.standalone


def check_fp8_rollout(recipe: Recipe, shape: ModelShape | None, config: Mapping[str, object]) -> Complaints:
    """Report settings that FP8 weights do not support, and models or ranks whose matrices do not fit its blocks."""
    rollout = recipe.rollout
    if rollout.quantization == "none":
        if rollout.speculation.quantization == "fp8":
            yield "rollout.speculation.quantization: fp8 needs rollout.quantization: fp8; set both, or leave it out"
        return
    if rollout.engine != "vllm":
        yield f"{_FIELD} works only with vLLM; set rollout.engine: vllm, or rollout.quantization: none"
        return
    if recipe.numerics == "bitwise":
        yield (
            f"{_FIELD} rounds the engine's weights, which numerics: bitwise excludes; set numerics: default, or rollout.quantization: none"
        )
    if "adapter" in recipe.sync.sections:
        yield f"{_FIELD} needs merged adapters; set sync.sections: [target, draft], or rollout.quantization: none"
    if recipe.sent_precision != "bf16":
        yield f"{_FIELD} needs activations in bf16, got {recipe.sent_precision}; set train.precision: bf16, or rollout.quantization: none"
    if recipe.sync.transport == "storage" and recipe.logprob.standalone:
        yield (
            f"{_FIELD} with a log-prob server stores each version twice, which sync.transport: storage does not support; set "
            "logprob.standalone: false, or rollout.quantization: none"
        )
    if recipe.device == "cpu" and shape is not None and shape.moe is not None and shape.mamba is not None:
        yield f"{_FIELD} has no kernel for experts without a gate on a CPU; set cluster.device: cuda, or rollout.quantization: none"
    for name in sorted(set(ENGINE_ARGS) & rollout.engine_args.keys()):
        yield f"rollout.engine_args.{name}: rollout.quantization: fp8 sets it; leave it out, or set rollout.quantization: none"
    if config.get("quantization_config"):
        yield f"model.path: {QUANTIZED_FOLDER}"
    elif shape is not None:
        yield from _check_blocks(recipe, shape)


def _check_blocks(recipe: Recipe, shape: ModelShape) -> Complaints:
    names = sent_in_fp8(recipe, shape)
    if not names:
        yield (
            f"{_FIELD}: no matrix of the model fits blocks of {FP8_BLOCK} x {FP8_BLOCK} (hidden size {shape.hidden}, MLP {shape.ffn}); "
            "set rollout.quantization: none, or use a model whose sizes are multiples"
        )
    elif (cut := cut_blocks(shape, names, recipe.rollout.tp)) is not None:
        yield f"rollout.tp: {recipe.rollout.tp} ranks cut the FP8 blocks of {cut}; lower it, or set rollout.quantization: none"
    folder = model_folder(recipe.model)
    if folder is not None and (stored := tensor_names(folder)):
        # The run adds the MTP layers of `model.drafter` to a copy of the folder.
        in_folder = names if recipe.model.drafter is None else frozenset(name for name in names if section_of(name, shape) == "target")
        if (reason := missing_matrix(folder, stored, in_folder)) is not None:
            yield reason


def missing_matrix(folder: Path, stored: Set[str], names: Set[str]) -> str | None:
    """The error if `folder` stores the tensors `stored` and not all matrices to quantize, `names`; otherwise None."""
    if not (missing := sorted(names - stored)):
        return None
    if ".experts." not in missing[0]:
        return f"{_FIELD} needs the tensor {missing[0]}, which {folder} lacks; set rollout.quantization: none"
    # Only an FP8 folder stores each expert, and a folder that is converted back keeps its tensors' layout.
    commands = " && ".join(
        f"mtpctl convert-hf {arguments}"
        for arguments in (
            f"{quote(str(folder))} packed-checkpoint",
            "packed-checkpoint fp8-folder --dtype fp8",
            "fp8-folder unpacked-checkpoint",
            "unpacked-checkpoint unpacked-folder",
        )
    )
    return (
        f"{_FIELD} needs one tensor per expert, but {folder} packs its experts (it has no {missing[0]}); to unpack them, which also "
        f"rounds them to FP8, run `{commands}`, and set model.path: unpacked-folder"
    )


def quantization_cautions(recipe: Recipe) -> Iterator[str]:
    """Caution about training on samples of quantized weights as if the trainer's weights had sampled them."""
    rl = recipe.rl
    if recipe.rollout.quantization == "fp8" and rl.correction.mode == "off" and rl.old_logprobs != "behaviour":
        yield (
            "train.rl.correction.mode: off, but rollout.quantization: fp8 samples from other probabilities than the trainer's, and reward "
            "drops; set it to auto, which means truncate, or set train.rl.old_logprobs: behaviour"
        )
