"""Types of elements: their names in safetensors files, and which type each tensor is written in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of element types."""

CODES = {dtype: code for code, dtype in DTYPES.items()}

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `--dtype` takes."""


def main_dtype(dtypes: Mapping[str, torch.dtype], sizes: Mapping[str, int]) -> torch.dtype:
    """The type of most elements; `sizes` are counts of elements."""
    held: dict[torch.dtype, int] = {}
    for name, dtype in dtypes.items():
        held[dtype] = held.get(dtype, 0) + sizes[name]
    return max(held, key=held.__getitem__)


def cast(
    dtypes: Mapping[str, torch.dtype],
    sizes: Mapping[str, int],
    wanted: torch.dtype | None,
    *,
    like: Mapping[str, torch.dtype] | None = None,
) -> dict[str, torch.dtype]:
    """`dtypes` with floating tensors in the `wanted` type, if there is one.

    Tensors that a folder of narrower weights keeps in fp32 (a router's bias, a decay) stay so; like: its types; default: `dtypes`.
    """
    if wanted is None:
        return dict(dtypes)
    like = like or dtypes
    kept = torch.float32 if main_dtype(like, sizes).itemsize < torch.float32.itemsize else None
    return {name: dtype if not dtype.is_floating_point or (like.get(name) == kept == dtype) else wanted for name, dtype in dtypes.items()}


def common(dtypes: Mapping[str, torch.dtype], names: tuple[str, ...]) -> torch.dtype:
    """The narrowest type that holds the values of all named tensors."""
    return reduce(torch.promote_types, (dtypes[name] for name in names))
