"""Grouped linear layers: each group of rows with its own weight, and gradients where the trainer wants them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.kernels.grouped import WeightStack, grouped_linear, stacked

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
def test_each_group_is_multiplied_with_its_own_weight_and_so_are_the_gradients(
    dtype: torch.dtype, inputs: int, outputs: int, counts: list[int]
) -> None:
    x, ends, weights = problem(dtype, inputs, outputs, counts)
    found = grouped_linear(x, ends, WeightStack(weights))
    right = one_by_one(x.double(), counts, [weight.double() for weight in weights])
    upstream = torch.randn_like(right)
    got = torch.autograd.grad(found, [x, *weights], upstream.to(dtype))
    wanted = torch.autograd.grad(right, [x, *weights], upstream)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for mine, theirs in zip([found, *got], [right, *wanted], strict=True):
        assert (mine.double() - theirs).norm() <= tolerance * (1 + theirs.norm())


@pytest.mark.parametrize("regular", [True, False])
def test_gradients_are_added_to_the_buffers_of_weights_that_have_some(regular: bool) -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    whole = torch.ones(len(COUNTS), 20, 12 + 4)
    buffers = [row[:, :12] for row in whole] if not regular else list(torch.ones(len(COUNTS), 20, 12))
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.main_grad = buffer  # type: ignore[attr-defined]
    right = torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), weights)
    grouped_linear(x, ends, WeightStack(weights)).sum().backward()
    for weight, buffer, wanted in zip(weights, buffers, right, strict=True):
        assert weight.grad is None
        torch.testing.assert_close(buffer, wanted + 1)


@pytest.mark.parametrize("regular", [True, False])
def test_the_first_gradients_replace_what_the_buffers_hold_and_later_ones_are_added(regular: bool) -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    whole = torch.full((len(COUNTS), 20, 12 + 4), torch.nan)
    buffers = [row[:, :12] for row in whole] if not regular else list(torch.full((len(COUNTS), 20, 12), torch.nan))
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.main_grad = buffer  # type: ignore[attr-defined]
    right = torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), weights)
    stack = WeightStack(weights)
    stack.mark_stale()
    for times in (1, 2):
        grouped_linear(x, ends, stack).sum().backward()
        for buffer, wanted in zip(buffers, right, strict=True):
            torch.testing.assert_close(buffer, times * wanted)


def test_buffers_are_stale_until_a_gradient_came_or_somebody_asked() -> None:
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


def test_weights_that_are_frozen_get_no_gradient_and_the_rows_do() -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    grouped_linear(x, ends, WeightStack([weight.detach() for weight in weights])).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), x)[0])


def test_no_rows_at_all_give_no_rows_and_leave_the_graph_whole() -> None:
    x, ends, weights = problem(torch.float32, 12, 20, [0, 0])
    found = grouped_linear(x, ends, WeightStack(weights))
    assert found.shape == (0, 20)
    found.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 12)


def test_tensors_at_equal_distances_are_read_where_they_are() -> None:
    storage = torch.arange(100.0)
    places = [storage[start : start + 6].view(2, 3) for start in (10, 26, 42)]
    found = stacked(places)
    assert found.data_ptr() == places[0].data_ptr()
    torch.testing.assert_close(found, torch.stack(places))


@pytest.mark.parametrize("starts", [(42, 26, 10), (10, 26, 43), (10, 12, 14)])
def test_tensors_that_lie_otherwise_are_copied(starts: tuple[int, ...]) -> None:
    storage = torch.arange(100.0)
    places = [storage[start : start + 6].view(2, 3) for start in starts]
    found = stacked(places)
    assert found.data_ptr() != places[0].data_ptr()
    torch.testing.assert_close(found, torch.stack(places))


def test_weights_and_buffers_that_move_are_found_again() -> None:
    x, ends, weights = problem(torch.float32, 12, 20, COUNTS)
    stack = WeightStack(weights)
    for _ in range(2):
        for weight, value, buffer in zip(weights, torch.randn(len(COUNTS), 20, 12), torch.zeros(len(COUNTS), 20, 12), strict=True):
            weight.data, weight.main_grad = value, buffer  # type: ignore[attr-defined]
        found = grouped_linear(x, ends, stack)
        torch.testing.assert_close(found, one_by_one(x, COUNTS, weights))
        found.sum().backward()
        right = torch.autograd.grad(one_by_one(x, COUNTS, weights).sum(), weights)
        for weight, wanted in zip(weights, right, strict=True):
            torch.testing.assert_close(weight.main_grad, wanted)  # type: ignore[attr-defined]
