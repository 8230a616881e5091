"""Heads of attention: split from one tensor, normed and rotated as by the formulas, on a CPU and on a card."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.qkv import HeadNorm, split_heads
from tests.fakes.head_cases import HEAD_CASES, HeadCase


@pytest.mark.parametrize("case", [*HEAD_CASES, HeadCase(4, 8, 128, half=64, tokens=300)], ids=str)
@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.float32, 1e-6, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
    ],
)
def test_heads_and_their_gradients_are_those_of_the_formulas(device: str, dtype: torch.dtype, bound: float, case: HeadCase) -> None:
    mixed, layout, norm, angles, grads = case.drawn(dtype, device)
    leaf = mixed.requires_grad_()
    weights = [] if norm is None else [weight.requires_grad_() for weight in norm[:2]]
    found = split_heads(leaf, layout, None if norm is None else HeadNorm(*weights, *norm[2:]), angles)
    assert all(x.is_contiguous() and x.dtype == dtype for x in found)
    gradients = torch.autograd.grad(found, [leaf, *weights], grads)
    case.assert_close([*found, *gradients, *([None, None] if norm is None else [])], case.by_formula(dtype), bound)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_tokens_have_no_heads(device: str) -> None:
    case = HeadCase(2, 3, 16, tokens=0)
    mixed, layout, norm, angles, grads = case.drawn(torch.float32, device)
    found = split_heads(mixed.requires_grad_(), layout, norm, angles)
    assert [tuple(x.shape) for x in found] == [(0, 6, 16), (0, 2, 16), (0, 2, 16), (0, 0, 16)]
    assert torch.autograd.grad(found, mixed, grads)[0].shape == mixed.shape


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_that_are_frozen_get_no_gradient(device: str) -> None:
    mixed, layout, norm, angles, grads = HeadCase(2, 3, 16).drawn(torch.float32, device)
    assert norm is not None
    torch.autograd.backward(split_heads(mixed.requires_grad_(), layout, norm, angles), grads)
    assert mixed.grad is not None and norm.queries.grad is None
