"""Gated norms with zero-centered weights, and recomputation of activations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mtpctl.kernels.activations import swiglu
from mtpctl.kernels.norm import gated_rms_norm
from mtpctl.model.layers import GatedRMSNorm, recompute_in_backward
from tests.fakes.kept import Kept


def test_gated_norm_uses_the_stored_weight_unchanged() -> None:
    """Checkpoints store the weight centered at 1 in half precision; the trainer must compute with it like an engine."""
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=True, use_cpu_initialization=True, params_dtype=torch.bfloat16, sequence_parallel=False
    )
    norm = GatedRMSNorm(config, 16)  # type: ignore[arg-type]
    assert torch.all(norm.weight == 1)
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 40, 16, generator=generator).bfloat16()
    torch.nn.init.normal_(norm.weight, mean=0.05, std=0.01, generator=generator)
    assert torch.equal(norm.gated(x, gate), gated_rms_norm(x, gate, norm.weight, norm.eps))


def normed_linear(x, scale, weight, *, recompute):
    def norm(x):
        return F.rms_norm(x, (x.shape[-1],), scale)

    normed = norm(x)
    if not recompute:
        return normed @ weight.T
    with recompute_in_backward(normed, lambda: norm(x.detach())):
        return normed @ weight.T


def test_recomputed_value_passes_gradcheck():
    torch.manual_seed(0)
    inputs = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((4, 3), (3,), (5, 3))]
    assert torch.autograd.gradcheck(lambda *x: normed_linear(*x, recompute=True), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_gradients_are_bit_identical(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((64, 32), (32,), (48, 32))]
    actual = [torch.autograd.grad(normed_linear(*inputs, recompute=recompute).square().sum(), inputs) for recompute in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


def test_recomputed_value_is_not_saved():
    x, scale, weight = torch.randn(64, 32, requires_grad=True), torch.ones(32), torch.randn(8, 32, requires_grad=True)
    saved = []
    for recompute in (False, True):
        with Kept(x, scale, weight) as memory:
            out = normed_linear(x, scale, weight, recompute=recompute)
        saved.append(memory.bytes)
        out.sum().backward()
    assert saved[0] - saved[1] == x.nbytes


def test_swiglu_saves_only_its_arguments():
    both, weight = torch.randn(64, 32, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    with Kept(both, weight) as memory:
        product = swiglu(both)
        with recompute_in_backward(product, lambda: swiglu(both.detach())):
            out = product @ weight.T
        del product
    assert memory.bytes == out.nbytes


def test_other_tensors_in_the_block_are_saved():
    value, other = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    trainer = value * 2
    with recompute_in_backward(trainer, lambda: 1 / 0):
        out = (other * other) @ other.T
    out.sum().backward()
    assert other.grad is not None
