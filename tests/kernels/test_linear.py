"""A linear layer that puts its weight's gradient into the buffer."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.main_grad import buffered_linear, is_buffered


def weight(rows: int, columns: int) -> torch.Tensor:
    found = torch.nn.Parameter(torch.randn(rows, columns))
    found.main_grad = torch.ones(rows, columns)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("shape", [(7, 1, 5), (7, 5), (0, 5)])
def test_the_gradient_of_the_weight_is_in_its_buffer_and_nowhere_else(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w, x = weight(3, 5), torch.randn(shape, requires_grad=True)
    out = buffered_linear(x, w)
    grad = torch.randn_like(out)
    out.backward(grad)
    assert torch.allclose(out, x @ w.t()) and w.grad is None
    assert x.grad is not None and torch.allclose(x.grad, grad @ w)
    assert torch.allclose(w.main_grad, 1 + grad.flatten(0, -2).t() @ x.detach().flatten(0, -2))  # type: ignore[attr-defined]


def test_the_weight_gets_its_gradient_where_the_states_take_none() -> None:
    w = weight(3, 5)
    out = buffered_linear(torch.randn(2, 5), w)
    out.sum().backward()
    assert not torch.equal(w.main_grad, torch.ones(3, 5))  # type: ignore[attr-defined]


def test_a_frozen_weight_and_one_without_a_buffer_are_not_buffered() -> None:
    w = weight(2, 2)
    assert is_buffered(w)
    assert not is_buffered(w.requires_grad_(False)) and not is_buffered(torch.nn.Parameter(torch.ones(2)))
