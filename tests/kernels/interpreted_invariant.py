"""`mtpctl.kernels.invariant` under Triton's interpreter, in fp16, because the interpreter does not support bf16 products.

`test_interpreted.py` runs this file in a separate process, because the interpreter is selected at import.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mtpctl.kernels import invariant
from mtpctl.kernels.invariant import PagedKV, Tile
from mtpctl.kernels.qkv import HeadLayout, rotate_pairs, split_heads_triton

HALF = torch.float16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.mark.parametrize("columns", [1, 270])
def test_product_matches_float64_for_every_tile(columns: int) -> None:
    x, weight = drawn(67, 72), drawn(columns, 72, seed=1)
    expected = x.double() @ weight.double().T
    for tile in (None, Tile(64, 32, 4, 2), Tile(128, 256, 8, 2)):
        out = invariant.linear(x, weight, torch.float32, tile)
        assert (out.double() - expected).abs().max() < 1e-4
    assert torch.equal(invariant.linear(x, weight), invariant.linear(x, weight, torch.float32).to(HALF))
    assert invariant.linear(x[:0], weight).shape == (0, columns)


def test_rows_that_are_not_aligned_are_copied() -> None:
    wide, weight = drawn(5, 44), drawn(6, 40, seed=1)
    assert torch.equal(invariant.linear(wide[:, 3:43], weight), invariant.linear(wide[:, 3:43].contiguous(), weight))
    row = wide[:1, :40].contiguous()
    assert torch.equal(invariant.linear(row.as_strided((1, 40), (1, 1)), weight), invariant.linear(row, weight))


@pytest.mark.parametrize(
    ("units", "rows", "columns", "expected"),
    [
        (132, 64, 4096, (64, 32)),  # no tile has 132 programs
        (132, 64, 8448, (64, 64)),  # 132 programs
        (132, 8, 22016, (64, 128)),
        (132, 65, 4096, (128, 64)),
        (132, 1024, 4096, (128, 128)),
        (132, 500, 4096, (128, 64)),
        (132, 8192, 4096, (128, 256)),
        (4, 1, 8, (64, 32)),
    ],
)
def test_tile_keeps_multiprocessors_busy(units: int, rows: int, columns: int, expected: tuple[int, int]) -> None:
    tile = invariant.tile_for(rows, columns, units)
    assert (tile.rows, tile.columns) == expected


def test_products_of_fp32_are_rejected() -> None:
    with pytest.raises(AssertionError, match="TF32"):
        invariant.linear(drawn(3, 40).float(), drawn(6, 40).float())


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention in float64 of the last tokens `query` [q, h, d] to all keys [s, g, d], and the log-sum-exp [h, q]."""
    per_group = query.shape[1] // key.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, key.repeat_interleave(per_group, 1), value.repeat_interleave(per_group, 1)))
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 32), (3, 1, 40)])
def test_packed_attention_matches_float64(heads: int, groups: int, width: int) -> None:
    lengths = [5, 1, 83, 0]
    total = sum(lengths)
    mixed = drawn(total, heads + 2 * groups, width)
    query, key, value = mixed.split([heads, groups, groups], 1)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    out, sums = invariant.attention(query.contiguous(), key, value, starts, 83, width**-0.5, lse=True)
    for start, length in zip(starts.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        expected, expected_sums = reference(query[part], key[part], value[part], width**-0.5)
        assert length == 0 or (out[part].double() - expected).abs().max() < 3e-3
        assert length == 0 or (sums[:, part].double() - expected_sums).abs().max() < 1e-3


def test_paged_attention_equals_packed_attention() -> None:
    """Requests with many queries, one, and a padded one without tokens; free slots have NaN, as unused memory may."""
    heads, groups, width, size = 4, 2, 32, 16
    lengths, counts = [83, 70, 9, 0], [83, 3, 1, 1]
    wholes = [drawn(length, heads + 2 * groups, width, seed=length) for length in lengths]
    cache = torch.full((20, groups, size, 2 * width), math.nan, dtype=HALF)
    table, free = torch.zeros(4, 6, dtype=torch.int32), iter(torch.randperm(19, generator=torch.Generator().manual_seed(1)) + 1)
    for request, (whole, length) in enumerate(zip(wholes, lengths, strict=True)):
        for token in range(length):
            if token % size == 0:
                table[request, token // size] = next(free)
            cache[table[request, token // size], :, token % size] = torch.cat(whole[token, heads:].split(groups), -1)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    query = torch.cat(
        [whole[len(whole) - count :, :heads] for whole, count in zip(wholes[:3], counts, strict=False)] + [drawn(1, heads, width)]
    )
    keys, values = cache.split(width, -1)
    out = torch.empty_like(query)
    invariant.paged_attention(query, PagedKV(keys, values, table, torch.tensor(lengths).int()), starts, 83, 0.2, out)
    for start, count, whole in zip(starts.tolist(), counts, wholes[:3], strict=False):
        q, k, v = (part.contiguous() for part in whole.split([heads, groups, groups], 1))
        alone, _ = invariant.attention(q, k, v, torch.tensor([0, len(whole)]).int(), len(whole), 0.2)
        assert torch.equal(out[start : start + count], alone[len(whole) - count :])
    assert out[-1].isfinite().all()


def test_rotation_equals_the_trainers() -> None:
    tokens, groups, queries, width, half = 9, 2, 3, 32, 12
    angles = torch.rand(40, half, generator=torch.Generator().manual_seed(2)) * 6
    positions = torch.tensor([0, 1, 2, 39, 5, 5, 7, 0, 1])
    mixed = drawn(tokens, groups * (queries + 2) * width)
    cos, sin = angles.cos(), angles.sin()
    heads = split_heads_triton(mixed, HeadLayout(groups, queries, width), None, (cos[positions], sin[positions]))
    grouped = mixed.unflatten(1, (groups, queries + 2, width))
    packed = torch.cat([grouped[:, :, :queries].flatten(1), grouped[:, :, queries].flatten(1)], 1)  # rows as in an engine
    query, key = packed.split([groups * queries * width, groups * width], 1)
    rotated = invariant.rotate(query.unflatten(1, (-1, width)), positions, cos, sin)
    assert torch.equal(rotated, heads[0])
    assert torch.equal(invariant.rotate(key.unflatten(1, (-1, width)), positions, cos, sin), heads[1])
    expected = rotate_pairs(query.unflatten(1, (-1, width)).float(), cos[positions], sin[positions])
    assert (rotated.float() - expected).abs().max() < 4e-3


def test_log_probs_match_float64_for_any_stride() -> None:
    padded = 9 * torch.randn(4, 5003, generator=torch.Generator().manual_seed(0))
    logits = padded[:, :4999]
    expected = logits.double().log_softmax(-1)
    assert (invariant.log_softmax(logits).double() - expected).abs().max() < 1e-5
    assert torch.equal(invariant.log_softmax(logits), invariant.log_softmax(logits.contiguous()))
    tokens = torch.tensor([[0, 3], [4998, 1], [5, 5], [77, 78]])
    assert torch.equal(invariant.token_logprobs(logits, tokens), invariant.log_softmax(logits).gather(1, tokens))
