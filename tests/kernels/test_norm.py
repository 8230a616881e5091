"""Norms by their formulas, in whatever they run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.norm import gated_rms_norm, rms_norm

EPS = 1e-5


def by_formula(x: Tensor, gate: Tensor | None, weight: Tensor) -> Tensor:
    out = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
    return out if gate is None else out * F.silu(gate)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 16), (5, 24), (0, 8)])
@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.float32, 1e-6, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
    ],
)
def test_a_norm_and_its_gradients_are_those_of_the_formula(
    device: str, dtype: torch.dtype, bound: float, shape: tuple[int, ...], gated: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator).to(device, dtype) for size in (shape, shape, shape[-1:], shape)]
    found, right = [], []
    for leaves, into in ((drawn, found), ([each.double() for each in drawn], right)):
        x, gate, weight, upstream = (each.clone().requires_grad_() for each in leaves)
        if into is found:
            out = gated_rms_norm(x, gate, weight, EPS) if gated else rms_norm(x, weight, EPS)
        else:
            out = by_formula(x, gate if gated else None, weight)
        into += [out, *torch.autograd.grad(out, [x, weight, gate] if gated else [x, weight], upstream)]
    assert found[0].dtype == dtype and found[0].shape == shape
    for mine, theirs in zip(found, right, strict=True):
        assert (mine.double() - theirs).norm() <= bound * theirs.norm()
