"""Grouped linear layers of many experts: rows are sorted by expert, and each group is multiplied by its expert's weight.

    y[rows of e] = x[rows of e] @ W[e].T          x [R, in], W[e] [out, in], y [R, out]

Each expert's weight is a separate parameter, because checkpoints, weight syncs and adapters address experts by name. Megatron's gradient
buffers store parameters in reverse order at equal strides. If the weights of a call are at equal strides in one storage, the products read
them in place; otherwise they are copied into one tensor. Weight gradients are added to the fp32 buffers (`main_grad`) in one operation that
bypasses autograd, whose bookkeeping for hundreds of weights would stall the GPU.

Products use `torch.nn.functional.grouped_mm`, which needs rows aligned to 16 bytes; unaligned rows are multiplied expert by expert. On CUDA
a Triton kernel accumulates weight gradients in the buffers without a temporary; the first microbatch of an update overwrites the buffers,
which saves zeroing and reading them. Group boundaries stay on the device, so aligned products do not synchronize with the host.

Shape legend: R rows, E groups, M x N weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels import products
from mtpctl.kernels.products import mark_stale, take_stale
from mtpctl.kernels.triton_support import INTERPRETED, TensorDescriptor, launcher, on_device_of, tl, triton

ROW_BYTES = 16
"""Row alignment that `grouped_mm` requires, in bytes."""


class WeightStack:
    """The weights of a grouped linear layer: E parameters [out, in] in the order of the groups.

    Addresses are cached until the first or last tensor moves: reading hundreds of them takes longer than the products on the GPU.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = tuple(weights)
        self._weight_view, self._grad_view = _StackedView(), _StackedView()

    @property
    def stacked(self) -> Tensor:
        """All weights as one tensor [E, out, in]: a view if they are at equal strides in one storage, else a copy."""
        return self._weight_view.of(self.weights[0], self.weights[-1], lambda: self.weights)

    @property
    def has_grad_buffers(self) -> bool:
        """Whether gradients go to the weights' `main_grad` buffers and bypass autograd."""
        return getattr(self.weights[0], "main_grad", None) is not None

    def autograd_weights(self, x: Tensor) -> tuple[Tensor, ...]:
        """Weights to pass to autograd with the input x. If their gradients bypass autograd: one, or none if x requires a gradient."""
        if not self.has_grad_buffers:
            return self.weights
        return () if x.requires_grad else self.weights[:1]

    @property
    def buffers(self) -> list[Tensor]:
        """The fp32 gradient buffers, shaped like the weights."""
        return [_grad_buffer(weight) for weight in self.weights]

    def add_gradients(self, grad: Tensor, x: Tensor, ends: Tensor) -> None:
        """Add each group's sum of outer products of grad [R, out] and x [R, in] to the buffers, or overwrite stale buffers with it."""
        first, last = _grad_buffer(self.weights[0]), _grad_buffer(self.weights[-1])
        stale = take_stale(first)
        stacked_buffers = self._grad_view.of(first, last, lambda: self.buffers)
        if stacked_buffers.data_ptr() != first.data_ptr():  # a copy: the buffers are not at equal strides
            buffers, weight_grads = self.buffers, list(_outer_products(grad, x, ends).unbind())
            torch._foreach_copy_(buffers, weight_grads) if stale else torch._foreach_add_(buffers, weight_grads)
        elif x.is_cuda and weight_grads_unsupported(grad, x, stacked_buffers) is None:
            add_weight_grads_triton(stacked_buffers, grad, x, ends, overwrite=stale)
        elif stale:
            stacked_buffers.copy_(_outer_products(grad, x, ends))
        else:
            stacked_buffers.add_(_outer_products(grad, x, ends))

    def mark_stale(self) -> None:
        """Mark the start of an update: the next gradients overwrite the buffers. The first buffer carries the mark for all."""
        mark_stale(_grad_buffer(self.weights[0]))

    def stale_buffers(self) -> list[Tensor]:
        """Buffers that received no gradient in this update and still hold the previous update's. Clears the mark."""
        return self.buffers if take_stale(_grad_buffer(self.weights[0])) else []


class _StackedView:
    """Caches the view [E, …] of E tensors at equal strides until they move."""

    def __init__(self) -> None:
        self._addresses: tuple[int, int] | None = None
        self._view: Tensor | None = None

    def of(self, first: Tensor, last: Tensor, tensors: Callable[[], Sequence[Tensor]]) -> Tensor:
        """`stack_tensors(tensors())`, recomputed only if `first` or `last` has moved."""
        addresses = first.data_ptr(), last.data_ptr()
        if self._view is not None and addresses == self._addresses:
            return self._view
        result = stack_tensors(tensors())
        if result.data_ptr() == addresses[0]:
            self._addresses, self._view = addresses, result
        return result


def _grad_buffer(weight: Tensor) -> Tensor:
    return weight.main_grad  # type: ignore[attr-defined, no-any-return]


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape to [E, …]: a view if they are at equal strides in one storage, else a copy."""
    first = tensors[0]
    addresses = [tensor.data_ptr() for tensor in tensors]
    step = addresses[1] - addresses[0] if len(addresses) > 1 else first.nbytes
    size = first.element_size()
    evenly_spaced = all(b - a == step for a, b in itertools.pairwise(addresses)) and step >= first.nbytes and step % size == 0
    storage = first.untyped_storage()
    within_storage = addresses[-1] + first.nbytes <= storage.data_ptr() + storage.nbytes()
    if not (evenly_spaced and within_storage and all(tensor.is_contiguous() for tensor in tensors)):
        return torch.stack(list(tensors))
    return first.detach().as_strided((len(tensors), *first.shape), (step // size, *first.stride()))


type Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Products [R, out] of rows [R, in] with their group's weight, from rows, `ends` [E] and weights [E, out, in]."""


