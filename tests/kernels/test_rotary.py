"""Rotary embeddings: pairs are turned by their angle, what is not rotated stays, and the gradient is turned back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.kernels.qkv import apply_rotary, rotate_pairs


def drawn(half: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """States of 7 tokens with 3 heads, and the angles of their pairs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, width, generator=generator, dtype=torch.float64).to(dtype)
    angles = torch.randn(7, half, generator=generator, dtype=torch.float64) * 10
    return x, angles.cos(), angles.sin()


@pytest.mark.parametrize(("half", "width"), [(4, 8), (2, 8), (3, 11)])
def test_each_pair_is_a_complex_number_times_its_turn(half: int, width: int) -> None:
    x, cos, sin = drawn(half, width)
    found = rotate_pairs(x, cos, sin)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    assert torch.allclose(found[..., : 2 * half], torch.cat([turned.real, turned.imag], dim=-1))
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])


def test_a_cpu_multiplies_in_the_dtype_of_the_states() -> None:
    x, cos, sin = drawn(4, 8, torch.bfloat16)
    found = apply_rotary(x, cos.float(), sin.float())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rotate_pairs(x, cos.bfloat16(), sin.bfloat16()))


def test_the_gradient_is_rotated_back() -> None:
    x, cos, sin = drawn(2, 6)
    grad = torch.randn(x.shape, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    rotate_pairs(leaf, cos, sin).backward(grad)
    assert torch.allclose(leaf.grad, rotate_pairs(grad, cos, -sin))
