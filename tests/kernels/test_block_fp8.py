"""Quantization to blocks of FP8: scales, edges, and inputs that it rejects."""

from __future__ import annotations

import math

import pytest
import torch

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.families.quantization import FP8_BLOCK, scale_shape
from mtpctl.kernels.block_fp8 import FP8_MAX, FiniteChecks, dequantize, quantize, quantize_all
from tests.fakes.fp8_matrices import assert_marks_blocks_that_are_not_finite, assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (127, 129), (300, 70), (2048 + 130, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_of_a_block_is_the_smallest_power_of_two_that_fits_rounded_values(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    values, scales = quantize(weight, "w")
    assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape
    assert scales.dtype == torch.float32 and tuple(scales.shape) == scale_shape(*shape)
    result = dequantize(values, scales, torch.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(row * FP8_BLOCK, (row + 1) * FP8_BLOCK), slice(column * FP8_BLOCK, (column + 1) * FP8_BLOCK)
            expected = weight[block].float()
            largest = expected.abs().max()
            scale = float(scales[row, column])
            assert math.frexp(scale)[0] == 0.5, "a power of two"
            assert scale / 2 < largest / 464 <= scale, "464 is rounded to 448"
            quotient = (expected / scales[row, column]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            assert torch.equal(values[block].float(), quotient.float())
            # Three bits of mantissa; the smallest normal value is 2**-6.
            bound = (expected.abs() / 16).clamp_min(2**-10 * float(scales[row, column]))
            assert bool(((result[block] - expected).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.gpu
def test_gpu_kernel_computes_the_bits_of_torch() -> None:
    """`interpreted_triton.py` checks the same on a CPU."""
    assert_same_bits("cuda")
    assert_marks_blocks_that_are_not_finite("cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_aligned_pieces_are_quantized_as_in_the_whole(device: str) -> None:
    """Experts and merged projections may be quantized one by one, on any rank."""
    weight = torch.randn(2176, 256, generator=torch.Generator().manual_seed(1)).to(device)
    whole = quantize(weight, "w")
    for start in (0, 128, 1920):
        values, scales = quantize(weight[start : start + 256], "w")
        assert torch.equal(values.view(torch.uint8), whole[0][start : start + 256].view(torch.uint8))
        assert torch.equal(scales, whole[1][start // FP8_BLOCK : start // FP8_BLOCK + 2])


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 1e-36, 3e38])
def test_extreme_blocks_remain_finite(largest: float) -> None:
    weight = torch.zeros(128, 256)
    weight[3, 5], weight[7, 200] = largest, -largest
    values, scales = quantize(weight, "w")
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())
    result = dequantize(values, scales, torch.float32)
    assert bool(result.isfinite().all())
    assert float((result - weight).abs().max()) <= max(largest / 16, 2**-32)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [(0, 0), (2100, 40)])
def test_values_that_are_not_finite_are_rejected_by_name(bad: float, position: tuple[int, int]) -> None:
    weight = torch.ones(2200, 150)
    weight[position] = bad
    with pytest.raises(UserError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight: contains infinities or NaN"):
        quantize(weight, "model.layers.0.mlp.up_proj.weight")


def test_one_check_reports_all_matrices_that_are_not_finite() -> None:
    checks = FiniteChecks()
    good, bad = torch.ones(128, 128), torch.ones(128, 128)
    bad[5, 5] = float("nan")
    checks.add("good", quantize(good, "good")[1])
    checks.check()
    for name, (_, scales) in zip(("first", "second", "third"), quantize_all([good, bad, bad]), strict=True):
        checks.add(name, scales)
    with pytest.raises(RuntimeFailure, match=r"^second: contains infinities or NaN, which cannot be sent in FP8"):
        checks.check()
    checks.check()


@pytest.mark.parametrize("device", DEVICES)
def test_the_engine_keeps_values_and_scales_when_it_quantizes_again(device: str) -> None:
    """vLLM does so when it loads weights for DeepGEMM. The error does not exceed that of the smallest scale without rounding."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    generator = torch.Generator().manual_seed(3)
    largest = [0.0, 1e-45, 1e-38, 1e-8, 9e-5, 1e-4, 1.1e-4, 2**-22 * 448, 2**-22 * 464, 2**-22 * 465, 2**-21 * 230]
    largest += [
        step * 2.0**power for power in (-12, 0, 5, 100) for step in (223, 224, 225, 228, 231.9, 232, 232.1, 240, 447, 448, 449, 464)
    ]
    largest += [step * 2.0**power for power in (-12, 5) for step in (464.1, 480)] + [3e38]
    blocks = torch.randn(len(largest), FP8_BLOCK, FP8_BLOCK, generator=generator)
    blocks *= torch.tensor(largest)[:, None, None] / blocks.abs().amax((1, 2), keepdim=True) * 0.999
    blocks[:, 7, 9] = torch.tensor(largest)
    random = torch.randn(256, 200, generator=generator) * torch.logspace(-12, 6, 200)
    for weight in (blocks.flatten(0, 1), random, random.bfloat16(), 0.02 * torch.randn(300, 130, generator=generator).bfloat16()):
        weight = weight.to(device)
        values, scales = quantize(weight, "w")
        again, their_scales = values.clone(), scales.clone()
        requant_weight_ue8m0_inplace(again, their_scales)
        assert torch.equal(their_scales, scales) and torch.equal(again.view(torch.uint8), values.view(torch.uint8))
        error = (dequantize(values, scales, torch.float32) - weight.float()).abs()
        height, width = (-size % FP8_BLOCK for size in weight.shape)
        padded = torch.nn.functional.pad(weight.float(), (0, width, 0, height)).unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
        exact = torch.exp2(torch.ceil(torch.log2(padded.abs().amax((1, 3)).clamp_min(2**-22 * FP8_MAX) / FP8_MAX)))
        plain = (padded / exact[:, None, :, None]).to(torch.float8_e4m3fn).float() * exact[:, None, :, None]
        bound = (plain - padded).abs().flatten(2, 3).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
        assert bool((error <= bound).all())


def test_quantizing_a_dequantized_matrix_again_changes_nothing() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    values, scales = quantize(weight, "w")
    result = dequantize(values, scales, torch.float32)
    assert torch.equal(dequantize(*quantize(result, "w"), torch.float32), result)
    assert torch.equal(dequantize(values, scales, torch.bfloat16).float(), result), "bf16 represents the values"
