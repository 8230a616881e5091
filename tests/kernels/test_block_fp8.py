"""Quantization to blocks of FP8: scales, edges, and inputs that it rejects."""

from __future__ import annotations

import math

import pytest
import torch

from mtpctl.errors import UserError
from mtpctl.kernels.block_fp8 import BLOCK, FP8_MAX, dequantize, quantize, scale_shape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (127, 129), (300, 70), (2048 + 130, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_of_a_block_is_the_smallest_power_of_two_that_fits(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    values, scales = quantize(weight, "w")
    assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape
    assert scales.dtype == torch.float32 and tuple(scales.shape) == scale_shape(*shape)
    result = dequantize(values, scales, torch.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            expected = weight[block].float()
            largest = expected.abs().max()
            scale = float(scales[row, column])
            assert math.frexp(scale)[0] == 0.5, "a power of two"
            assert scale / 2 < largest / FP8_MAX <= scale
            quotient = (expected / scales[row, column]).to(torch.float8_e4m3fn)
            assert torch.equal(values[block].float(), quotient.float())
            # Three bits of mantissa; the smallest normal value is 2**-6.
            bound = (expected.abs() / 16).clamp_min(2**-10 * float(scales[row, column]))
            assert bool(((result[block] - expected).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("device", DEVICES)
def test_aligned_pieces_are_quantized_as_in_the_whole(device: str) -> None:
    """Experts and merged projections may be quantized one by one, on any rank."""
    weight = torch.randn(2176, 256, generator=torch.Generator().manual_seed(1)).to(device)
    whole = quantize(weight, "w")
    for start in (0, 128, 1920):
        values, scales = quantize(weight[start : start + 256], "w")
        assert torch.equal(values.view(torch.uint8), whole[0][start : start + 256].view(torch.uint8))
        assert torch.equal(scales, whole[1][start // BLOCK : start // BLOCK + 2])


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 1e-36, 3e38])
def test_extreme_blocks_remain_finite(largest: float) -> None:
    weight = torch.zeros(128, 256)
    weight[3, 5], weight[7, 200] = largest, -largest
    values, scales = quantize(weight, "w")
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())
    result = dequantize(values, scales, torch.float32)
    assert bool(result.isfinite().all())
    if largest == 0:
        assert bool((scales == 1).all()) and not result.any()
    elif largest >= 1e-36:
        assert float((result - weight).abs().max()) <= largest / 16


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [(0, 0), (2100, 40)])
def test_values_that_are_not_finite_are_rejected_by_name(bad: float, position: tuple[int, int]) -> None:
    weight = torch.ones(2200, 150)
    weight[position] = bad
    with pytest.raises(UserError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight: contains infinities or NaN"):
        quantize(weight, "model.layers.0.mlp.up_proj.weight")


def test_quantizing_a_dequantized_matrix_again_changes_nothing() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    values, scales = quantize(weight, "w")
    result = dequantize(values, scales, torch.float32)
    assert torch.equal(dequantize(*quantize(result, "w"), torch.float32), result)
    assert torch.equal(dequantize(values, scales, torch.bfloat16).float(), result), "bf16 represents the values"
