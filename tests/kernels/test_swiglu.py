"""SwiGLU and its gradients, on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.swiglu import swiglu


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


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(700, 768), (3, 1, 11008), (0, 8)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_cuda_swiglu_rounds_once(dtype: torch.dtype, bound: float, shape: tuple[int, ...], scaled: bool) -> None:
    torch.manual_seed(0)
    both = torch.randn(*shape[:-1], 2 * shape[-1], device="cuda", dtype=dtype, requires_grad=True)
    scale = torch.rand(shape[:-1], device="cuda", requires_grad=True) if scaled else None
    upstream = torch.randn(shape, device="cuda", dtype=dtype)
    leaves = [both] if scale is None else [both, scale]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    actual, expected = swiglu(*leaves), plain(exact[0], exact[1] if scaled else None)
    assert actual.dtype == dtype and actual.shape == shape
    found_grads, right_grads = torch.autograd.grad(actual, leaves, upstream), torch.autograd.grad(expected, exact, upstream.double())
    for tensor, reference in zip([actual, *found_grads], [expected, *right_grads], strict=True):
        assert (tensor.double() - reference).norm() <= bound * reference.norm()
