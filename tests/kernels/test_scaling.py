"""Heads times factors, and their gradients. The kernels are tested in `interpreted_triton.py`."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.scaling import scale_heads


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
def test_gradients_match_finite_differences(per_token: bool, with_base: bool) -> None:
    torch.manual_seed(0)
    x, base = (torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.rand((4, 3) if per_token else (3,), dtype=torch.float64, requires_grad=True)
    added = (base,) if with_base else ()
    assert torch.equal(scale_heads(x, scale, *added), (base if with_base else 0) + x * scale[..., None])
    assert torch.autograd.gradcheck(scale_heads, (x, scale, *added))


def test_the_result_has_the_dtype_of_the_input() -> None:
    x, scale = torch.randn(4, 3, 6, dtype=torch.bfloat16, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    out = scale_heads(x, scale)
    x_grad, scale_grad = torch.autograd.grad(out.float().sum(), (x, scale))
    assert out.dtype == x_grad.dtype == torch.bfloat16 and scale_grad.dtype == torch.float32
