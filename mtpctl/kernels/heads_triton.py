# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""Triton kernels that split, norm and rotate the heads of attention, and compute the gradients; a program takes some tokens of a group.

Shape legend: t tokens, g groups, Q query heads of a group, d width of a head, n half the number of rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.kernels.heads import HeadLayout, HeadNorm
from mtpctl.kernels.triton_backend import on_device_of

ELEMENTS = 2048
"""Tokens times columns that a program takes at a time."""


@triton.jit
def _tile(tokens, groups, WIDTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tokens, the columns of a head, which of both there are, and the tokens' rows among those of all groups."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    return token, column, inside, (token.to(tl.int64) * groups + tl.program_id(1))[:, None]


@triton.jit
def _angles(cos_ptr, sin_ptr, token, column, tokens, HALF: tl.constexpr):
    """Cosine and signed sine that each column is multiplied with, and the column that it is paired with."""
    first, turns = column < HALF, column < 2 * HALF
    pair = tl.where(first, column + HALF, column - HALF)
    place = token.to(tl.int64)[:, None] * HALF + (column % HALF)[None, :]
    inside = (token < tokens)[:, None] & turns[None, :]
    cos = tl.load(cos_ptr + place, mask=inside, other=1.0)
    sin = tl.load(sin_ptr + place, mask=inside, other=0.0)
    return cos, tl.where(first[None, :], -sin, sin), tl.where(turns, pair, column)


@triton.jit
def _scale(weight_ptr, column, offset, WIDTH: tl.constexpr):
    return tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset


@triton.jit
def _rotate(
    source, place, inside, column, pair, cos, sin, weight_ptr, eps, offset, WIDTH: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr
):
    """One head of the tokens at `source` [tokens, 1], normed and rotated, to `place` [tokens, 1]."""
    x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x = x * scale * _scale(weight_ptr, column, offset, WIDTH)[None, :]
    if ROTATED:
        other = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            other = other * scale * _scale(weight_ptr, pair, offset, WIDTH)[None, :]
        x = x * cos + other * sin
    tl.store(place + column[None, :], x.to(place.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_backward(
    grads,
    source,
    place,
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
    """The gradient of one head before `_rotate`, to `place`, from that after it. Returns what these tokens add to the weight's gradient."""
    grad = tl.load(grads + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        grad = grad * cos - tl.load(grads + pair[None, :], mask=inside, other=0.0).to(tl.float32) * sin
    of_weight = tl.sum(grad, 0)
    if NORMED:
        x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x = x * scale
        of_weight = tl.sum(grad * x, 0)
        grad = grad * _scale(weight_ptr, column, offset, WIDTH)[None, :]
        grad = (grad - x * (tl.sum(grad * x, 1) / WIDTH)[:, None]) * scale
    tl.store(place + column[None, :], grad.to(place.dtype.element_ty), mask=inside)
    return of_weight


@triton.jit
def _copy(source, place, inside, column):
    tl.store(place + column[None, :], tl.load(source + column[None, :], mask=inside, other=0.0), mask=inside)


@triton.jit
def rotate_heads(
    mixed_ptr,  # [t, g, (Q + 2) d], with another Q d where GATED
    cos_ptr,  # fp32 [t, n], read where ROTATED
    sin_ptr,
    query_weight_ptr,  # [d], read where NORMED
    key_weight_ptr,
    queries_ptr,  # [t, g Q, d]
    keys_ptr,  # [t, g, d]
    values_ptr,  # [t, g, d]
    gates_ptr,  # [t, g Q, d], written where GATED
    tokens,
    groups,
    eps,
    offset,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    HEADS: tl.constexpr = QUERIES * (2 if GATED else 1) + 2
    token, column, inside, row = _tile(tokens, groups, WIDTH, TOKENS, COLUMNS)
    source, of_keys, of_queries = mixed_ptr + row * HEADS * WIDTH, row * WIDTH, row * QUERIES * WIDTH
    cos, sin, pair = 1.0, 0.0, column
    if ROTATED:
        cos, sin, pair = _angles(cos_ptr, sin_ptr, token, column, tokens, HALF)
    for i in range(QUERIES):
        place = queries_ptr + of_queries + i * WIDTH
        _rotate(source + i * WIDTH, place, inside, column, pair, cos, sin, query_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED)
    if GATED:
        for i in range(QUERIES):
            _copy(source + (QUERIES + i) * WIDTH, gates_ptr + of_queries + i * WIDTH, inside, column)
    key = source + (HEADS - 2) * WIDTH
    _rotate(key, keys_ptr + of_keys, inside, column, pair, cos, sin, key_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED)
    _copy(source + (HEADS - 1) * WIDTH, values_ptr + of_keys, inside, column)


@triton.jit
def rotate_heads_backward(
    queries_grad_ptr,  # [t, g Q, d]
    keys_grad_ptr,  # [t, g, d]
    values_grad_ptr,  # [t, g, d]
    gates_grad_ptr,  # [t, g Q, d], read where GATED
    mixed_ptr,  # as for `rotate_heads`, read where NORMED
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    mixed_grad_ptr,  # as mixed
    weight_grads_ptr,  # fp32 [programs, 2, d]: of queries, of keys; written where NORMED
    tokens,
    groups,
    eps,
    offset,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    GATED: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    HEADS: tl.constexpr = QUERIES * (2 if GATED else 1) + 2
    token, column, inside, row = _tile(tokens, groups, WIDTH, TOKENS, COLUMNS)
    of_mixed, of_keys, of_queries = row * HEADS * WIDTH, row * WIDTH, row * QUERIES * WIDTH
    cos, sin, pair = 1.0, 0.0, column
    if ROTATED:
        cos, sin, pair = _angles(cos_ptr, sin_ptr, token, column, tokens, HALF)
    of_query_weight = tl.zeros((COLUMNS,), dtype=tl.float32)
    for i in range(QUERIES):
        here = of_mixed + i * WIDTH
        of_query_weight += _rotate_backward(
            queries_grad_ptr + of_queries + i * WIDTH, mixed_ptr + here, mixed_grad_ptr + here,
            inside, column, pair, cos, sin, query_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED,
        )  # fmt: skip
    if GATED:
        for i in range(QUERIES):
            _copy(gates_grad_ptr + of_queries + i * WIDTH, mixed_grad_ptr + of_mixed + (QUERIES + i) * WIDTH, inside, column)
    here = of_mixed + (HEADS - 2) * WIDTH
    of_key_weight = _rotate_backward(
        keys_grad_ptr + of_keys, mixed_ptr + here, mixed_grad_ptr + here,
        inside, column, pair, cos, sin, key_weight_ptr, eps, offset, WIDTH, NORMED, ROTATED,
    )  # fmt: skip
    _copy(values_grad_ptr + of_keys, mixed_grad_ptr + of_mixed + (HEADS - 1) * WIDTH, inside, column)
    if NORMED:
        place = weight_grads_ptr + (tl.program_id(0) * groups + tl.program_id(1)) * 2 * WIDTH + column
        tl.store(place, of_query_weight, mask=column < WIDTH)
        tl.store(place + WIDTH, of_key_weight, mask=column < WIDTH)


def split(mixed: Tensor, layout: HeadLayout, norm: HeadNorm | None, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Queries, keys, values and gates, as of `mtpctl.kernels.heads.Heads`, from `mixed`, which is contiguous."""
    tokens, groups, many, width = len(mixed), layout.groups, layout.groups * layout.queries, layout.width
    queries, gates = mixed.new_empty(tokens, many, width), mixed.new_empty(tokens, many if layout.gated else 0, width)
    keys, values = mixed.new_empty(tokens, groups, width), mixed.new_empty(tokens, groups, width)
    if tokens:
        grid, shape = _launch(tokens, layout, angles)
        with on_device_of(mixed):
            rotate_heads[grid](
                mixed, *(angles or (mixed, mixed)), *_weights(norm, mixed), queries, keys, values, gates,
                tokens, groups, *_constants(norm), NORMED=norm is not None, ROTATED=angles is not None, **shape,
            )  # fmt: skip
    return queries, keys, values, gates


def joined_gradients(
    grads: Sequence[Tensor], mixed: Tensor | None, layout: HeadLayout, norm: HeadNorm | None, angles: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of `mixed` and of the norms' two weights, from those of queries, keys, values and gates.

    `mixed` is needed where there is a norm; the weights' gradients are None where there is none.
    """
    queries, keys, values, gates = (grad.contiguous() for grad in grads)
    tokens, groups = len(queries), layout.groups
    found = queries.new_empty(tokens, groups * sum(layout.sizes))
    grid, shape = _launch(tokens, layout, angles)
    of_weights = torch.empty(grid[0] * groups if norm else 0, 2, layout.width, dtype=torch.float32, device=queries.device)
    if tokens:
        with on_device_of(queries):
            rotate_heads_backward[grid](
                queries, keys, values, gates, found if mixed is None else mixed, *(angles or (found, found)), *_weights(norm, found),
                found, of_weights, tokens, groups, *_constants(norm), NORMED=norm is not None, ROTATED=angles is not None, **shape,
            )  # fmt: skip
    if norm is None:
        return found, None, None
    of_queries, of_keys = of_weights.sum(0).to(norm.queries.dtype)
    return found, of_queries, of_keys


def _launch(tokens: int, layout: HeadLayout, angles: tuple[Tensor, Tensor] | None) -> tuple[tuple[int, int], dict[str, int | bool]]:
    columns = triton.next_power_of_2(layout.width)
    block = max(1, ELEMENTS // columns)
    shape = {
        "QUERIES": layout.queries,
        "WIDTH": layout.width,
        "HALF": angles[0].shape[1] if angles else 1,
        "GATED": layout.gated,
        "TOKENS": block,
        "COLUMNS": columns,
    }
    return (triton.cdiv(tokens, block), layout.groups), shape


def _weights(norm: HeadNorm | None, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    return (stand_in, stand_in) if norm is None else (norm.queries, norm.keys)


def _constants(norm: HeadNorm | None) -> tuple[float, float]:
    """eps and offset of the norms."""
    return (0.0, 0.0) if norm is None else (norm.eps, norm.offset)
