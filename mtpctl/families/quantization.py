"""Selects the matrices that are stored in FP8 when a folder is quantized: those that engines support in FP8.

An engine multiplies some matrices as one, such as query, key and value projections. It rejects blocks that span two of them, and
activations whose width is not a multiple of a block (vLLM: `validate_fp8_block_shape`, `per_token_group_quant_fp8`). Such matrices remain
unquantized, together with those that are merged with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from mtpctl.families.reading import DRAFTER
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes

FP8_BLOCK = 128
"""Rows and columns that share a scale."""
SCALE_SUFFIX = "_scale_inv"
"""Suffix of the name of a matrix's scales."""


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)


_MERGED_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Groups of projections that engines merge into one matrix, in the order of their rows."""
_MERGED_GROUP_OF = {part: group for group in _MERGED_PROJECTIONS for part in group}
_EXPERT_MODULE = re.compile(r"(?P<experts>.*\.experts)\.\d+\.[a-z_]+")
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Projections that are replicated on all tensor-parallel ranks."""
_SPLIT_COLUMNS = ("o_proj", "down_proj", "out_proj")
"""Projections whose weight is split by columns, the input dimension, under tensor parallelism. Others are split by rows."""
_UNQUANTIZED = ("gate", "shared_expert_gate", "in_proj_ba", "in_proj_b", "in_proj_a", "in_proj")
"""Routers, gates, and projections that have one row per head: all rows of in_proj_ba, in_proj_b and in_proj_a in linear attention, and some
rows of Mamba-2's in_proj."""


@cache
def select_fp8_names(shape: ModelShape, *, mtp: bool = True) -> frozenset[str]:
    """Names of the matrices to quantize: projections of attention, MLPs and experts.

    Embeddings, heads, routers, norms, biases, convolutions, the projection of MTP layers' two inputs, and a separate drafter (subfolder
    `drafter/`) are not quantized. mtp: also quantize the MTP layers.
    """
    shapes = _matrix_shapes(shape)
    accepted = {module for module, size in shapes.items() if _is_quantizable(module, size, shape)}
    for module in shapes:
        group = _merged_group(module, shapes)
        rows = [shapes[member][0] for member in group]
        if not accepted.issuperset(group) or any(count % FP8_BLOCK for count in rows[:-1]):
            accepted.difference_update(group)
    if shape.moe is not None and (shape.moe.ffn % FP8_BLOCK or shape.hidden % FP8_BLOCK):
        accepted = {module for module in accepted if not _EXPERT_MODULE.fullmatch(module)}
    names = frozenset(f"{module}.weight" for module in accepted)
    return names if mtp else frozenset(name for name in names if section_of(name, shape) == "target")


def fp8_config(shape: ModelShape, quantized: Iterable[str], other_modules: Iterable[str] = ()) -> dict[str, object]:
    """The `quantization_config` of a model with these matrices in FP8.

    other_modules: modules outside the language model, such as a vision tower. They are not quantized.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": [*list_unquantized_modules(shape, quantized=quantized), *other_modules],
    }


def find_split_block(shape: ModelShape, quantized: Iterable[str], tp: int) -> str | None:
    """Describe a matrix whose FP8 blocks tensor parallelism over `tp` ranks would split; None if there is none."""
    if tp == 1:
        return None
    shapes = tensor_shapes(shape)
    for name in sorted(quantized):
        projection = name.split(".")[-2]
        if projection in _REPLICATED:
            continue
        dim = 1 if projection in _SPLIT_COLUMNS else 0
        for length in _split_lengths(shape, projection, shapes[name][dim]):
            # If there are fewer key and value heads than ranks, several ranks have the same head.
            max_shards = {"k_proj": length // shape.head_dim, "v_proj": length // shape.value_dim}.get(projection, tp)
            rank_length = length // min(tp, max_shards)
            if rank_length % FP8_BLOCK:
                return f"{name} ({rank_length} of {length} {'columns' if dim else 'rows'} per rank)"
    return None


def _split_lengths(shape: ModelShape, projection: str, length: int) -> list[int]:
    """The lengths that ranks split separately. Queries, keys and values of linear attention are stored as one matrix."""
    delta = shape.delta
    if projection != "in_proj_qkv" or delta is None:
        return [length]
    return [*(delta.key_heads * delta.key_dim,) * 2, delta.value_heads * delta.value_dim]


def list_unquantized_modules(shape: ModelShape, *, quantized: Iterable[str]) -> list[str]:
    """The modules with a matrix that is not quantized, for `modules_to_not_convert`. The experts of a layer are listed as one module.

    vLLM compares these with the full names of its modules, in which MTP layers are numbered after the decoder layers. Modules of MTP layers
    are therefore listed under their name in vLLM as well.
    """
    quantized_modules = {name.removesuffix(".weight") for name in quantized}
    result: dict[str, None] = {}
    for module in _matrix_shapes(shape):
        if module in quantized_modules:
            continue
        expert = _EXPERT_MODULE.fullmatch(module)
        module = expert["experts"] if expert else module
        result[module] = None
        for depth in range(shape.mtp_layers):
            prefix = "" if shape.mtp is None else shape.mtp.name(shape.mtp.layer, depth, shape.layers)
            if prefix.startswith(shape.prefix) and module.startswith(prefix):
                result[f"{shape.prefix}layers.{shape.layers + depth}.{module.removeprefix(prefix)}"] = None
    return list(result)


def _matrix_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shapes of matrices that may be quantized, by module: without embeddings, aliases and the drafter of a subfolder."""
    matrices = {name.removesuffix(".weight"): size for name, size in tensor_shapes(shape).items() if name.endswith(".weight")}
    duplicates = {name.removesuffix(".weight") for name in aliases(shape)} | {shape.embedding_name.removesuffix(".weight")}
    return {
        module: size
        for module, size in matrices.items()
        if len(size) == 2 and module not in duplicates and not module.startswith(f"{DRAFTER}.")
    }


def _merged_group(module: str, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The matrices that are merged with a module's, including itself, in order."""
    prefix, _, projection = module.rpartition(".")
    group = [f"{prefix}.{part}" for part in _MERGED_GROUP_OF.get(projection, ())]
    return [member for member in group if member in shapes] or [module]


def _is_quantizable(module: str, size: tuple[int, ...], shape: ModelShape) -> bool:
    projection = module.rpartition(".")[2]
    if module == "lm_head" or projection in _UNQUANTIZED or size[1] % FP8_BLOCK:
        return False
    if shape.mtp is not None:
        if any(
            module == shape.mtp.name(shape.mtp.projection, depth, shape.layers).removesuffix(".weight") for depth in range(shape.mtp_layers)
        ):
            return False
        layer_prefixes = [shape.mtp.name(shape.mtp.layer, depth, shape.layers) for depth in range(shape.mtp_layers)]
        if any(module == prefix + suffix for prefix in layer_prefixes for suffix in shape.mtp.unquantized):
            return False
    if projection in ("in_proj_qkv", "in_proj_z") and shape.delta is not None:
        return not (shape.delta.key_heads * shape.delta.key_dim % FP8_BLOCK or shape.delta.value_heads * shape.delta.value_dim % FP8_BLOCK)
    return True
