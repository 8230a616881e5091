"""Which type each tensor is written in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch

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
