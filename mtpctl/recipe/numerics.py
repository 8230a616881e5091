"""The key `numerics`: whether the engine's log-probs equal the trainer's to the last bit, and what that does not support yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.section import Complaints

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

Numerics = Literal["default", "bitwise"]

MAX_CONTEXT = 8192
"""Maximum number of keys of a query with exact sums (`mtpctl.kernels.exact`)."""
BLOCK_BYTES = 1 << 22
"""Limit of a float64 temporary of an operation with exact sums. One row may exceed it. An operation has up to eight temporaries.

Temporaries of 64 MiB take twice to four times as long on an AMD EPYC.
"""
PRECISIONS = {"cpu": "fp32", "cuda": "bf16"}
"""The precision of each device's bitwise operations."""
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
FAMILIES = ("llama", "mimo", "qwen2", "qwen3", "qwen3-moe", "qwen3.5")
ROPES = ("default", "llama3")
CAPABILITY = 9, 0
"""The compute capability of the GPUs whose shared memory and instructions the tiles of `mtpctl.kernels.invariant` need."""
GPU_DTYPES = "bfloat16", "float16"
MAX_GPU_TP = 2
"""The sum of two ranks' half-precision products has the same bits with any all-reduce; that of more ranks depends on the order."""
WIDTH_MULTIPLE = 8
"""Elements in 16 bytes: rows of matrices must begin at multiples of these."""
MAX_QUERY_HEADS = 64
"""Query heads of a key-value head, which share a tile of attention (`QUERY_ROWS` of `mtpctl.kernels.invariant`)."""
ENGINE_ARGS = (
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
    """Check the GPU of a bitwise engine or trainer, in its process.

    Args:
        name: of the GPU.
        capability: its compute capability; None if the driver does not report it.
        dtype: of the weights, as in torch.

    Raises:
        UserError: if the kernels do not support the GPU or the dtype.
    """
    if capability != CAPABILITY:
        known = "unknown" if capability is None else "{}.{}".format(*capability)
        raise UserError(
            f"numerics: bitwise needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (Hopper), got {name} ({known}); use "
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
    rollout, train, needs = recipe.rollout, recipe.train, "numerics: bitwise needs"
    precision = PRECISIONS[recipe.device]
    if train.precision != precision:
        yield f"train.precision: {needs} {precision} on {DEVICES[recipe.device]}; set {precision}, or numerics: default"
    if train.lora is not None:
        yield f"train.lora: {needs} full weights; remove the section, or set numerics: default"
    if recipe.kernels.linear_logprob != "auto":
        yield f"kernels.linear_logprob: {needs} its own kernel; set auto, or numerics: default"
    parallels = {"train.parallel": train.parallel} | ({"logprob.parallel": recipe.logprob.parallel} if recipe.logprob.standalone else {})
    for name, parallel in parallels.items():
        for axis, kind in (("cp", "context"), ("ep", "expert")):
            if (ranks := getattr(parallel, axis)) > 1:
                yield f"{name}.{axis}: numerics: bitwise does not support {kind} parallelism, got {ranks}; set 1, or numerics: default"
    yield from _rollout(recipe, needs)
    splits = {"rollout.tp": rollout.tp} | {f"{name}.tp": parallel.tp for name, parallel in parallels.items()}
    if recipe.device == "cuda":
        yield from _gpu_splits(splits, needs)
    if shape is None:
        return
    yield from _model(shape, needs)
    for name, tp in splits.items():
        if tp > 1 and (shape.moe is not None or shape.delta is not None):
            yield f"{name}: numerics: bitwise supports tensor parallelism of dense models only, got {tp}; set 1, or numerics: default"
    if recipe.device == "cuda":
        yield from _widths(shape, max(splits.values()), needs)
    if recipe.device == "cpu" and (context := rollout.context or shape.max_positions) > MAX_CONTEXT:
        yield f"rollout.context: {needs} at most {MAX_CONTEXT} tokens, got {context}; lower it, or set numerics: default"


def _model(shape: ModelShape, needs: str) -> Complaints:
    if shape.family not in FAMILIES:
        yield f"model: {needs} a model of the family {', '.join(FAMILIES)}, got {shape.family}; use one, or set numerics: default"
    rope = "default" if shape.rope_scaling is None else shape.rope_scaling["rope_type"]
    if rope not in ROPES:
        yield f"model: {needs} rotary embeddings of the type {', '.join(ROPES)}, got {rope}; use such a model, or set numerics: default"
    if shape.dflash is not None:
        yield f"model: {needs} a drafter with causal attention, got DFlash; use EAGLE-3 or no drafter, or set numerics: default"


def _gpu_splits(splits: dict[str, int], needs: str) -> Complaints:
    """Report numbers of tensor-parallel ranks for which GPUs round sums differently."""
    engine = min(splits["rollout.tp"], MAX_GPU_TP)
    for name, tp in splits.items():
        if tp > MAX_GPU_TP:
            yield f"{name}: on a GPU, {needs} at most {MAX_GPU_TP} ranks, got {tp}; set {MAX_GPU_TP}, or numerics: default"
        elif tp != engine:
            yield f"{name}: on a GPU, {needs} as many ranks as rollout.tp: {engine}, got {tp}; set {engine}, or numerics: default"


def _widths(shape: ModelShape, tp: int, needs: str) -> Complaints:
    """Report sizes that the tiles of `mtpctl.kernels.invariant` do not fit."""
    if shape.kv_heads % tp:
        yield (
            f"model: on a GPU, {needs} a number of ranks that divides the key-value heads, got {shape.kv_heads} for {tp} ranks; use such a "
            "model, or set numerics: default"
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
                f"model: on a GPU, {needs} multiples of {WIDTH_MULTIPLE}{per_rank}, got {name} {width}; use such a model, or set "
                "numerics: default"
            )
    if (per_group := shape.heads // shape.kv_heads) > MAX_QUERY_HEADS:
        yield (
            f"model: on a GPU, {needs} at most {MAX_QUERY_HEADS} attention heads per key-value head, got {per_group}; use such a model, or "
            "set numerics: default"
        )


def _rollout(recipe: Recipe, needs: str) -> Complaints:
    rollout = recipe.rollout
    if rollout.engine != "vllm":
        yield f"rollout.engine: {needs} vllm; set it, or numerics: default"
        return
    if rollout.dtype not in ("auto", precision := PRECISIONS[recipe.device]):
        yield f"rollout.dtype: {needs} {precision} on {DEVICES[recipe.device]}; set auto, or numerics: default"
    if rollout.temperature != 1:
        yield f"rollout.temperature: {needs} 1, got {rollout.temperature:g}; set 1, or numerics: default"
    if rollout.top_p < 1 or rollout.top_k:
        name = "top_p" if rollout.top_p < 1 else "top_k"
        yield f"rollout.{name}: {needs} the whole distribution; leave {name} out, or set numerics: default"
    for name in sorted(rollout.engine_args.keys() - set(ENGINE_ARGS)):
        yield f"rollout.engine_args: numerics: bitwise requires vLLM's default for {name}; remove it, or set numerics: default"
