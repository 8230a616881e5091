"""SwiGLU, on CPU and CUDA, and squared ReLU, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.activations import squared_relu, swiglu


def plain(both: Tensor, scale: Tensor | None) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up * (1.0 if scale is None else scale[..., None])


@pytest.mark.parametrize("scaled", [False, True])
def test_swiglu_gradient_matches_finite_differences(scaled: bool) -> None:
    torch.manual_seed(0)
    both = torch.randn(3, 1, 10, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(3, 1, dtype=torch.float64, requires_grad=True) if scaled else None
    assert torch.equal(swiglu(both, scale), plain(both, scale))
    assert torch.autograd.gradcheck(swiglu, (both, scale))


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


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [swiglu, squared_relu])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(700, 768), (3, 1, 11008), (0, 8)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_activations_on_cuda_round_once(
    dtype: torch.dtype, bound: float, shape: tuple[int, ...], scaled: bool, activation: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    width = shape[-1] * (2 if activation is swiglu else 1)
    x = torch.randn(*shape[:-1], width, device="cuda", dtype=dtype, requires_grad=True)
    scale = torch.rand(shape[:-1], device="cuda", requires_grad=True) if scaled else None
    upstream = torch.randn(shape, device="cuda", dtype=dtype)
    leaves = [x] if scale is None else [x, scale]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    actual = activation(*leaves)
    expected = (
        plain(exact[0], exact[1] if scaled else None)
        if activation is swiglu
        else F.relu(exact[0]) ** 2 * (exact[1][..., None] if scaled else 1.0)
    )
    assert actual.dtype == dtype and actual.shape == shape
    found_grads, right_grads = torch.autograd.grad(actual, leaves, upstream), torch.autograd.grad(expected, exact, upstream.double())
    for tensor, reference in zip([actual, *found_grads], [expected, *right_grads], strict=True):
        assert (tensor.double() - reference).norm() <= bound * reference.norm()
