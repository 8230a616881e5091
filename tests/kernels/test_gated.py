"""The gated product of SwiGLU and its gradients, in whatever they run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.gated import gated_product


def plain(both: Tensor, scale: Tensor | None) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up * (1.0 if scale is None else scale[..., None])


@pytest.mark.parametrize("scaled", [False, True])
def test_gradient_of_the_gated_product(scaled: bool) -> None:
    torch.manual_seed(0)
    both = torch.randn(3, 1, 10, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(3, 1, dtype=torch.float64, requires_grad=True) if scaled else None
    assert torch.equal(gated_product(both, scale), plain(both, scale))
    assert torch.autograd.gradcheck(gated_product, (both, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(700, 768), (3, 1, 11008), (0, 8)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_a_card_rounds_once(dtype: torch.dtype, bound: float, shape: tuple[int, ...], scaled: bool) -> None:
    torch.manual_seed(0)
    both = torch.randn(*shape[:-1], 2 * shape[-1], device="cuda", dtype=dtype, requires_grad=True)
    scale = torch.rand(shape[:-1], device="cuda", requires_grad=True) if scaled else None
    upstream = torch.randn(shape, device="cuda", dtype=dtype)
    leaves = [both] if scale is None else [both, scale]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, right = gated_product(*leaves), plain(exact[0], exact[1] if scaled else None)
    assert found.dtype == dtype and found.shape == shape
    found_grads, right_grads = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(right, exact, upstream.double())
    for mine, theirs in zip([found, *found_grads], [right, *right_grads], strict=True):
        assert (mine.double() - theirs).norm() <= bound * theirs.norm()
