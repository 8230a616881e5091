"""Linear layers of many experts at once: rows are sorted by expert, and each group of rows is multiplied with its expert's weight.

    y[rows of e] = x[rows of e] @ W[e].T          x [R, in], W[e] [out, in], y [R, out]

Weights stay parameters of their own, one an expert, since checkpoints, syncs and adapters name them so. Gradient buffers lay parameters
out backwards, at equal distances; where all weights of a call lie like this, the products read them where they are, and weight gradients
are added to the fp32 buffers (`main_grad`) in one step, past autograd, whose bookkeeping for hundreds of weights would hold up the
card. Weights that lie otherwise are copied into one tensor first.

The products are `torch.nn.functional.grouped_mm`, which needs rows at multiples of 16 bytes; other widths are multiplied expert by expert.
On a card a kernel of ours adds weight gradients to the buffers, which spares writing and reading them once more; an update's first
micro-batch replaces what they hold, which spares zeroing and reading them. Group borders stay on the device: nothing here waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.main_grad import mark_stale, take_stale

ROW_BYTES = 16
"""Rows of `grouped_mm`'s operands start at multiples of this."""


class Stack:
    """The weights of a grouped linear layer: E parameters of one shape [out, in], in the order of the groups.

    The addresses of the parameters are read again only where these have moved. For a layer of hundreds of weights, reading them takes the
    host longer than the products take a card.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = tuple(weights)
        self._values, self._gradients = _StackedView(), _StackedView()

    @property
    def whole(self) -> Tensor:
        """The weights as one [E, out, in]: a view where they lie in one storage at equal distances, else a copy."""
        return self._values.of(self.weights[0], self.weights[-1], lambda: self.weights)

    @property
    def buffered(self) -> bool:
        """Whether gradients go into the weights' buffers, `main_grad`, past autograd."""
        return getattr(self.weights[0], "main_grad", None) is not None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What autograd has to know of: all weights, or one that stands for them where gradients go past it."""
        return self.weights[:1] if self.buffered else self.weights

    @property
    def buffers(self) -> list[Tensor]:
        """The weights' gradient buffers, fp32 and of the weights' shape."""
        return [_buffer(weight) for weight in self.weights]

    def add_gradients(self, grad: Tensor, x: Tensor, ends: Tensor) -> None:
        """Add the sum of outer products over each group's rows, grad [R, out] and x [R, in], to the weights' buffers.

        Where the buffers are stale, the sum replaces what they hold.
        """
        first, last = _buffer(self.weights[0]), _buffer(self.weights[-1])
        replaces = take_stale(first)
        whole = self._gradients.of(first, last, lambda: self.buffers)
        if whole.data_ptr() != first.data_ptr():  # a copy: they lie apart
            apart, found = self.buffers, list(_outer_products(grad, x, ends).unbind())
            torch._foreach_copy_(apart, found) if replaces else torch._foreach_add_(apart, found)
        elif x.is_cuda and _triton().refusal(grad, x, whole) is None:
            _triton().add_weight_grads(whole, grad, x, ends, replaces=replaces)
        elif replaces:
            whole.copy_(_outer_products(grad, x, ends))
        else:
            whole.add_(_outer_products(grad, x, ends))

    def mark_stale(self) -> None:
        """An update begins: the next gradients replace what the buffers hold. The first buffer is marked for all."""
        mark_stale(_buffer(self.weights[0]))

    def stale_buffers(self) -> list[Tensor]:
        """The buffers that hold what an earlier update left, since no gradients came; they are no longer marked then."""
        return self.buffers if take_stale(_buffer(self.weights[0])) else []


class _StackedView:
    """Remembers the one tensor [E, …] that views E tensors at equal distances in memory, until they move."""

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self._view: Tensor | None = None

    def of(self, first: Tensor, last: Tensor, every: Callable[[], Sequence[Tensor]]) -> Tensor:
        """`stacked(every())`, which is made again only where the first or the last of these tensors has moved."""
        ends = first.data_ptr(), last.data_ptr()
        if self._view is not None and ends == self._ends:
            return self._view
        found = stacked(every())
        if found.data_ptr() == ends[0]:
            self._ends, self._view = ends, found
        return found


def _buffer(weight: Tensor) -> Tensor:
    buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return buffer


def grouped_linear(x: Tensor, ends: Tensor, weights: Stack) -> Tensor:
    """x [R, in], sorted by group → [R, out]. `ends` [E] int32: where each group's rows end, on x's device. `weights`: E of [out, in].

    Where the weights have a `main_grad`, their gradients are added to it, and autograd gets none.
    """
    if not len(x):
        # No kernel takes zero rows in all. The product keeps the result in the graph, so that gradients flow on to earlier layers.
        return x @ weights.weights[0].t()
    out: Tensor = _GroupedLinear.apply(x, ends, weights, *weights.leaves)
    return out


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, all of one shape, as one [E, …]: a view where they lie in one storage at equal distances, else a copy."""
    first = tensors[0]
    places = [each.data_ptr() for each in tensors]
    step = places[1] - places[0] if len(places) > 1 else first.nbytes
    size = first.element_size()
    regular = all(b - a == step for a, b in itertools.pairwise(places)) and step >= first.nbytes and step % size == 0
    storage = first.untyped_storage()
    inside = places[-1] + first.nbytes <= storage.data_ptr() + storage.nbytes()
    if not (regular and inside and all(each.is_contiguous() for each in tensors)):
        return torch.stack(list(tensors))
    return first.detach().as_strided((len(tensors), *first.shape), (step // size, *first.stride()))


class _Context(AutogradContext, Protocol):
    weights: Stack


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, ends: Tensor, weights: Stack, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weights = weights  # parameters, which live longer than the graph
        return _products(x, weights.whole.mT, ends)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, weights = grads[0].contiguous(), ctx.weights
        x, ends = ctx.saved_tensors
        x_grad = _products(grad, weights.whole, ends) if ctx.needs_input_grad[0] else None
        found: Sequence[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 3)
        if ctx.needs_input_grad[3]:
            if weights.buffered:
                weights.add_gradients(grad, x, ends)
            else:
                found = _outer_products(grad, x, ends).unbind()
        return x_grad, None, None, *found


def row_sums(rows: Tensor, row_of: Tensor) -> Tensor:
    """rows [R, H], row_of [T, k] int32 → [T, H]: the sum of each token's rows, added up in fp32. Not differentiable."""
    if row_of.shape[1] == 1:
        return rows.index_select(0, row_of.flatten())
    return _triton().summed(rows, row_of) if rows.is_cuda else F.embedding_bag(row_of, rows, mode="sum")


@cache
def _triton() -> ModuleType:
    """The module of Triton kernels, imported late: Triton runs on cards alone."""
    from mtpctl.kernels import grouped_triton

    return grouped_triton


def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [R, in] times weight [E, in, out] by groups."""
    if _aligned(x, *weight.shape[1:]):
        return F.grouped_mm(x, weight, offs=ends)
    return torch.cat([rows @ each for rows, each in zip(_groups(x, ends), weight, strict=True)])


def _outer_products(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad [R, out], x [R, in] → the sum of outer products over each group's rows, [E, out, in]. A group without rows has zeros."""
    if _aligned(x, grad.shape[1], x.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=ends)
    return torch.stack([a.t() @ b for a, b in zip(_groups(grad, ends), _groups(x, ends), strict=True)])


def _aligned(like: Tensor, *widths: int) -> bool:
    return all(width * like.element_size() % ROW_BYTES == 0 for width in widths)


def _groups(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(ends[:-1].cpu().long())
