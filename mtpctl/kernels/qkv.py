"""Splits the output of a fused QKV layer into attention heads, with QK norm and rotary embedding.

    mixed [t, groups, (queries + 1) d + w]  →  queries [t, groups · queries, d], keys [t, groups, d], values [t, groups, w]
    if gated: (2 queries + 1) d + w         →  and gates like queries

A group is one key-value head and the query heads that share it. Queries and keys are RMS-normed if the family has QK norm (arXiv
2302.05442), then rotated. On CUDA one Triton kernel does all of this in fp32 and rounds the results once; a second kernel computes the
gradients. `mixed` is saved for the backward pass only if the family has QK norm.

RoPE (arXiv 2104.09864) pairs dimension i of a head with i + n:

    out[i]     = x[i] cos[i] − x[i + n] sin[i]    i < n, half the number of rotated dimensions
    out[i + n] = x[i + n] cos[i] + x[i] sin[i]    dimensions from 2 n on are unchanged

Shape legend: t tokens, g groups, Q query heads per group, d head width, w width of values (d in most families, never above d), n half the
number of rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from mtpctl.kernels.norm import rms_norm
from mtpctl.kernels.products import add_to_buffer, autograd_leaf
from mtpctl.kernels.triton_support import launcher, on_device_of, tl, triton

TILE_ELEMENTS = 2048
"""Tokens times columns that a program processes at a time."""

type Angles = tuple[Tensor, Tensor]
"""Cosine and sine of each token, fp32 [t, n]."""


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [t, heads, d] by cos and sin, fp32 [t, n]. Computes in fp32 on CUDA, and in x's dtype on a CPU."""
    if x.is_cuda:
        return rotate_pairs(x.float(), cos, sin).to(x.dtype)
    return rotate_pairs(x, cos.to(x.dtype), sin.to(x.dtype))


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary` in the dtype of its arguments."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Layout of `mixed`: in each of the `groups` groups, `queries` query heads, as many gate heads if `gated`, a key head and a value head.

    All heads have `width` columns, except for value heads, which have `value_width` (0: `width`).
    """

    groups: int
    queries: int
    width: int
    gated: bool = False
    value_width: int = 0

    @property
    def sizes(self) -> list[int]:
        """Columns of a group's queries, gates, key and value."""
        query_columns = self.queries * self.width
        return [query_columns, query_columns if self.gated else 0, self.width, self.value_width or self.width]


class HeadNorm(NamedTuple):
    """QK norm: x / sqrt(mean x² + eps) · (offset + weight), with a weight [d] for queries and one for keys."""

    queries: Tensor
    keys: Tensor
    eps: float
    offset: float = 0.0


class Heads(NamedTuple):
    """queries [t, g Q, d], keys [t, g, d] and values [t, g, w], all contiguous; gates like queries, or empty if not gated."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gates: Tensor


def split_heads(mixed: Tensor, layout: HeadLayout, norm: HeadNorm | None, angles: Angles | None) -> Heads:
    """Split `mixed` [t, …] into heads, normed if `norm` is set and rotated if `angles` is set."""
    if not mixed.is_cuda:
        return split_heads_torch(mixed, layout, norm, angles)
    weights = (None, None) if norm is None else (autograd_leaf(norm.queries, mixed), autograd_leaf(norm.keys, mixed))
    return Heads(*_SplitHeads.apply(mixed, *weights, layout, norm, angles))


def split_heads_torch(mixed: Tensor, layout: HeadLayout, norm: HeadNorm | None, angles: Angles | None) -> Heads:
    parts = mixed.unflatten(-1, (layout.groups, sum(layout.sizes))).split(layout.sizes, dim=-1)
    # Contiguous copies: a saved view would keep the tensor of all heads in memory.
    widths = [layout.width] * 3 + [layout.sizes[-1]]
    queries, gates, keys, values = (
        part.reshape(len(mixed), layout.groups * size // width, width).contiguous()
        for part, size, width in zip(parts, layout.sizes, widths, strict=True)
    )
    if norm is not None:
        queries, keys = rms_norm(queries, norm.queries, norm.eps, norm.offset), rms_norm(keys, norm.keys, norm.eps, norm.offset)
    if angles is not None:
        queries, keys = (apply_rotary(x, *angles) for x in (queries, keys))
    return Heads(queries, keys, values, gates)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        layout: HeadLayout,
        norm: HeadNorm | None,
        angles: Angles | None,
    ) -> tuple[Tensor, ...]:
        mixed = mixed.contiguous()
        ctx.save_for_backward(None if norm is None else mixed, *(angles or ()))
        ctx.shape, ctx.layout, ctx.norm = mixed.shape, layout, norm  # The tensors of `norm` are parameters, which outlive the graph.
        return split_heads_triton(mixed, layout, norm, angles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, *angles = ctx.saved_tensors
        norm: HeadNorm | None = ctx.norm
        mixed_grad, query_weight_grad, key_weight_grad = split_heads_backward_triton(grads, mixed, ctx.layout, norm, tuple(angles) or None)
        if norm is not None and query_weight_grad is not None and key_weight_grad is not None:
            query_weight_grad, key_weight_grad = add_to_buffer(norm.queries, query_weight_grad), add_to_buffer(norm.keys, key_weight_grad)
        return mixed_grad.view(ctx.shape), query_weight_grad, key_weight_grad, None, None, None


@triton.jit
@no_type_check
def _tile(tokens, groups, WIDTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tokens, the columns of a head, their mask, and the tokens' row indices in [t, g]."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    return token, column, inside, (token.to(tl.int64) * groups + tl.program_id(1))[:, None]


@triton.jit
@no_type_check
def _load_angles(cos_ptr, sin_ptr, token, column, tokens, HALF: tl.constexpr):
    """Cosine and signed sine of each column, and the column it is paired with."""
    in_first_half, is_rotated = column < HALF, column < 2 * HALF
    pair = tl.where(in_first_half, column + HALF, column - HALF)
    index = token.to(tl.int64)[:, None] * HALF + (column % HALF)[None, :]
    inside = (token < tokens)[:, None] & is_rotated[None, :]
    cos = tl.load(cos_ptr + index, mask=inside, other=1.0)
    sin = tl.load(sin_ptr + index, mask=inside, other=0.0)
    return cos, tl.where(in_first_half[None, :], -sin, sin), tl.where(is_rotated, pair, column)


@triton.jit
@no_type_check
def _load_scale(weight_ptr, column, offset, WIDTH: tl.constexpr):
    return tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset


@triton.jit
@no_type_check
def _norm_and_rotate(
    source, out, inside, column, pair, cos, sin, weight_ptr, eps, offset, WIDTH: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr
):
    """Norm and rotate one head of the tokens at `source` [tokens, 1], and store it to `out` [tokens, 1]."""
    x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x = x * scale * _load_scale(weight_ptr, column, offset, WIDTH)[None, :]
    if ROTATED:
        other = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            other = other * scale * _load_scale(weight_ptr, pair, offset, WIDTH)[None, :]
        x = x * cos + other * sin
    tl.store(out + column[None, :], x.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _norm_and_rotate_backward(
    grads,
    source,
    out,
    inside,
    column,
    pair,
    cos,
    sin,
    weight_ptr,
    eps,
    offset,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Store the gradient of the input of `_norm_and_rotate` for one head to `out`.

    Returns these tokens' part of the gradient of the norm's weight; only valid if NORMED.
    """
    grad = tl.load(grads + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        grad = grad * cos - tl.load(grads + pair[None, :], mask=inside, other=0.0).to(tl.float32) * sin
    weight_grad = tl.sum(grad, 0)
    if NORMED:
        x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x = x * scale
        weight_grad = tl.sum(grad * x, 0)
        grad = grad * _load_scale(weight_ptr, column, offset, WIDTH)[None, :]
        grad = (grad - x * (tl.sum(grad * x, 1) / WIDTH)[:, None]) * scale
    tl.store(out + column[None, :], grad.to(out.dtype.element_ty), mask=inside)
    return weight_grad


@triton.jit
@no_type_check
def _copy(source, out, inside, column):
    tl.store(out + column[None, :], tl.load(source + column[None, :], mask=inside, other=0.0), mask=inside)


@triton.jit
@no_type_check
def split_heads_kernel(
    mixed_ptr,  # [t, g, (Q + 1) d + w], or (2 Q + 1) d + w if GATED
    cos_ptr,  # fp32 [t, n], read if ROTATED
    sin_ptr,
    query_weight_ptr,  # [d], read if NORMED
    key_weight_ptr,
    queries_ptr,  # [t, g Q, d]
    keys_ptr,  # [t, g, d]
    values_ptr,  # [t, g, w]
    gates_ptr,  # [t, g Q, d], written if GATED
    tokens,
    groups,
    eps,
    offset,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    KEY: tl.constexpr = QUERIES * (2 if GATED else 1) * WIDTH
    token, column, inside, row = _tile(tokens, groups, WIDTH, TOKENS, COLUMNS)
    source, key_row, query_row = mixed_ptr + row * (KEY + WIDTH + VALUE_WIDTH), row * WIDTH, row * QUERIES * WIDTH
    cos, sin, pair = 1.0, 0.0, column
    if ROTATED:
        cos, sin, pair = _load_angles(cos_ptr, sin_ptr, token, column, tokens, HALF)
    for i in range(QUERIES):
        out = queries_ptr + query_row + i * WIDTH
        _norm_and_rotate(source + i * WIDTH, out, inside, column, pair, cos, sin, query_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED)
    if GATED:
        for i in range(QUERIES):
            _copy(source + (QUERIES + i) * WIDTH, gates_ptr + query_row + i * WIDTH, inside, column)
    _norm_and_rotate(source + KEY, keys_ptr + key_row, inside, column, pair, cos, sin, key_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED)
    inside = inside & (column < VALUE_WIDTH)[None, :]
    _copy(source + KEY + WIDTH, values_ptr + row * VALUE_WIDTH, inside, column)


@triton.jit
@no_type_check
def split_heads_backward_kernel(
    queries_grad_ptr,  # [t, g Q, d]
    keys_grad_ptr,  # [t, g, d]
    values_grad_ptr,  # [t, g, w]
    gates_grad_ptr,  # [t, g Q, d], read if GATED
    mixed_ptr,  # as in `split_heads_kernel`, read if NORMED
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    mixed_grad_ptr,  # like mixed
    weight_grads_ptr,  # fp32 [programs, 2, d]: of queries, of keys; written if NORMED
    tokens,
    groups,
    eps,
    offset,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    KEY: tl.constexpr = QUERIES * (2 if GATED else 1) * WIDTH
    token, column, inside, row = _tile(tokens, groups, WIDTH, TOKENS, COLUMNS)
    mixed_row, key_row, query_row = row * (KEY + WIDTH + VALUE_WIDTH), row * WIDTH, row * QUERIES * WIDTH
    cos, sin, pair = 1.0, 0.0, column
    if ROTATED:
        cos, sin, pair = _load_angles(cos_ptr, sin_ptr, token, column, tokens, HALF)
    query_weight_grad = tl.zeros((COLUMNS,), dtype=tl.float32)
    for i in range(QUERIES):
        head = mixed_row + i * WIDTH
        query_weight_grad += _norm_and_rotate_backward(
            queries_grad_ptr + query_row + i * WIDTH, mixed_ptr + head, mixed_grad_ptr + head,
            inside, column, pair, cos, sin, query_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED,
        )  # fmt: skip
    if GATED:
        for i in range(QUERIES):
            _copy(gates_grad_ptr + query_row + i * WIDTH, mixed_grad_ptr + mixed_row + (QUERIES + i) * WIDTH, inside, column)
    head = mixed_row + KEY
    key_weight_grad = _norm_and_rotate_backward(
        keys_grad_ptr + key_row, mixed_ptr + head, mixed_grad_ptr + head,
        inside, column, pair, cos, sin, key_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED,
    )  # fmt: skip
    value_inside = inside & (column < VALUE_WIDTH)[None, :]
    _copy(values_grad_ptr + row * VALUE_WIDTH, mixed_grad_ptr + mixed_row + KEY + WIDTH, value_inside, column)
    if NORMED:
        out = weight_grads_ptr + (tl.program_id(0) * groups + tl.program_id(1)) * 2 * WIDTH + column
        tl.store(out, query_weight_grad, mask=column < WIDTH)
        tl.store(out + WIDTH, key_weight_grad, mask=column < WIDTH)


def split_heads_triton(mixed: Tensor, layout: HeadLayout, norm: HeadNorm | None, angles: Angles | None) -> tuple[Tensor, ...]:
    """The fields of `Heads` from contiguous `mixed`, without autograd."""
    tokens, groups, query_heads, width = len(mixed), layout.groups, layout.groups * layout.queries, layout.width
    queries, gates = mixed.new_empty(tokens, query_heads, width), mixed.new_empty(tokens, query_heads if layout.gated else 0, width)
    keys, values = mixed.new_empty(tokens, groups, width), mixed.new_empty(tokens, groups, layout.sizes[-1])
    if tokens:
        with on_device_of(mixed):
            launcher(split_heads_kernel, _grid(tokens, layout))(
                mixed, *(angles or (mixed, mixed)), *_weights(norm, mixed), queries, keys, values, gates,
                tokens, groups, **_launch_options(layout, norm, angles),
            )  # fmt: skip
    return queries, keys, values, gates


def split_heads_backward_triton(
    grads: Sequence[Tensor], mixed: Tensor | None, layout: HeadLayout, norm: HeadNorm | None, angles: Angles | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `mixed` and, in fp32, of the two norm weights (None without a norm), from those of queries, keys, values and gates.

    mixed: may be None if `norm` is.
    """
    queries_grad, keys_grad, values_grad, gates_grad = (grad.contiguous() for grad in grads)
    tokens, groups = len(queries_grad), layout.groups
    mixed_grad = queries_grad.new_empty(tokens, groups * sum(layout.sizes))
    grid = _grid(tokens, layout)
    weight_grads = torch.empty(grid[0] * groups if norm else 0, 2, layout.width, dtype=torch.float32, device=queries_grad.device)
    if tokens:
        with on_device_of(queries_grad):
            launcher(split_heads_backward_kernel, grid)(
                queries_grad, keys_grad, values_grad, gates_grad, mixed_grad if mixed is None else mixed,
                *(angles or (mixed_grad, mixed_grad)), *_weights(norm, mixed_grad), mixed_grad, weight_grads,
                tokens, groups, **_launch_options(layout, norm, angles),
            )  # fmt: skip
    if norm is None:
        return mixed_grad, None, None
    return mixed_grad, *weight_grads.sum(0)


def _tile_shape(layout: HeadLayout) -> tuple[int, int]:
    """Tokens and columns of a program's tile."""
    columns = triton.next_power_of_2(layout.width)
    return max(1, TILE_ELEMENTS // columns), columns


def _grid(tokens: int, layout: HeadLayout) -> tuple[int, int]:
    return triton.cdiv(tokens, _tile_shape(layout)[0]), layout.groups


def _launch_options(layout: HeadLayout, norm: HeadNorm | None, angles: Angles | None) -> dict[str, float]:
    block, columns = _tile_shape(layout)
    return {
        "eps": norm.eps if norm else 0.0,
        "offset": norm.offset if norm else 0.0,
        "QUERIES": layout.queries,
        "WIDTH": layout.width,
        "VALUE_WIDTH": layout.sizes[-1],
        "HALF": angles[0].shape[1] if angles else 1,
        "GATED": layout.gated,
        "NORMED": norm is not None,
        "ROTATED": angles is not None,
        "TOKENS": block,
        "COLUMNS": columns,
    }


def _weights(norm: HeadNorm | None, placeholder: Tensor) -> tuple[Tensor, Tensor]:
    return (placeholder, placeholder) if norm is None else (norm.queries, norm.keys)
