"""Attention heads split, normed and rotated against the formulas, on CPU and CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.kernels.qkv import HeadNorm, apply_rotary, rotate_pairs, split_heads
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
def test_heads_and_gradients_match_the_formulas(device: str, dtype: torch.dtype, bound: float, case: HeadCase) -> None:
    mixed, layout, norm, angles, grads = case.drawn(dtype, device)
    leaf = mixed.requires_grad_()
    weights = [] if norm is None else [weight.requires_grad_() for weight in norm[:2]]
    actual = split_heads(leaf, layout, None if norm is None else HeadNorm(weights[0], weights[1], *norm[2:]), angles)
    assert all(x.is_contiguous() and x.dtype == dtype for x in actual)
    gradients = torch.autograd.grad(actual, [leaf, *weights], grads)
    case.assert_close([*actual, *gradients, *([None, None] if norm is None else [])], case.by_formula(dtype), bound)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_zero_tokens_give_empty_heads(device: str) -> None:
    case = HeadCase(2, 3, 16, tokens=0)
    mixed, layout, norm, angles, grads = case.drawn(torch.float32, device)
    actual = split_heads(mixed.requires_grad_(), layout, norm, angles)
    assert [tuple(x.shape) for x in actual] == [(0, 6, 16), (0, 2, 16), (0, 2, 16), (0, 0, 16)]
    assert torch.autograd.grad(actual, mixed, grads)[0].shape == mixed.shape


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_frozen_norm_weights_get_no_gradient(device: str) -> None:
    mixed, layout, norm, angles, grads = HeadCase(2, 3, 16).drawn(torch.float32, device)
    assert norm is not None
    torch.autograd.backward(split_heads(mixed.requires_grad_(), layout, norm, angles), grads)
    assert mixed.grad is not None and norm.queries.grad is None


def drawn(half: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """States of 7 tokens with 3 heads, and cosines and sines of their pairs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, width, generator=generator, dtype=torch.float64).to(dtype)
    angles = torch.randn(7, half, generator=generator, dtype=torch.float64) * 10
    return x, angles.cos(), angles.sin()


@pytest.mark.parametrize(("half", "width"), [(4, 8), (2, 8), (3, 11)])
def test_rotation_matches_complex_multiplication(half: int, width: int) -> None:
    x, cos, sin = drawn(half, width)
    actual = rotate_pairs(x, cos, sin)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    assert torch.allclose(actual[..., : 2 * half], torch.cat([turned.real, turned.imag], dim=-1))
    assert torch.equal(actual[..., 2 * half :], x[..., 2 * half :])


def test_cpu_rotation_is_in_the_dtype_of_the_input() -> None:
    x, cos, sin = drawn(4, 8, torch.bfloat16)
    actual = apply_rotary(x, cos.float(), sin.float())
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, rotate_pairs(x, cos.bfloat16(), sin.bfloat16()))


def test_gradient_is_rotated_back() -> None:
    x, cos, sin = drawn(2, 6)
    grad = torch.randn(x.shape, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    rotate_pairs(leaf, cos, sin).backward(grad)
    assert torch.allclose(leaf.grad, rotate_pairs(grad, cos, -sin))
