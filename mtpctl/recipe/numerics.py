"""Number formats of engines: the keys `numerics` and `rollout.quantization`, and the settings that they do not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Literal

from mtpctl.errors import UserError
from mtpctl.families.quantization import FP8_BLOCK, find_split_block, select_fp8_names
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import section_of
from mtpctl.recipe.model import model_folder, tensor_names
from mtpctl.recipe.section import Complaints

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

Numerics = Literal["default", "bitwise"]

MAX_CONTEXT = 8192
"""Maximum number of keys of a query with exact sums (`mtpctl.kernels.exact`)."""
BLOCK_BYTES = 1 << 22
"""Maximum size in bytes of a float64 temporary in an operation with exact sums, unless a single row is larger.

An operation has up to eight temporaries. With temporaries of 64 MiB it takes two to four times as long on an AMD EPYC.
"""
_NEEDS = "numerics: bitwise needs"
PRECISIONS = {"cpu": "fp32", "cuda": "bf16"}
"""The precision of each device's bitwise operations."""
DEVICE_NAMES = {"cpu": "a CPU", "cuda": "a GPU"}
FAMILIES = ("llama", "mimo", "qwen2", "qwen3", "qwen3-moe", "qwen3.5")
ROPES = ("default", "llama3")
CAPABILITY = 9, 0
"""Required compute capability: the tiles of `mtpctl.kernels.invariant` need its shared memory and instructions."""
GPU_DTYPES = "bfloat16", "float16"
MAX_GPU_TP = 2
"""The sum of two ranks' half-precision products has the same bits with any all-reduce; that of more ranks depends on the order."""
WIDTH_MULTIPLE = 8
"""Half-precision elements in 16 bytes. Every row of a matrix must begin at a multiple of 16 bytes."""
MAX_QUERY_HEADS = 64
"""Maximum number of query heads per key-value head. They share a tile of attention (`QUERY_ROWS` of `mtpctl.kernels.invariant`)."""
BITWISE_ENGINE_ARGS = (
    "block_size",
    "disable_log_stats",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "kv_cache_memory_bytes",
    "long_prefill_token_threshold",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "scheduling_policy",
    "seed",
)
"""Options of vLLM that are known to change neither its arithmetic nor its log-probs."""


def check_gpu(name: str, capability: tuple[int, int] | None, dtype: str) -> None:
    """Raise UserError if the kernels of a bitwise engine or trainer do not support its GPU or the torch dtype of its weights.

    `capability`: the compute capability; None if the driver does not report it.
    """
    if capability != CAPABILITY:
        version = "unknown" if capability is None else "{}.{}".format(*capability)
        raise UserError(
            f"numerics: bitwise needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (Hopper), got {name} ({version}); use "
            "one, or set numerics: default"
        )
    if dtype not in GPU_DTYPES:
        raise UserError(
            f"numerics: bitwise needs {' or '.join(GPU_DTYPES)} on a GPU, got {dtype}; set train.precision: bf16 and rollout.dtype: auto, "
            "or numerics: default"
        )


