"""Matrices for which the Triton kernel and PyTorch must quantize to the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.kernels.block_fp8 import MAX_MATRICES, quantize_torch, quantize_triton


def _all_halfs() -> Tensor:
    """All finite fp16 numbers of up to 448 in blocks with scale 1: ties, and numbers that are subnormal in e4m3."""
    halfs = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halfs = halfs[halfs.abs() <= 448].sort().values
    blocks = halfs[: len(halfs) // 127 * 127].view(-1, 127)
    return torch.cat([blocks, torch.full((len(blocks), 1), 448.0, dtype=torch.float16)], 1)


def _near_limits() -> Tensor:
    """Blocks whose largest number is 464 · 2^k, or one of its neighbors, for all scales."""
    limits = 464 * torch.exp2(torch.arange(-30.0, 120.0, 7.0))
    largest = torch.stack([limits, limits.nextafter(torch.tensor(0.0)), limits.nextafter(torch.tensor(torch.inf))], 1).flatten()
    largest = torch.cat([largest, torch.tensor([0.0, 1e-45, 1e-38, 3.4e38])])
    blocks = torch.randn(128, len(largest), 128, generator=torch.Generator().manual_seed(1)).clamp(-4, 4) / 4 * largest[:, None]
    blocks[5, :, 9] = -largest
    return blocks.flatten(1)


def assert_same_bits(device: str) -> None:
    random = torch.randn(300, 205, generator=torch.Generator().manual_seed(2))
    weights = [_all_halfs(), _near_limits(), random, random.bfloat16(), random.double(), random[:, 3:140]]
    weights += [random.t(), random[:1], random[:, :1].contiguous(), random[:0], random[:, :0]]
    # One launch for each dtype and alignment, and another one for the matrices beyond the limit.
    weights = [weight.to(device) for weight in weights] + [random[:129, :128].to(device)] * MAX_MATRICES
    for weight, (values, scales) in zip(weights, quantize_triton(weights), strict=True):
        expected_values, expected_scales = quantize_torch(weight)
        assert values.dtype == expected_values.dtype and values.shape == expected_values.shape
        assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
        assert torch.equal(scales, expected_scales)


def assert_marks_blocks_that_are_not_finite(device: str) -> None:
    """inf and NaN with either sign, the smallest and the largest NaN, next to larger and smaller numbers."""
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, -1])
    weight = torch.full((128, 128 * (len(bits) + 1)), -3e38)
    weight[77, 100::128][: len(bits)] = bits.to(torch.int32).view(torch.float32)
    scales = quantize_triton([weight.to(device)])[0][1].cpu()
    assert scales.isfinite().tolist() == [[False] * len(bits) + [True]]
