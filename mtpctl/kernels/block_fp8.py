"""Block-wise FP8 weights in the format of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3).

Values are float8_e4m3fn. Each block of 128 x 128 values has one fp32 scale. To dequantize values, multiply them by it. On CUDA one
Triton kernel quantizes many matrices, bit-identical to `quantize_torch`, whose operations read and write a matrix more than ten times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import no_type_check

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.families.quantization import FP8_BLOCK, SCALE_SUFFIX, scale_shape
from mtpctl.kernels.triton_support import launcher, on_device_of, tl, triton

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
_ROUNDED_TO_MAX = 464.0
"""Largest value that is rounded to `FP8_MAX`: halfway between 448 and 480, the value that would follow it."""
_MIN_SCALE = 2.0**-22
"""Scale of blocks of zeros and of tiny values. vLLM's quantizer for DeepGEMM has a lower limit
too: it treats a block's largest magnitude as at least 1e-4."""
ALIGNED = 16
"""The kernel loads and stores wide words if addresses, numbers of columns and strides are multiples of this."""
MAX_MATRICES = 128
"""Largest number of matrices in a launch, a power of two."""
_CHUNK_ELEMENTS = 1 << 22
"""Elements that PyTorch quantizes at a time, which bounds the fp32 copies."""


def quantize(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Quantize a matrix, and wait for the result to check it.

    A block's scale is the smallest power of two for which its rounded values are in range, at least 2⁻²². vLLM quantizes weights again when
    it loads them for DeepGEMM (`per_block_cast_to_fp8`), with a scale from the largest rounded value. With power-of-two scales, this
    changes neither values nor scales, so a live engine that receives the weights equals a new engine. Blocks at the right and bottom edge
    may be smaller. Blocks are independent: ranges of rows that begin at multiples of 128 can be quantized separately with the same result.

    Args:
        weight: [rows, columns], of any floating-point dtype, on any device.
        name: tensor name for error messages.

    Returns:
        Values [rows, columns] in float8_e4m3fn, and fp32 scales [⌈rows / 128⌉, ⌈columns / 128⌉].

    Raises:
        UserError: if the matrix contains infinities or NaN.
    """
    ((values, scales),) = quantize_all([weight])
    if not bool(scales.isfinite().all()):
        raise UserError(f"{name}: contains infinities or NaN, which cannot be quantized; use another checkpoint")
    return values, scales


@torch.no_grad()
def quantize_all(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Quantize several matrices on one device as `quantize` does, but with few launches, and without checking that they are finite.

    On a GPU, the results share memory, which is freed with the last of them.
    """
    return quantize_triton(weights) if weights and weights[0].is_cuda else [quantize_torch(weight) for weight in weights]


def quantize_torch(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and scales. The scale of a block with infinities or NaN is infinite or NaN."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scale_shape(rows, columns), dtype=torch.float32, device=weight.device)
    step = FP8_BLOCK * max(1, _CHUNK_ELEMENTS // (FP8_BLOCK * max(columns, 1)))
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
    return values, scales


@triton.jit(do_not_specialize=["num_matrices"])
@no_type_check
def quantize_kernel(
    weight_ptr,  # has the dtype of all matrices, and is not read
    # int64 [num_matrices, 7]: blocks of all previous matrices; addresses of values (uint8, the bits of float8_e4m3fn), of scales (fp32, one
    # per block) and of the weight; rows, columns, and stride of the weight's rows.
    matrices_ptr,
    num_matrices,
    MAX_MATRICES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,  # whether the addresses of weights, their numbers of columns and their strides are multiples of 16
    BLOCK: tl.constexpr,
):
    """Quantize one block of one matrix per program. Computes with the bits of fp32 numbers: Triton converts to e4m3 only on newer GPUs.

    The number 2^k has the bits (k + 127) << 23. Positive numbers have the same order as their bits.
    """
    matrix = tl.arange(0, MAX_MATRICES)
    begins_later = tl.load(matrices_ptr + matrix * 7, mask=matrix < num_matrices, other=0x7FFFFFFF) > tl.program_id(0)
    row_ptr = matrices_ptr + (MAX_MATRICES - 1 - tl.sum(begins_later.to(tl.int32))) * 7
    index = tl.program_id(0) - tl.load(row_ptr).to(tl.int32)
    fp8_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(tl.uint8)), 16)
    scales_ptr = tl.load(row_ptr + 2).to(tl.pointer_type(tl.float32))
    source_ptr = tl.load(row_ptr + 3).to(weight_ptr.dtype)
    rows = tl.load(row_ptr + 4)
    columns = tl.load(row_ptr + 5)
    stride = tl.load(row_ptr + 6)
    if IS_ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        columns = tl.multiple_of(columns, 16)
        stride = tl.multiple_of(stride, 16)
    blocks = tl.cdiv(columns, BLOCK).to(tl.int32)
    row = (index // blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = index % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    weight = tl.load(source_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = weight & 0x7FFFFFFF
    max_abs = tl.max(magnitude)  # as bits, NaN > infinity > finite numbers
    # The smallest power of two that is at least max_abs / 464. Since 464 = 1.8125 · 2^8, the sum carries if the fraction is above 0.8125.
    exponent = tl.maximum(((max_abs + (0x7FFFFF - 0x680000)) >> 23) - 8, 127 - 22)
    scale = tl.where(max_abs < 0x7F800000, exponent << 23, max_abs)
    tl.store(scales_ptr + index, scale.to(tl.float32, bitcast=True))
    inverse = ((2 * 127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude.to(tl.float32, bitcast=True) * inverse  # at most 464, which is rounded to 448
    bits = scaled.to(tl.int32, bitcast=True)
    # Round 23 bits of fraction to 3, ties to even, and change the exponent's bias from 127 to 7. Below 2^-6, e4m3 numbers are multiples of
    # 2^-9. So are fp32 numbers from 2^14 to 2^15, so adding 2^14 rounds to such a multiple.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (scaled + 16384.0).to(tl.int32, bitcast=True) - ((127 + 14) << 23)
    value = tl.where(bits < ((127 - 6) << 23), subnormal, normal) | ((weight >> 24) & 0x80)
    tl.store(fp8_ptr + row * columns + column, value.to(tl.uint8), mask=inside)


def quantize_triton(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`quantize_torch` of matrices on one GPU, with one launch for many of the same dtype.

    With one launch for each matrix, the host would need longer than the GPU. Values of blocks that are not finite may differ.
    """
    weights = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in weights]
    shapes = [scale_shape(*weight.shape) for weight in weights]
    values = _allocate([weight.numel() for weight in weights], torch.float8_e4m3fn, weights[0].device)
    scales = _allocate([rows * columns for rows, columns in shapes], torch.float32, weights[0].device)
    groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    for matrix in zip(values, scales, weights, strict=True):
        weight = matrix[2]
        if weight.numel():
            is_aligned = not any(number % ALIGNED for number in (weight.data_ptr(), weight.shape[1], weight.stride(0)))
            groups[weight.dtype, is_aligned].append(matrix)
    for (_, is_aligned), matrices in groups.items():
        for start in range(0, len(matrices), MAX_MATRICES):
            _launch(matrices[start : start + MAX_MATRICES], is_aligned)
    return [(fp8.view(weight.shape), scale.view(shape)) for weight, fp8, scale, shape in zip(weights, values, scales, shapes, strict=True)]


def _allocate(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Vectors with these numbers of elements in one allocation, each starting at a multiple of `ALIGNED` elements."""
    padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    parts = torch.empty(sum(padded), dtype=dtype, device=device).split(padded)
    return [part if len(part) == size else part[:size] for part, size in zip(parts, sizes, strict=True)]


def _launch(matrices: Sequence[tuple[Tensor, Tensor, Tensor]], is_aligned: bool) -> None:
    """Compute values and scales of weights of one dtype. `matrices`: values, scales and weight of each."""
    *first_blocks, num_blocks = accumulate((len(scales) for _, scales, _ in matrices), initial=0)
    rows = [
        (first_block, values.data_ptr(), scales.data_ptr(), weight.data_ptr(), *weight.shape, weight.stride(0))
        for first_block, (values, scales, weight) in zip(first_blocks, matrices, strict=True)
    ]
    weight = matrices[0][2]
    table = torch.tensor(rows, pin_memory=weight.is_cuda).to(weight.device, non_blocking=True)
    with on_device_of(weight):
        launcher(quantize_kernel, (num_blocks,))(
            weight, table, len(rows), MAX_MATRICES=MAX_MATRICES, IS_ALIGNED=is_aligned, BLOCK=FP8_BLOCK, num_warps=8
        )


class FiniteChecks:
    """Records quantized matrices, and later checks that all are finite, with one host synchronization."""

    def __init__(self) -> None:
        self._scales: list[tuple[str, Tensor]] = []

    def add(self, name: str, scales: Tensor) -> None:
        """Record a matrix by its scales, which are infinite or NaN if one of its values is."""
        self._scales.append((name, scales))

    def clear(self) -> None:
        """Forget the recorded matrices."""
        self._scales = []

    def check(self) -> None:
        """Raise RuntimeFailure for the first matrix that is not finite, of those recorded since the last call."""
        recorded = self._scales
        self.clear()
        if not recorded or bool(torch.cat([scales.view(-1) for _, scales in recorded]).isfinite().all()):
            return
        name = next(name for name, scales in recorded if not bool(scales.isfinite().all()))
        raise RuntimeFailure(
            f"{name}: contains infinities or NaN, which cannot be sent in FP8; go back to an earlier "
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


def quantized_tensors(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a quantized matrix: its values under its own name, then its scales. Raises UserError, see `quantize`."""
    values, scales = quantize(weight, name)
    yield name, values
    yield name + SCALE_SUFFIX, scales
