"""Gradient buffers: an update's first gradient overwrites them, later ones are added; and linear layers that write to them."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.products import accumulate_weight_grad, buffered_linear, is_buffered, mark_stale, take_stale


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 1e-2),
        pytest.param("cuda", torch.float32, 1e-6, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1e-5, marks=pytest.mark.gpu),
    ],
)
def test_first_product_overwrites_and_second_is_added(device: str, dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = torch.full((16, 24), torch.nan, device=device)
    mark_stale(buffer)
    expected = torch.zeros(16, 24, dtype=torch.float64)
    for _ in range(2):
        grad, x = (torch.randn(40, width, generator=generator).to(device, dtype) for width in (16, 24))
        accumulate_weight_grad(buffer, grad, x)
        expected += grad.double().t().cpu() @ x.double().cpu()
        assert (buffer.cpu().double() - expected).norm() <= bound * expected.norm()


def test_unmarked_buffer_is_added_to() -> None:
    buffer = torch.ones(2)
    assert not take_stale(buffer)
    mark_stale(buffer)
    assert take_stale(buffer) and not take_stale(buffer)


def weight(rows: int, columns: int) -> torch.Tensor:
    actual = torch.nn.Parameter(torch.randn(rows, columns))
    actual.main_grad = torch.ones(rows, columns)  # type: ignore[attr-defined]
    return actual


@pytest.mark.parametrize("shape", [(7, 1, 5), (7, 5), (0, 5)])
def test_weight_gradient_is_only_in_its_buffer(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w, x = weight(3, 5), torch.randn(shape, requires_grad=True)
    out = buffered_linear(x, w)
    assert out.grad_fn is not None and sum(node is not None for node, _ in out.grad_fn.next_functions) == 1, "only x is in the graph"
    grad = torch.randn_like(out)
    out.backward(grad)
    assert torch.allclose(out, x @ w.t()) and w.grad is None
    assert x.grad is not None and torch.allclose(x.grad, grad @ w)
    assert torch.allclose(w.main_grad, 1 + grad.flatten(0, -2).t() @ x.detach().flatten(0, -2))  # type: ignore[attr-defined]


def test_weight_gets_its_gradient_if_the_input_needs_none() -> None:
    w = weight(3, 5)
    out = buffered_linear(torch.randn(2, 5), w)
    out.sum().backward()
    assert not torch.equal(w.main_grad, torch.ones(3, 5))  # type: ignore[attr-defined]


def test_frozen_weight_and_weight_without_buffer_are_not_buffered() -> None:
    w = weight(2, 2)
    assert is_buffered(w)
    assert not is_buffered(w.requires_grad_(False)) and not is_buffered(torch.nn.Parameter(torch.ones(2)))
