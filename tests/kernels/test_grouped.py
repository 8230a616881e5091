"""Grouped linear layers: products per group, and gradients in `main_grad` buffers or through autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.kernels.grouped import WeightStack, grouped_linear, stack_tensors

COUNTS = [3, 0, 7, 1, 0]


def problem(dtype: torch.dtype, inputs: int, outputs: int, counts: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), inputs, dtype=dtype, requires_grad=True)
    weights = [torch.randn(outputs, inputs, dtype=dtype, requires_grad=True) for _ in counts]
    return x, torch.tensor(counts).cumsum(0).to(torch.int32), weights


def one_by_one(x: Tensor, counts: list[int], weights: list[Tensor]) -> Tensor:
    return torch.cat([rows @ weight.t() for rows, weight in zip(x.split(counts), weights, strict=True)])


@pytest.mark.parametrize(
    ("dtype", "inputs", "outputs"), [(torch.float32, 12, 20), (torch.float32, 9, 7), (torch.bfloat16, 16, 24), (torch.bfloat16, 12, 10)]
)
@pytest.mark.parametrize("counts", [COUNTS, [4], [0, 0, 2]])
def test_grouped_linear_and_gradients_match_per_group_products(dtype: torch.dtype, inputs: int, outputs: int, counts: list[int]) -> None:
    x, ends, weights = problem(dtype, inputs, outputs, counts)
    actual = grouped_linear(x, ends, WeightStack(weights))
    expected = one_by_one(x.double(), counts, [weight.double() for weight in weights])
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(actual, [x, *weights], upstream.to(dtype))
    target = torch.autograd.grad(expected, [x, *weights], upstream)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for tensor, reference in zip([actual, *got], [expected, *target], strict=True):
        assert (tensor.double() - reference).norm() <= tolerance * (1 + reference.norm())


@pytest.mark.parametrize("frozen_rows", [True, False])
@pytest.mark.parametrize("regular", [True, False])
def test_gradients_are_added_to_main_grad_buffers(regular: bool, frozen_rows: bool) -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    whole = torch.ones(len(COUNTS), 20, 12 + 4)
    buffers = [row[:, :12] for row in whole] if not regular else list(torch.ones(len(COUNTS), 20, 12))
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.main_grad = buffer  # type: ignore[attr-defined]
    expected = torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), weights)
    out = grouped_linear(x.requires_grad_(not frozen_rows), ends, WeightStack(weights))
    assert out.grad_fn is not None and sum(node is not None for node, _ in out.grad_fn.next_functions) == 1, "only x or one weight"
    out.sum().backward()
    for weight, buffer, target in zip(weights, buffers, expected, strict=True):
        assert weight.grad is None
        torch.testing.assert_close(buffer, target + 1)


@pytest.mark.parametrize("regular", [True, False])
def test_first_gradients_overwrite_stale_buffers_and_later_ones_are_added(regular: bool) -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    whole = torch.full((len(COUNTS), 20, 12 + 4), torch.nan)
    buffers = [row[:, :12] for row in whole] if not regular else list(torch.full((len(COUNTS), 20, 12), torch.nan))
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.main_grad = buffer  # type: ignore[attr-defined]
    expected = torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), weights)
    stack = WeightStack(weights)
    stack.mark_stale()
    for times in (1, 2):
        grouped_linear(x, ends, stack).sum().backward()
        for buffer, target in zip(buffers, expected, strict=True):
            torch.testing.assert_close(buffer, times * target)


def test_buffers_stay_stale_until_a_gradient_or_a_query() -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    for weight in weights:
        weight.main_grad = torch.full_like(weight, torch.nan).detach()  # type: ignore[attr-defined]
    stack = WeightStack(weights)
    assert stack.stale_buffers() == []
    stack.mark_stale()
    assert [id(buffer) for buffer in stack.stale_buffers()] == [id(buffer) for buffer in stack.buffers]
    assert stack.stale_buffers() == []
    stack.mark_stale()
    grouped_linear(x, ends, stack).sum().backward()
    assert stack.stale_buffers() == [] and all(torch.isfinite(buffer).all() for buffer in stack.buffers)


def test_frozen_weights_get_no_gradient_but_rows_do() -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    grouped_linear(x, ends, WeightStack([weight.detach() for weight in weights])).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), x)[0])


def test_zero_rows_keep_the_graph_connected() -> None:
    x, ends, weights = problem(torch.float32, 12, 20, [0, 0])
    actual = grouped_linear(x, ends, WeightStack(weights))
    assert actual.shape == (0, 20)
    actual.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 12)


def test_tensors_at_equal_strides_are_stacked_as_a_view() -> None:
    storage = torch.arange(100.0)
    places = [storage[start : start + 6].view(2, 3) for start in (10, 26, 42)]
    actual = stack_tensors(places)
    assert actual.data_ptr() == places[0].data_ptr()
    torch.testing.assert_close(actual, torch.stack(places))


@pytest.mark.parametrize("starts", [(42, 26, 10), (10, 26, 43), (10, 12, 14)])
def test_tensors_at_other_strides_are_copied(starts: tuple[int, ...]) -> None:
    storage = torch.arange(100.0)
    places = [storage[start : start + 6].view(2, 3) for start in starts]
    actual = stack_tensors(places)
    assert actual.data_ptr() != places[0].data_ptr()
    torch.testing.assert_close(actual, torch.stack(places))


def test_moved_weights_and_buffers_are_read_at_their_new_addresses() -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    stack = WeightStack(weights)
    for _ in range(2):
        for weight, value, buffer in zip(weights, torch.randn(len(COUNTS), 20, 12), torch.zeros(len(COUNTS), 20, 12), strict=True):
            weight.data, weight.main_grad = value, buffer  # type: ignore[attr-defined]
        actual = grouped_linear(x, ends, stack)
        torch.testing.assert_close(actual, one_by_one(x, COUNTS, weights))
        actual.sum().backward()
        expected = torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), weights)
        for weight, target in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.main_grad, target)  # type: ignore[attr-defined]