def check_numerics(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    """Report settings that `numerics: bitwise` does not support yet."""
    if recipe.numerics != "bitwise":
        return
    rollout, train = recipe.rollout, recipe.train
    precision = PRECISIONS[recipe.device]
    if train.precision != precision:
        yield f"train.precision: {_NEEDS} {precision} on {DEVICE_NAMES[recipe.device]}; set {precision}, or numerics: default"
    if train.lora is not None:
        yield f"train.lora: {_NEEDS} full weights; remove the section, or set numerics: default"
    if recipe.kernels.linear_logprob != "auto":
        yield f"kernels.linear_logprob: {_NEEDS} its own kernel; set auto, or numerics: default"
    parallels = {"train.parallel": train.parallel} | ({"logprob.parallel": recipe.logprob.parallel} if recipe.logprob.standalone else {})
    for name, parallel in parallels.items():
        for axis, kind in (("cp", "context"), ("ep", "expert")):
            if (ranks := getattr(parallel, axis)) > 1:
                yield f"{name}.{axis}: numerics: bitwise does not support {kind} parallelism, got {ranks}; set 1, or numerics: default"
    yield from _check_bitwise_rollout(recipe)
    splits = {"rollout.tp": rollout.tp} | {f"{name}.tp": parallel.tp for name, parallel in parallels.items()}
    if recipe.device == "cuda":
        yield from _check_gpu_splits(splits)
    if shape is None:
        return
    yield from _check_bitwise_model(shape)
    for name, tp in splits.items():
        if tp > 1 and (shape.moe is not None or shape.delta is not None):
            yield f"{name}: numerics: bitwise supports tensor parallelism of dense models only, got {tp}; set 1, or numerics: default"
    if recipe.device == "cuda":
        yield from _check_widths(shape, max(splits.values()))
    if recipe.device == "cpu" and (context := rollout.context or shape.max_positions) > MAX_CONTEXT:
        yield f"rollout.context: {_NEEDS} at most {MAX_CONTEXT} tokens, got {context}; lower it, or set numerics: default"


def _check_bitwise_model(shape: ModelShape) -> Complaints:
    if shape.family not in FAMILIES:
        yield f"model: {_NEEDS} a model of the family {', '.join(FAMILIES)}, got {shape.family}; use one, or set numerics: default"
    rope = "default" if shape.rope_scaling is None else shape.rope_scaling["rope_type"]
    if rope not in ROPES:
        yield f"model: {_NEEDS} rotary embeddings of the type {', '.join(ROPES)}, got {rope}; use such a model, or set numerics: default"
    if shape.dflash is not None:
        yield f"model: {_NEEDS} a drafter with causal attention, got DFlash; use EAGLE-3 or no drafter, or set numerics: default"


def _check_gpu_splits(splits: dict[str, int]) -> Complaints:
    """Report numbers of tensor-parallel ranks for which GPUs round sums differently."""
    engine = min(splits["rollout.tp"], MAX_GPU_TP)
    for name, tp in splits.items():
        if tp > MAX_GPU_TP:
            yield f"{name}: on a GPU, {_NEEDS} at most {MAX_GPU_TP} ranks, got {tp}; set {MAX_GPU_TP}, or numerics: default"
        elif tp != engine:
            yield f"{name}: on a GPU, {_NEEDS} as many ranks as rollout.tp: {engine}, got {tp}; set {engine}, or numerics: default"


def _check_widths(shape: ModelShape, tp: int) -> Complaints:
    """Report sizes that the tiles of `mtpctl.kernels.invariant` do not fit."""
    if shape.kv_heads % tp:
        yield (
            f"model: on a GPU, {_NEEDS} a number of ranks that divides the key-value heads, got {shape.kv_heads} for {tp} ranks; use such "
            "a model, or set numerics: default"
        )
    widths = {"hidden size": shape.hidden, "MLP width": shape.ffn // tp, "attention heads' width": shape.heads * shape.head_dim // tp}
    if shape.delta is not None:
        widths["linear attention's width"] = shape.delta.value_heads * shape.delta.value_dim
    if shape.moe is not None:
        widths["experts' width"] = shape.moe.ffn
    if shape.eagle3 is not None:
        widths["drafter's MLP width"] = shape.eagle3.ffn // tp
    per_rank = "" if tp == 1 else " per rank"
    for name, width in widths.items():
        if width % WIDTH_MULTIPLE:
            yield (
                f"model: on a GPU, {_NEEDS} multiples of {WIDTH_MULTIPLE}{per_rank}, got {name} {width}; use such a model, or set "
                "numerics: default"
            )
    if (per_group := shape.heads // shape.kv_heads) > MAX_QUERY_HEADS:
        yield (
            f"model: on a GPU, {_NEEDS} at most {MAX_QUERY_HEADS} attention heads per key-value head, got {per_group}; use such a model, "
            "or set numerics: default"
        )


def _check_bitwise_rollout(recipe: Recipe) -> Complaints:
    rollout = recipe.rollout
    if not rollout.traits.bitwise:
        yield f"rollout.engine: {_NEEDS} vllm; set it, or numerics: default"
        return
    if rollout.dtype not in ("auto", precision := PRECISIONS[recipe.device]):
        yield f"rollout.dtype: {_NEEDS} {precision} on {DEVICE_NAMES[recipe.device]}; set auto, or numerics: default"
    if rollout.temperature != 1:
        yield f"rollout.temperature: {_NEEDS} 1, got {rollout.temperature:g}; set 1, or numerics: default"
    if rollout.top_p < 1 or rollout.top_k:
        name = "top_p" if rollout.top_p < 1 else "top_k"
        yield f"rollout.{name}: {_NEEDS} the whole distribution; leave {name} out, or set numerics: default"
    for name in sorted(rollout.engine_args.keys() - set(BITWISE_ENGINE_ARGS)):
        yield f"rollout.engine_args: numerics: bitwise requires vLLM's default for {name}; remove it, or set numerics: default"


_FIELD = "rollout.quantization: fp8"
FP8_ENGINE_ARGS = ("hf_overrides", "load_format", "model_loader_extra_config", "quantization")
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
    return select_fp8_names(shape, mtp=drafter) if rollout.quantization == "fp8" else frozenset()


def sends_unquantized_too(recipe: Recipe) -> bool:
    """Whether each version is sent twice: quantized to the engines, and unquantized to the log-prob server."""
    return recipe.rollout.quantization == "fp8" and recipe.logprob.standalone


def check_fp8_rollout(recipe: Recipe, shape: ModelShape | None, config: Mapping[str, object]) -> Complaints:
    """Report settings that FP8 weights do not support, and models or ranks whose matrices do not fit its blocks."""
    rollout = recipe.rollout
    if rollout.quantization == "none":
        if rollout.speculation.quantization == "fp8":
            yield "rollout.speculation.quantization: fp8 needs rollout.quantization: fp8; set both, or leave it out"
        return
    if not rollout.traits.fp8_syncs:
        yield f"{_FIELD} works only with vLLM; set rollout.engine: vllm, or rollout.quantization: none"
        return
    if recipe.numerics == "bitwise":
        yield f"{_FIELD} rounds weights, which numerics: bitwise excludes; set numerics: default, or rollout.quantization: none"
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
    for name in sorted(set(FP8_ENGINE_ARGS) & rollout.engine_args.keys()):
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
    elif (cut_matrix := find_split_block(shape, names, recipe.rollout.tp)) is not None:
        yield f"rollout.tp: {recipe.rollout.tp} ranks cut the FP8 blocks of {cut_matrix}; lower it, or set rollout.quantization: none"
    folder = model_folder(recipe.model)
    if folder is not None and (stored_names := tensor_names(folder)):
        # The run adds the MTP layers of `model.drafter` to a copy of the folder.
        matrices = names if recipe.model.drafter is None else frozenset(name for name in names if section_of(name, shape) == "target")
        if (reason := missing_matrix(folder, stored_names, matrices)) is not None:
            yield reason


def missing_matrix(folder: Path, stored_names: Set[str], names: Set[str]) -> str | None:
    """The error if `folder` stores the tensors `stored_names`, but not all of `names`, the matrices to quantize; otherwise None."""
    if not (missing := sorted(names - stored_names)):
        return None
    if ".experts." not in missing[0]:
        return f"{_FIELD} needs the tensor {missing[0]}, which {folder} lacks; set rollout.quantization: none"
    # convert-hf unpacks experts only when it writes an FP8 folder. Converting that folder back to bf16 keeps one tensor per expert.
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
