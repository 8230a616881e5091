"""Norms against their formulas, on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.norm import gated_rms_norm, rms_norm

EPS = 1e-5


def by_formula(x: Tensor, gate: Tensor | None, weight: Tensor, offset: float) -> Tensor:
    out = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (weight + offset)
    return out if gate is None else out * F.silu(gate)


@pytest.mark.parametrize(("gated", "offset"), [(False, 0.0), (False, 1.0), (True, 0.0)])
@pytest.mark.parametrize("shape", [(3, 2, 16), (5, 24), (0, 8), (700, 1030)])
@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.float32, 1e-6, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
    ],
)
def test_norm_and_gradients_match_the_formula(
    device: str, dtype: torch.dtype, bound: float, shape: tuple[int, ...], gated: bool, offset: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator).to(device, dtype) for size in (shape, shape, shape[-1:], shape)]
    actual, expected = [], []
    for leaves, into in ((drawn, actual), ([each.double() for each in drawn], expected)):
        x, gate, weight, upstream = (each.clone().requires_grad_() for each in leaves)
        if into is actual:
            out = gated_rms_norm(x, gate, weight, EPS) if gated else rms_norm(x, weight, EPS, offset)
        else:
            out = by_formula(x, gate if gated else None, weight, offset)
        into += [out, *torch.autograd.grad(out, [x, weight, gate] if gated else [x, weight], upstream)]
    assert actual[0].dtype == dtype and actual[0].shape == shape
    for tensor, reference in zip(actual, expected, strict=True):
        assert (tensor.double() - reference).norm() <= bound * reference.norm()


def test_small_zero_centered_weight_keeps_its_digits() -> None:
    """Rounding of outputs averages out over rows; rounding of 1 + weight would not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16, generator=generator).bfloat16()
    weight = (0.01 * torch.randn(16, generator=generator)).bfloat16()
    exact = by_formula(x.double(), None, weight.double(), 1.0)

    def off(actual: Tensor) -> float:
        return float(((actual.double() * exact).sum(0) / exact.pow(2).sum(0) - 1).abs().max())

    assert off(rms_norm(x, weight, EPS, 1.0)) < 2e-4 < 1e-3 < off(rms_norm(x, 1 + weight, EPS))
