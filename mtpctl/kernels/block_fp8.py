"""Block-wise FP8 weights in the format of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3).

Values are float8_e4m3fn. Each block of 128 x 128 values has one fp32 scale, by which values are multiplied to dequantize them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.families.quantization import FP8_BLOCK, SCALE_SUFFIX, scale_shape

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
_ROUNDED_TO_MAX = 464.0
"""Largest value that is rounded to `FP8_MAX`: the midpoint between it and the next value of the format without a maximum."""
_MIN_SCALE = 2.0**-22
"""Smallest scale, also of blocks of zeros: vLLM's quantizer for DeepGEMM takes the maximum of a block as at least 1e-4."""
_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Elements that are quantized at a time, which bounds the fp32 copies."""


def quantize(weight: Tensor, name: str, checks: FiniteChecks | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a matrix.

    A block's scale is the smallest power of two for which its rounded values are in range, at least 2⁻²². vLLM quantizes weights again when
    it loads them for DeepGEMM (`per_block_cast_to_fp8`), with a scale from the largest rounded value. With power-of-two scales, this
    changes neither values nor scales, so a live engine that receives the weights equals a new engine. Blocks at the right and bottom edge
    may be smaller. Blocks
    are independent: rows that are a multiple of 128 can be quantized separately with the same result.

    Args:
        weight: [rows, columns], of any floating-point dtype, on any device.
        name: tensor name for error messages.
        checks: records whether the values are finite, for a later check; by default the check is immediate, which waits for the GPU.

    Returns:
        Values [rows, columns] in float8_e4m3fn, and fp32 scales [⌈rows / 128⌉, ⌈columns / 128⌉].

    Raises:
        UserError: if the matrix contains infinities or NaN, without `checks`.
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scale_shape(rows, columns), dtype=torch.float32, device=weight.device)
    step = FP8_BLOCK * max(1, _CHUNK_ELEMENTS.get(weight.device.type, _CHUNK_ELEMENTS["cpu"]) // (FP8_BLOCK * max(columns, 1)))
    for start in range(0, rows, step):
        chunk = weight[start : start + step].float()
        height = len(chunk)
        blocks = pad(chunk, (0, -columns % FP8_BLOCK, 0, -height % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
        max_abs = blocks.abs().amax((1, 3))
        fraction, exponent = torch.frexp((max_abs / _ROUNDED_TO_MAX).clamp_min(_MIN_SCALE))
        power = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())
        scale = torch.where(max_abs.isfinite(), power, max_abs)
        scaled = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
        values[start : start + height] = scaled.flatten(2, 3).flatten(0, 1)[:height, :columns].to(torch.float8_e4m3fn)
        scales[start // FP8_BLOCK : start // FP8_BLOCK + len(scale)] = scale
    if checks is not None:
        checks.add(name, scales)
    elif not bool(scales.isfinite().all()):
        raise UserError(f"{name}: contains infinities or NaN, which cannot be quantized; use another checkpoint")
    return values, scales


class FiniteChecks:
    """Records for quantized matrices whether they are finite. Checking many at once waits for the GPU once."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._flags: list[Tensor] = []

    def add(self, name: str, scales: Tensor) -> None:
        """Record a matrix by its scales, which are infinite or NaN if one of its values is."""
        self._names.append(name)
        self._flags.append(scales.isfinite().all())

    def clear(self) -> None:
        """Forget the recorded matrices."""
        self._names, self._flags = [], []

    def check(self) -> None:
        """Raise RuntimeFailure for the first matrix that is not finite, of those recorded since the last call."""
        names, flags = self._names, self._flags
        self.clear()
        if not flags or bool((finite := torch.stack(flags)).all()):
            return
        raise RuntimeFailure(
            f"{names[int(finite.int().argmin())]}: contains infinities or NaN, which cannot be sent in FP8; go back to an earlier "
            "checkpoint, and lower the learning rate if training has diverged"
        )


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)) -> Tensor:
    """Multiply a matrix of FP8 values by its scales, one for each block or a single one. Computed in fp32, returned in `dtype`."""
    if scales.numel() == 1:
        return (values.float() * scales.float()).to(dtype)
    rows, columns = block
    column_scales = scales.float().repeat_interleave(columns, 1)[:, : values.shape[1]]
    result = torch.empty(values.shape, dtype=dtype, device=values.device)
    # One row of blocks at a time, because the whole matrix would need two fp32 copies, each four times its size.
    for target, block_row, block_scales in zip(result.split(rows), values.split(rows), column_scales, strict=True):
        target.copy_(block_row.float() * block_scales)
    return result


def quantized_tensors(name: str, weight: Tensor, checks: FiniteChecks | None = None) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a quantized matrix: its values under its own name, then its scales. Raises UserError, see `quantize`."""
    values, scales = quantize(weight, name, checks)
    yield name, values
    yield name + SCALE_SUFFIX, scales
