"""The layout and the config of a folder with FP8 weights, in DeepSeek's format as vLLM reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from mtpctl.convert.model_weights import Stored
from mtpctl.errors import UserError
from mtpctl.families.quantization import FP8_BLOCK, SCALE, fp8_config, fp8_names, scale_shape
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import tensor_shapes
from mtpctl.kernels.block_fp8 import quantized_tensors

FP8 = "fp8"
"""Value of `--dtype`."""
_VALUES, _SCALES = "F8_E4M3", "F32"


def names_to_quantize(shape: ModelShape, written: Iterable[str]) -> frozenset[str]:
    """The matrices to quantize among those that are `written`. Raises UserError if there are none."""
    names = fp8_names(shape) & frozenset(written)
    if not names:
        raise UserError(
            f"--dtype fp8: no matrix of this {shape.family} model fits the engines' blocks of {FP8_BLOCK} x {FP8_BLOCK} "
            f"(hidden size {shape.hidden}, MLP {shape.ffn}); write it in another dtype"
        )
    return names


def fp8_layout(layout: list[Stored], names: frozenset[str], shape: ModelShape) -> list[Stored]:
    """The layout with the named matrices in FP8, each followed by its scales. Packed experts are stored one by one, as published."""
    sizes = tensor_shapes(shape)
    result = []
    for stored in layout:
        if not names.issuperset(stored.pieces) or not stored.pieces:
            result.append(stored)
            continue
        for piece in stored.pieces:
            name = stored.name
            if len(stored.pieces) > 1 or ".experts." in piece:
                name = stored.name.partition(".experts.")[0] + ".experts." + piece.partition(".experts.")[2]
            rows, columns = sizes[piece]
            result.append(Stored(name, _VALUES, (rows, columns), (piece,)))
            result.append(Stored(name + SCALE, _SCALES, scale_shape(rows, columns), (piece + SCALE,)))
    return result


def written_tensors(tensors: Mapping[str, Tensor], names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write: values and scales of those to quantize, others unchanged."""
    for name, tensor in tensors.items():
        if name in names:
            yield from quantized_tensors(name, tensor)
        else:
            yield name, tensor


def quantization_config(shape: ModelShape, names: frozenset[str], layout: list[Stored]) -> dict[str, object]:
    """The `quantization_config` of config.json. Linear layers outside the language model (a vision tower) are not quantized."""
    linear = (each for each in layout if not each.pieces and each.name.endswith(".weight") and len(each.shape) == 2)
    return fp8_config(shape, names, [each.name.removesuffix(".weight") for each in linear])
