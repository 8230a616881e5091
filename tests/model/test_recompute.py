"""What is made again in the backward pass: the same gradients as where it is kept, and nothing kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mtpctl.kernels.swiglu import swiglu
from mtpctl.model.layers import recomputed
from tests.fakes.kept import Kept


def normed_linear(x, scale, weight, *, recompute):
    def norm(x):
        return F.rms_norm(x, (x.shape[-1],), scale)

    normed = norm(x)
    if not recompute:
        return normed @ weight.T
    with recomputed(normed, lambda: norm(x.detach())):
        return normed @ weight.T


def test_gradient_through_what_is_recomputed():
    torch.manual_seed(0)
    inputs = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((4, 3), (3,), (5, 3))]
    assert torch.autograd.gradcheck(lambda *x: normed_linear(*x, recompute=True), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bit_equal_to_those_of_what_is_kept(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((64, 32), (32,), (48, 32))]
    found = [torch.autograd.grad(normed_linear(*inputs, recompute=recompute).square().sum(), inputs) for recompute in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_recomputed_is_not_kept():
    x, scale, weight = torch.randn(64, 32, requires_grad=True), torch.ones(32), torch.randn(8, 32, requires_grad=True)
    kept = []
    for recompute in (False, True):
        with Kept(x, scale, weight) as memory:
            out = normed_linear(x, scale, weight, recompute=recompute)
        kept.append(memory.bytes)
        out.sum().backward()
    assert kept[0] - kept[1] == x.nbytes


def test_the_gated_product_keeps_its_arguments_alone():
    both, weight = torch.randn(64, 32, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    with Kept(both, weight) as memory:
        product = swiglu(both)
        with recomputed(product, lambda: swiglu(both.detach())):
            out = product @ weight.T
        del product
    assert memory.bytes == out.nbytes


def test_other_tensors_within_are_kept_as_they_are():
    value, other = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    made = value * 2
    with recomputed(made, lambda: 1 / 0):
        out = (other * other) @ other.T
    out.sum().backward()
    assert other.grad is not None
