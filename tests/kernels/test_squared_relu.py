"""Squared ReLU and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mtpctl.kernels.squared_relu import squared_relu


@pytest.mark.parametrize("scaled", [False, True])
def test_squared_relu_gradient_matches_finite_differences(scaled: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 10, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(3, 1, dtype=torch.float64, requires_grad=True) if scaled else None
    assert torch.equal(squared_relu(x, scale), F.relu(x) ** 2 * (1.0 if scale is None else scale[..., None]))
    assert torch.autograd.gradcheck(squared_relu, (x, scale))


def test_a_scale_in_single_precision_leaves_the_dtype_of_x() -> None:
    """Routing weights are fp32, and states bf16."""
    x, scale = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True), torch.rand(4, requires_grad=True)
    out = squared_relu(x, scale)
    x_grad, scale_grad = torch.autograd.grad(out.float().sum(), (x, scale))
    assert out.dtype == x_grad.dtype == torch.bfloat16 and scale_grad.dtype == torch.float32
