"""Layout of samples in a packed sequence, whole and cut into the blocks of context-parallel ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.model.packing import Packing


def test_positions_restart_with_each_sample():
    assert Packing.of([3, 1, 2], "cpu").position_ids.tolist() == [0, 1, 2, 0, 0, 1]


def test_shift_stays_within_samples():
    assert Packing.of([3, 1, 2], "cpu").shift(torch.tensor([10, 11, 12, 20, 30, 31])).tolist() == [11, 12, 0, 0, 31, 0]


def test_cp_rank_has_a_block_from_the_front_and_one_from_the_back():
    first, second = (Packing.of([2, 5, 1], "cpu", cp_rank=rank, cp=2) for rank in range(2))
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([0, 1, 6, 7], [2, 3, 4, 5])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == ([0, 1, 4, 0], [0, 1, 2, 3])
    assert first.local_index.tolist() == [0, 1, -1, -1, -1, -1, 2, 3]


def test_block_attends_back_to_the_start_of_its_first_sample():
    first, second = (Packing.of([2, 5, 1], "cpu", cp_rank=rank, cp=2) for rank in range(2))
    stored = torch.cat([first.tokens, second.tokens])
    assert first.select_visible(stored).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (first.cu_seqlens_q.tolist(), first.cu_seqlens_kv.tolist()) == ([0, 2, 3, 4], [0, 2, 7, 8])
    # The second rank's blocks are adjacent; the sample that spans both has two parts.
    assert second.select_visible(stored).tolist() == [2, 3, 2, 3, 4, 5]
    assert (second.cu_seqlens_q.tolist(), second.cu_seqlens_kv.tolist()) == ([0, 2, 4], [0, 2, 6])


def test_sample_may_span_many_blocks():
    ranks = [Packing.of([1, 22, 1], "cpu", cp_rank=rank, cp=4) for rank in range(4)]
    middle = ranks[1]
    assert middle.tokens.tolist() == [3, 4, 5, 18, 19, 20]
    assert middle.select_visible(torch.cat([rank.tokens for rank in ranks])).tolist() == [*range(1, 6), *range(1, 21)]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_cp_ranks_have_equally_many_attention_pairs(cp):
    def pairs(packing: Packing) -> int:
        return sum(count * visible - count * (count - 1) // 2 for count, visible in zip(*packing.lengths, strict=True))

    assert len({pairs(Packing.of([64], "cpu", cp_rank=rank, cp=cp)) for rank in range(cp)}) == 1


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sample_is_rejected(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        Packing.of(lengths, "cpu")


def test_indivisible_token_count_is_rejected():
    with pytest.raises(ValueError, match="6 tokens do not divide over the 4 blocks of 2"):
        Packing.of([3, 3], "cpu", cp=2)


def over_ranks(lengths: list[int], cp: int, k: Tensor, v: Tensor) -> list[tuple[Packing, Tensor, Tensor]]:
    """Each rank's packing and its visible keys and values after gathering those of all ranks."""
    ranks = [Packing.of(lengths, "cpu", cp_rank=rank, cp=cp) for rank in range(cp)]
    stored = torch.cat([rank.tokens for rank in ranks])
    return [(rank, rank.select_visible(k[stored]), rank.select_visible(v[stored])) for rank in ranks]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_grouped_attention_matches_per_sample_attention(cp):
    """The grouped form against one causal attention per sample, for every rank."""
    from types import SimpleNamespace

    from mtpctl.model.core_attention import PackedAttention

    lengths = [5, 17, 1, 9, 2, 6]
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2))
    samples = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in sample), is_causal=True, enable_gqa=True).transpose(0, 1)
            for sample in samples
        ]
    )
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1))
    for packing, seen_k, seen_v in over_ranks(lengths, cp, k, v):
        actual = attention._attend_by_group(q[packing.tokens], seen_k, seen_v, packing)
        torch.testing.assert_close(actual, expected[packing.tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (12, 12), (12, 8), (8, 16), (24, 12)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("cp", [1, 2])
def test_flash_kernel_gets_padded_widths_and_the_original_scale(monkeypatch, dim, value_dim, cp, window):
    """The stand-in kernel requires one width for all, a multiple of 8, and the scale of the unpadded width."""
    from types import SimpleNamespace

    from mtpctl.model.core_attention import PackedAttention

    def kernel(q, k, v, arguments, scale, left):
        assert left == window
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0
        cu_q, cu_k, max_q, max_k = arguments[:4]
        out = torch.empty_like(q)
        for i in range(len(cu_q) - 1):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            count, visible = rows.stop - rows.start, keys.stop - keys.start
            assert count <= max_q and visible <= max_k
            mask = torch.ones(count, visible, dtype=torch.bool).tril(visible - count).triu(visible - count + 1 - (left or visible))
            qs, ks, vs = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
            out[rows] = F.scaled_dot_product_attention(qs, ks, vs, mask, scale=scale, enable_gqa=True).transpose(0, 1)
        return out, None

    monkeypatch.setattr("mtpctl.model.core_attention.flash_attention", kernel)
    lengths = [5, 17, 1, 9, 2, 6]
    torch.manual_seed(0)
    q, k = (torch.randn(sum(lengths), heads, dim) for heads in (4, 2))
    v = torch.randn(sum(lengths), 2, value_dim)
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1), window=window)
    for packing, seen_k, seen_v in over_ranks(lengths, cp, k, v):
        inputs = (q[packing.tokens], seen_k, seen_v, packing)
        torch.testing.assert_close(attention._flash(*inputs), attention._attend_by_group(*inputs), atol=1e-6, rtol=0)
