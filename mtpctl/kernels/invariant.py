"""Row-independent operations in half precision on CUDA, for `numerics: bitwise`: a row's result does not depend on the other rows.

An engine computes a token's row alone, among drafts, in a chunk of a prompt or in a batch; a trainer computes it in a packed sequence.
Matrix libraries select kernels by shape, and kernels sum in different orders. Here each operation sums in a fixed order, for any number of
rows:

    linear      each output is one accumulator over blocks of `BLOCK_K` inputs, in ascending order; no split-K
    attention   keys in blocks of `BLOCK_KEYS` from key 0 on, in ascending order, for any number of queries; no split-KV
    log_mass    exponentials as integers, whose sum does not depend on the order, nor on the ranks that share the vocabulary
    norm        one program per row (`mtpctl.kernels.norm`)

Tiles of `linear` differ in rows and columns only. Tensor cores compute each element of a tile from its own row and column, so an element is
the same in every tile and position. `python benchmarks/bitwise_gpu.py` tests this on a GPU.

Rotations and activations are elementwise, and engine and trainer run the same kernels (`mtpctl.kernels.qkv`, `mtpctl.kernels.activations`).

These functions have no gradients; `mtpctl.kernels.exact_grad` adds those of PyTorch's operations.

Shape legend: R rows, n inputs, N outputs, t tokens, r requests, h query heads, g key-value heads, d head width, V vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, no_type_check

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.activations import swiglu_triton
from mtpctl.kernels.norm import rms_norm_triton
from mtpctl.kernels.qkv import TILE_ELEMENTS, _load_angles, _norm_and_rotate
from mtpctl.kernels.triton_support import TensorDescriptor, on_device_of, tl, triton

BLOCK_K = 64
GROUP = 16
"""Number of row tiles that `linear_kernel` computes with one tile of the weight before the next, so that the tile stays in the L2 cache."""
QUERY_ROWS = 64
"""Rows of an attention tile: queries times query heads per key-value head. A `wgmma` instruction of one warp group computes 64 rows."""
BLOCK_KEYS = 64
BLOCK_COLUMNS = 4096
HALF_DTYPES = torch.bfloat16, torch.float16
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the output that a program computes at a time, and launch options."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = (Tile(64, 32, 4, 6), Tile(64, 64, 4, 6), Tile(64, 128, 4, 4), Tile(128, 64, 8, 4), Tile(128, 128, 8, 4), Tile(128, 256, 8, 3))
"""All have at least 64 rows, so that Hopper computes each with the same kind of instruction (`wgmma`)."""


class PagedKV(NamedTuple):
    """A paged KV cache. Keys and values of request i's token j are in slot j % size of page `block_table[i, j // size]`.

    keys, values: [pages, g, size, d] with contiguous last dimension. block_table: int32 [r, pages of a request]. lengths: int32 [r],
    the number of tokens of each request, including its queries.
    """

    keys: Tensor
    values: Tensor
    block_table: Tensor
    lengths: Tensor


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, tile: Tile | None = None) -> Tensor:
    """x [R, n] · weightᵀ [N, n] → [R, N] in `dtype`, by default that of x. n must be a multiple of 8.

    tile: selected by `tile_for` if None.
    """
    check_dtypes(x, weight)
    rows, columns = len(x), len(weight)
    out = x.new_empty(rows, columns, dtype=dtype or x.dtype)
    if not out.numel():
        return out
    x, weight = _aligned(x), _aligned(weight)
    multiprocessors = _multiprocessors(x.device)
    tile = tile or tile_for(rows, columns, multiprocessors)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    # A large tile occupies a whole multiprocessor, so each multiprocessor gets one program, which loops over tiles.
    programs = min(tiles, multiprocessors) if tile.rows * tile.columns >= 1 << 14 else tiles
    a = TensorDescriptor.from_tensor(x, [tile.rows, BLOCK_K])
    b = TensorDescriptor.from_tensor(weight, [tile.columns, BLOCK_K])
    with on_device_of(x):
        linear_kernel[(programs,)](
            a, b, out, rows, columns, x.shape[1],
            BM=tile.rows, BN=tile.columns, BK=BLOCK_K, GROUP=GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def check_dtypes(x: Tensor, weight: Tensor) -> None:
    """Assert that both factors of a product have the same half precision."""
    assert x.dtype == weight.dtype and x.dtype in HALF_DTYPES, f"{x.dtype} · {weight.dtype}: products of fp32 would be computed in TF32"


def _aligned(x: Tensor) -> Tensor:
    """x if its rows start at multiples of 16 bytes, as tensor descriptors require, otherwise a copy."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.new_empty(x.shape).copy_(x)