def library_product(x: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    return _products(x, weights.mT, ends)


def grouped_linear(x: Tensor, ends: Tensor, weights: WeightStack, product: Product = library_product) -> Tensor:
    """x [R, in], sorted by group → [R, out]. `ends` [E] int32: end of each group's rows, on x's device.

    If the weights have `main_grad` buffers, their gradients are added there and autograd gets none. product: computes the forward pass.
    """
    if not len(x):
        # No kernel accepts zero rows. The product keeps the result in the graph, so that earlier layers get gradients.
        return x @ weights.weights[0].t()
    return _GroupedLinear.apply(x, ends, weights, product, *weights.autograd_weights(x))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, weights: WeightStack, product: Product, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weights = weights  # parameters, which outlive the graph
        return product(x, ends, weights.stacked)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, weights = grads[0].contiguous(), ctx.weights
        x, ends = ctx.saved_tensors
        x_grad = _products(grad, weights.stacked, ends) if ctx.needs_input_grad[0] else None
        weight_grads: Sequence[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 4)
        if weights.has_grad_buffers:
            if weights.weights[0].requires_grad:
                weights.add_gradients(grad, x, ends)
        elif ctx.needs_input_grad[4]:
            weight_grads = _outer_products(grad, x, ends).unbind()
        return x_grad, None, None, None, *weight_grads


def _products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [R, in] times weight [E, in, out], group by group."""
    if _aligned(x, *weight.shape[1:]):
        return F.grouped_mm(x, weight, offs=ends)
    return torch.cat([rows @ each for rows, each in zip(_groups(x, ends), weight, strict=True)])


def _outer_products(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad [R, out], x [R, in] → each group's sum of outer products [E, out, in], zeros for a group without rows."""
    if _aligned(x, grad.shape[1], x.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=ends)
    return torch.stack([a.t() @ b for a, b in zip(_groups(grad, ends), _groups(x, ends), strict=True)])


def _aligned(x: Tensor, *widths: int) -> bool:
    return all(width * x.element_size() % ROW_BYTES == 0 for width in widths)


def _groups(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(ends[:-1].cpu().long())


@dataclass(frozen=True)
class OuterProductTiles:
    """Launch configuration of `add_outer_products_kernel`: the fastest on an H200 (docs/benchmarks/experts.md)."""

    bm: int = 128
    bn: int = 128
    bk: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit
@no_type_check
def add_outer_products_kernel(
    grad,  # descriptor [R, M], block [BK, BM]
    x,  # descriptor [R, N], block [BK, BN]
    out_ptr,  # fp32, M x N of each group, `stride` apart
    ends_ptr,  # int32 [E]
    stride,
    m,
    n,
    OVERWRITE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    column_tiles = tl.cdiv(n, BN)
    e = tl.program_id(1)
    row0 = (tl.program_id(0) // column_tiles) * BM
    column0 = (tl.program_id(0) % column_tiles) * BN
    end = tl.load(ends_ptr + e)
    start = 0
    if e > 0:
        start = tl.load(ends_ptr + e - 1)
    if OVERWRITE or end > start:
        z = tl.zeros((BM, BN), dtype=tl.float32)
        whole = (end - start) // BK
        for step in range(whole):
            a = grad.load([start + step * BK, row0])
            b = x.load([start + step * BK, column0])
            z = tl.dot(a.T, b, z)
        if start + whole * BK < end:
            # Rows after the end of the group belong to the next group and count as zeros.
            a = grad.load([start + whole * BK, row0])
            b = x.load([start + whole * BK, column0])
            inside = start + whole * BK + tl.arange(0, BK) < end
            a = tl.where(inside[:, None], a, 0.0).to(a.dtype)
            b = tl.where(inside[:, None], b, 0.0).to(b.dtype)
            z = tl.dot(a.T, b, z)
        row = row0 + tl.arange(0, BM)
        column = column0 + tl.arange(0, BN)
        inside = (row < m)[:, None] & (column < n)[None, :]
        pointers = out_ptr + e.to(tl.int64) * stride + row[:, None] * n + column[None, :]
        if not OVERWRITE:
            z += tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, z, mask=inside)


def weight_grads_unsupported(grad: Tensor, x: Tensor, out: Tensor) -> str | None:
    """The reason why `add_weight_grads_triton` does not support these tensors; None if it does."""
    if not (x.is_cuda or INTERPRETED):
        return f"needs CUDA (or TRITON_INTERPRET=1), x is on {x.device}"
    if x.dtype not in products.HALF_DTYPES or out.dtype != torch.float32:
        return f"adds products of bf16 or fp16 to fp32, got {x.dtype} and {out.dtype}"
    if not (out.stride()[1:] == (out.shape[2], 1) and grad.is_contiguous() and x.is_contiguous()) or grad.shape[1] % 8 or x.shape[1] % 8:
        return "needs contiguous rows at multiples of 16 bytes"
    return None


def add_weight_grads_triton(out: Tensor, grad: Tensor, x: Tensor, ends: Tensor, *, overwrite: bool) -> None:
    """Add each group's sum of outer products of grad [R, M] and x [R, N] to `out` [E, M, N] fp32, or overwrite it."""
    groups, m, n = out.shape
    t = OuterProductTiles()
    with on_device_of(x):
        launcher(add_outer_products_kernel, (triton.cdiv(m, t.bm) * triton.cdiv(n, t.bn), groups))(
            TensorDescriptor.from_tensor(grad, [t.bk, t.bm]), TensorDescriptor.from_tensor(x, [t.bk, t.bn]), out, ends, out.stride(0),
            m, n, OVERWRITE=overwrite, BM=t.bm, BN=t.bn, BK=t.bk, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
