# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""Triton kernels of mixtures of experts: weight gradients put into fp32 buffers where those lie, and the sums of tokens' rows.

Shape legend: R rows, E groups of them, M and N the widths of a weight, T tokens, k rows of each, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mtpctl.kernels import products
from mtpctl.kernels.triton_backend import INTERPRETED, on_device_of

BLOCK = 1024
"""Columns of a sum that one program adds up."""


@dataclass(frozen=True)
class Tiles:
    """How `add_outer_products` is laid out on a card; what was fastest on an H200 (docs/benchmarks/experts.md)."""

    bm: int = 128
    bn: int = 128
    bk: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit
def add_outer_products(
    grad,  # descriptor [R, M], block [BK, BM]
    x,  # descriptor [R, N], block [BK, BN]
    into_ptr,  # fp32, M x N of each group, `stride` apart
    ends_ptr,  # int32 [E]
    stride,
    m,
    n,
    REPLACES: tl.constexpr,
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
    if REPLACES or end > start:
        z = tl.zeros((BM, BN), dtype=tl.float32)
        whole = (end - start) // BK
        for step in range(whole):
            a = grad.load([start + step * BK, row0])
            b = x.load([start + step * BK, column0])
            z = tl.dot(a.T, b, z)
        if start + whole * BK < end:
            # Rows behind the group's last are the next group's, and count as zeros.
            a = grad.load([start + whole * BK, row0])
            b = x.load([start + whole * BK, column0])
            inside = start + whole * BK + tl.arange(0, BK) < end
            a = tl.where(inside[:, None], a, 0.0).to(a.dtype)
            b = tl.where(inside[:, None], b, 0.0).to(b.dtype)
            z = tl.dot(a.T, b, z)
        row = row0 + tl.arange(0, BM)
        column = column0 + tl.arange(0, BN)
        inside = (row < m)[:, None] & (column < n)[None, :]
        place = into_ptr + e.to(tl.int64) * stride + row[:, None] * n + column[None, :]
        if not REPLACES:
            z += tl.load(place, mask=inside, other=0.0)
        tl.store(place, z, mask=inside)


@triton.jit
def sum_rows(
    rows_ptr,  # [R, H]
    row_of_ptr,  # int32 [T, k]
    out_ptr,  # [T, H]
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for nth in tl.static_range(K):
        row = tl.load(row_of_ptr + token * K + nth).to(tl.int64)
        total += tl.load(rows_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def refusal(grad: Tensor, x: Tensor, into: Tensor) -> str | None:
    """Why `add_weight_grads` cannot take these tensors, or None."""
    if not (x.is_cuda or INTERPRETED):
        return f"needs CUDA (or TRITON_INTERPRET=1), x is on {x.device}"
    if x.dtype not in products.HALF or into.dtype != torch.float32:
        return f"adds products of bf16 or fp16 to fp32, got {x.dtype} and {into.dtype}"
    if not (into[0].is_contiguous() and grad.is_contiguous() and x.is_contiguous()) or grad.shape[1] % 8 or x.shape[1] % 8:
        return "needs contiguous rows at multiples of 16 bytes"
    return None


def add_weight_grads(into: Tensor, grad: Tensor, x: Tensor, ends: Tensor, *, replaces: bool) -> None:
    """Add the sum of the outer products of each group's rows, grad [R, M] and x [R, N], to `into` [E, M, N] fp32.

    With `replaces` the sum replaces what `into` holds. `ends` [E]: as in `mtpctl.kernels.grouped.grouped_linear`.
    """
    groups, m, n = into.shape
    t = Tiles()
    with on_device_of(x):
        add_outer_products[(triton.cdiv(m, t.bm) * triton.cdiv(n, t.bn), groups)](
            TensorDescriptor.from_tensor(grad, [t.bk, t.bm]),
            TensorDescriptor.from_tensor(x, [t.bk, t.bn]),
            into,
            ends,
            into.stride(0),
            m,
            n,
            REPLACES=replaces,
            BM=t.bm,
            BN=t.bn,
            BK=t.bk,
            num_warps=t.warps,
            num_stages=t.stages,
        )


def summed(rows: Tensor, row_of: Tensor) -> Tensor:
    """rows [R, H], row_of [T, k] int32 → [T, H]: the sum of each token's rows, added up in fp32."""
    out = rows.new_empty(len(row_of), rows.shape[1])
    with on_device_of(rows):
        sum_rows[(len(row_of), triton.cdiv(rows.shape[1], BLOCK))](rows, row_of, out, rows.shape[1], K=row_of.shape[1], BLOCK=BLOCK)
    return out