def tile_for(rows: int, columns: int, multiprocessors: int) -> Tile:
    """The widest tile with at least one tile per multiprocessor, else the narrowest. Its height depends on `rows` only."""
    height = 64 if rows <= 64 else 128
    tiles = [tile for tile in TILES if tile.rows == height]
    full_tiles = [tile for tile in tiles if triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) >= multiprocessors]
    return full_tiles[-1] if full_tiles else tiles[0]


@cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 3 in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [R, n] · weightᵀ [V, n] → fp32 [R, V]. Logits are not rounded to half precision."""
    return linear(hidden, weight, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean x² + eps) · (offset + weight) over the last dimension, in the dtype of x."""
    return rms_norm_triton(x.contiguous(), weight, eps, offset)


def swiglu(gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up · scale for the halves gate and up of the last dimension, in the dtype of `gate_up`. scale: per row; None means 1."""
    return swiglu_triton(gate_up, scale)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [t, heads, d], whose heads are contiguous, by the rows `positions` [t] of cos and sin, fp32 [limit, n]."""
    tokens, heads, width = x.shape
    out = x.new_empty(x.shape)
    columns = triton.next_power_of_2(width)
    block = max(1, TILE_ELEMENTS // columns)
    if out.numel():
        with on_device_of(x):
            rotate_kernel[(triton.cdiv(tokens, block), heads)](
                x, out, positions, cos, sin, tokens, x.stride(0), len(cos),
                HEADS=heads, WIDTH=width, HALF=cos.shape[1], TOKENS=block, COLUMNS=columns,
            )  # fmt: skip
    return out


def attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, *, lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed samples: query [t, h, d] to key and value [t, g, d] → [t, h, d].

    starts: int32 [r + 1], the index of each sample's first token, then t. longest: tokens of the longest sample, or an upper bound. lse:
    also return the log-sum-exp of the scores, fp32 [h, t]; otherwise the second tensor is empty.
    """
    sums = torch.empty(query.shape[1] if lse else 0, len(query), dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    key, value = (x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (key, value))
    strides = (0, key.stride(1), key.stride(0)), (0, value.stride(1), value.stride(0))
    _launch_attention(query, key, value, out, sums, starts, None, longest, scale, strides, size=0)
    return out, sums


def paged_attention(query: Tensor, pages: PagedKV, starts: Tensor, longest: int, scale: float, out: Tensor) -> None:
    """Causal attention of each request's last tokens to all of its tokens. Writes to `out` [t, h, d], like query.

    starts: int32 [r + 1], the index of each request's first query, then t. longest: the largest number of queries of a request, or an
    upper bound.
    """
    strides = tuple((x.stride(0), x.stride(1), x.stride(2)) for x in pages[:2])
    _launch_attention(query, pages.keys, pages.values, out, out, starts, pages, longest, scale, strides, size=pages.keys.shape[2])


def _launch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    pages: PagedKV | None,
    longest: int,
    scale: float,
    strides: tuple[tuple[int, ...], ...],
    *,
    size: int,
) -> None:
    heads, width = query.shape[1:]
    groups = key.shape[1]
    heads_per_group = heads // groups
    requests = len(starts) - 1
    if not out.numel() or requests == 0:
        return
    assert heads_per_group <= QUERY_ROWS, f"{heads_per_group} query heads per key-value head, at most {QUERY_ROWS}"
    grid = triton.cdiv(int(longest), QUERY_ROWS // heads_per_group), groups, requests
    block_width = max(16, triton.next_power_of_2(width))
    table, lengths = (starts, starts) if pages is None else (pages.block_table, pages.lengths)
    with on_device_of(query):
        attention_kernel[grid](
            query, key, value, out, sums, starts, lengths, table,
            scale * LOG2E, len(query), query.stride(0), out.stride(0), *strides[0], *strides[1], table.stride(0),
            PER_GROUP=heads_per_group, WIDTH=width, BLOCK_WIDTH=block_width, PAGE=size,
            BM=QUERY_ROWS, BN=BLOCK_KEYS, SUMS=pages is None and sums.numel() > 0, num_warps=4,
            num_stages=3 if block_width <= 128 else 2,  # wider heads fill the shared memory
        )  # fmt: skip


def log_mass(logits: Tensor, vocab: int | None = None, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """The largest of each row's logits fp32 [R, V], and log Σ exp(logit − largest), both fp32 [R, 1].

    group: ranks that share `vocab` columns. All get the results of the whole rows.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    rows, columns = logits.shape
    top, mass = logits.amax(-1, keepdim=True), torch.empty(rows, 1, dtype=torch.int64, device=logits.device)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
    bits = 62 - ((vocab or columns) - 1).bit_length()
    if rows:
        with on_device_of(logits):
            mass_kernel[(rows,)](logits, top, mass, columns, logits.stride(0), 2.0**bits, BLOCK=BLOCK_COLUMNS, num_warps=8)
    if group is not None:
        dist.all_reduce(mass, group=group)
    return top, mass.double().mul_(2.0**-bits).log_().float()


def log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax of each row of logits fp32 [R, V]."""
    top, log_sum = log_mass(logits)
    return (logits - top).sub_(log_sum)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs [R, c] of `tokens` [R, c] under logits [R, V]."""
    logits = logits.float()
    top, log_sum = log_mass(logits)
    return (logits.gather(1, tokens) - top) - log_sum


# --------------------------------------------------------------------------------------------------------------- kernels


# The number of rows changes with every step. Specializing on it would compile the kernel again, for the same arithmetic.
@triton.jit(do_not_specialize=["rows"])
@no_type_check
def linear_kernel(
    x,  # descriptor [R, n], block [BM, BK]
    weight,  # descriptor [N, n], block [BN, BK]
    out_ptr,  # [R, N]
    rows,
    columns,
    width,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, BM)
    column_tiles = tl.cdiv(columns, BN)
    group_tiles = GROUP * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        group = tile // group_tiles
        members = min(row_tiles - group * GROUP, GROUP)
        row0 = (group * GROUP + (tile % group_tiles) % members) * BM
        column0 = ((tile % group_tiles) // members) * BN
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for step in range(tl.cdiv(width, BK)):
            a = x.load([row0, step * BK])
            b = weight.load([column0, step * BK])
            sums = tl.dot(a, b.T, sums)
        row = row0 + tl.arange(0, BM)
        if BN == 256:
            # Store half of the columns at a time: a store needs shared memory for all of its values.
            left, right = sums.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            _store(out_ptr, left, row, column0 + tl.arange(0, BN // 2), rows, columns)
            _store(out_ptr, right, row, column0 + BN // 2 + tl.arange(0, BN // 2), rows, columns)
        else:
            _store(out_ptr, sums, row, column0 + tl.arange(0, BN), rows, columns)


@triton.jit
@no_type_check
def _store(out_ptr, values, row, column, rows, columns):
    out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit(do_not_specialize=["tokens", "limit"])
@no_type_check
def rotate_kernel(
    x_ptr,  # [t, heads, d], tokens at multiples of `stride`
    out_ptr,  # [t, heads, d]
    position_ptr,  # int64 [t]
    cos_ptr,  # fp32 [limit, n]
    sin_ptr,
    tokens,
    stride,
    limit,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, column, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, COLUMNS), tl.program_id(1)
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    position = tl.load(position_ptr + token, mask=token < tokens, other=0)
    cos, sin, pair = _load_angles(cos_ptr, sin_ptr, position, column, limit, HALF)
    row = token.to(tl.int64)[:, None]
    source, out = x_ptr + row * stride + head * WIDTH, out_ptr + (row * HEADS + head) * WIDTH
    _norm_and_rotate(source, out, inside, column, pair, cos, sin, cos_ptr, 0.0, 0.0, WIDTH, False, True)


# The number of tokens and the table's width change with every step. Specializing on them would compile the kernel again, for the same
# arithmetic. Specializing on other strides changes how values are loaded, but not the order of a sum.
@triton.jit(do_not_specialize=["tokens", "table_stride"])
@no_type_check
def attention_kernel(
    query_ptr,  # [t, h, d]
    key_ptr,  # [t, g, d], or [pages, g, PAGE, d]
    value_ptr,
    out_ptr,  # [t, h, d]
    lse_ptr,  # fp32 [h, t], written if SUMS
    starts_ptr,  # int32 [r + 1]
    lengths_ptr,  # int32 [r], read if PAGE
    table_ptr,  # int32 [r, pages of a request], read if PAGE
    scale,  # times log2(e), because the kernel uses exp2
    tokens,
    query_stride,
    out_stride,
    key_page_stride,
    key_head_stride,
    key_stride,
    value_page_stride,
    value_head_stride,
    value_stride,
    table_stride,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SUMS: tl.constexpr,
):
    QUERIES: tl.constexpr = BM // PER_GROUP
    request, group = tl.program_id(2), tl.program_id(1)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    first = tl.program_id(0) * QUERIES
    if first >= count:
        return
    length = count
    if PAGE > 0:
        length = tl.load(lengths_ptr + request)
    earlier = tl.maximum(length - count, 0)  # keys before the first query
    row, column = tl.arange(0, BM), tl.arange(0, BLOCK_WIDTH)
    index = first + row // PER_GROUP
    head = group * PER_GROUP + row % PER_GROUP
    inside = (index < count) & (row < QUERIES * PER_GROUP)
    columns = (column < WIDTH)[None, :]
    token = (start + index).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride + head[:, None] * WIDTH + column[None, :], mask=inside[:, None] & columns, other=0.0
    )
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    out = tl.zeros((BM, BLOCK_WIDTH), dtype=tl.float32)
    # Keys after a query are masked and add exactly 0, so its result does not depend on the other queries of its tile.
    for key0 in range(0, tl.minimum(earlier + tl.minimum(first + QUERIES, count), length), BN):
        position = key0 + tl.arange(0, BN)
        stored = position < length
        if PAGE > 0:
            page = tl.load(table_ptr + request.to(tl.int64) * table_stride + position // PAGE, mask=stored, other=0).to(tl.int64)
            key_slot = page * key_page_stride + (position % PAGE) * key_stride
            value_slot = page * value_page_stride + (position % PAGE) * value_stride
        else:
            key_slot = (start + position).to(tl.int64) * key_stride
            value_slot = (start + position).to(tl.int64) * value_stride
        keys = tl.load(key_ptr + group * key_head_stride + key_slot[:, None] + column[None, :], mask=stored[:, None] & columns, other=0.0)
        scores = tl.dot(query, keys.T) * scale
        scores = tl.where(position[None, :] <= (earlier + index)[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        mass = mass * rescale + tl.sum(weights, 1)
        values = tl.load(
            value_ptr + group * value_head_stride + value_slot[:, None] + column[None, :], mask=stored[:, None] & columns, other=0.0
        )
        out = tl.dot(weights.to(values.dtype), values, out * rescale[:, None])
        top = new_top
    mass = tl.where(mass > 0, mass, 1.0)  # a padded request has no keys
    out = out / mass[:, None]
    target = out_ptr + token[:, None] * out_stride + head[:, None] * WIDTH + column[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & columns)
    if SUMS:
        lse = (top + tl.log2(mass)) * 0.6931471805599453
        tl.store(lse_ptr + head.to(tl.int64) * tokens + token, lse, mask=inside)


# The sum of integers does not depend on its order. Specializing on sizes would compile the kernel again, for the same arithmetic.
@triton.jit(do_not_specialize=["columns", "stride"])
@no_type_check
def mass_kernel(
    logits_ptr,  # fp32 [R, V]
    top_ptr,  # fp32 [R]
    mass_ptr,  # int64 [R]
    columns,
    stride,
    scale,  # a power of two
    BLOCK: tl.constexpr,
):
    row = logits_ptr + tl.program_id(0).to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    top = tl.load(top_ptr + tl.program_id(0))
    masses = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, columns, BLOCK):
        logits = tl.load(row + start + column, mask=start + column < columns, other=float("-inf"))
        masses += (tl.exp(logits - top) * scale).to(tl.int64)
    tl.store(mass_ptr + tl.program_id(0), tl.sum(masses, 0))
