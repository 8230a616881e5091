"""Selects the matrices that are stored in FP8 when a folder is quantized: those that engines read in FP8 and can compute with.

An engine multiplies some matrices as one, such as query, key and value projections. It rejects blocks that span two of them, and
activations whose width is not a multiple of a block (vLLM: `validate_fp8_block_shape`, `per_token_group_quant_fp8`). Such matrices remain
unquantized, together with those that are merged with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mtpctl.families.reading import DRAFTER
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, tensor_shapes

FP8_BLOCK = 128
"""Rows and columns that share a scale."""

_MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Projections that engines merge into one matrix, in its order."""
_GROUPS = {part: group for group in _MERGED for part in group}
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.[a-z_]+")
_UNQUANTIZED = ("gate", "shared_expert_gate", "in_proj_ba", "in_proj_b", "in_proj_a", "in_proj")
"""Routers, gates, the projections of linear attention with one row per head, and the input projection of Mamba-2, which vLLM splits into
five matrices over its ranks: the last has one row per head."""


def fp8_names(shape: ModelShape) -> frozenset[str]:
    """Names of the matrices to quantize: projections of attention, MLPs and experts in decoder and MTP layers.

    Embeddings, heads, routers, norms, biases, convolutions, the projection of MTP layers' two inputs, and drafters in the subfolder
    `drafter/` remain in their dtype.
    """
    sizes = _matrices(shape)
    accepted = {module for module, size in sizes.items() if _quantizable(module, size, shape)}
    for module in sizes:
        group = _partners(module, sizes)
        rows = [sizes[each][0] for each in group]
        if not accepted.issuperset(group) or any(each % FP8_BLOCK for each in rows[:-1]):
            accepted.difference_update(group)
    if shape.moe is not None and (shape.moe.ffn % FP8_BLOCK or shape.hidden % FP8_BLOCK):
        accepted = {module for module in accepted if not _EXPERT.fullmatch(module)}
    return frozenset(f"{module}.weight" for module in accepted)


def unquantized_modules(shape: ModelShape, *, quantized: Iterable[str]) -> list[str]:
    """The modules with a matrix that is not quantized, for `modules_to_not_convert`. Experts of a layer are one module.

    vLLM compares with the whole name of its module. It has no `mtp_layers` or `mtp_block`, and numbers these layers after the decoder's.
    """
    stored = {name.removesuffix(".weight") for name in quantized}
    result: dict[str, None] = {}
    for module in _matrices(shape):
        if module in stored:
            continue
        expert = _EXPERT.fullmatch(module)
        module = expert["experts"] if expert else module
        result[module] = None
        for depth in range(shape.mtp_layers):
            prefix = "" if shape.mtp is None else shape.mtp.name(shape.mtp.layer, depth, shape.layers)
            if prefix.startswith(shape.prefix) and module.startswith(prefix):
                result[f"{shape.prefix}layers.{shape.layers + depth}.{module.removeprefix(prefix)}"] = None
    return list(result)


def _matrices(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shapes of all matrices, by module. Embeddings are excluded."""
    matrices = {name.removesuffix(".weight"): size for name, size in tensor_shapes(shape).items() if name.endswith(".weight")}
    same = {name.removesuffix(".weight") for name in aliases(shape)} | {shape.embedding_name.removesuffix(".weight")}
    return {
        module: size for module, size in matrices.items() if len(size) == 2 and module not in same and not module.startswith(f"{DRAFTER}.")
    }


def _partners(module: str, sizes: dict[str, tuple[int, ...]]) -> list[str]:
    """The matrices that are merged with a module's, including itself, in order."""
    prefix, _, last = module.rpartition(".")
    group = [f"{prefix}.{part}" for part in _GROUPS.get(last, ())]
    return [each for each in group if each in sizes] or [module]


def _quantizable(module: str, size: tuple[int, ...], shape: ModelShape) -> bool:
    last = module.rpartition(".")[2]
    if module == "lm_head" or last in _UNQUANTIZED or size[1] % FP8_BLOCK:
        return False
    if shape.mtp is not None:
        if any(module == shape.mtp.name(shape.mtp.projection, k, shape.layers).removesuffix(".weight") for k in range(shape.mtp_layers)):
            return False
        layers = [shape.mtp.name(shape.mtp.layer, k, shape.layers) for k in range(shape.mtp_layers)]
        if any(module == prefix + each for prefix in layers for each in shape.mtp.unquantized):
            return False
    if last in ("in_proj_qkv", "in_proj_z") and shape.delta is not None:
        return not (shape.delta.key_heads * shape.delta.key_dim % FP8_BLOCK or shape.delta.value_heads * shape.delta.value_dim % FP8_BLOCK)
    return True
