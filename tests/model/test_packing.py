"""Where each sample lies in a packed row, whole and cut into chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mtpctl.model import Packing


def test_positions_restart_with_each_sample():
    assert Packing.of([3, 1, 2], "cpu").position_ids.tolist() == [0, 1, 2, 0, 0, 1]


def test_shift_stays_within_samples():
    assert Packing.of([3, 1, 2], "cpu").shift(torch.tensor([10, 11, 12, 20, 30, 31]), fill=-1).tolist() == [11, 12, -1, -1, 31, -1]


def test_chunks_see_back_to_the_start_of_the_sample_they_begin_in():
    first, second = (Packing.of([2, 5, 1], "cpu", cp_rank=rank, cp=2) for rank in range(2))
    assert (first.chunk, first.seen) == (slice(0, 4), slice(0, 4))
    assert (second.chunk, second.seen) == (slice(4, 8), slice(2, 8))
    assert first.cu_seqlens_q.tolist() == first.cu_seqlens_kv.tolist() == [0, 2, 4]
    assert (second.cu_seqlens_q.tolist(), second.cu_seqlens_kv.tolist()) == ([0, 3, 4], [0, 5, 6])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == ([0, 1, 0, 1], [2, 3, 4, 0])


def test_a_sample_may_span_many_chunks():
    middle = Packing.of([1, 10, 1], "cpu", cp_rank=1, cp=4)
    assert (middle.chunk, middle.seen, middle.cu_seqlens_q.tolist()) == (slice(3, 6), slice(1, 6), [0, 3])


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sample(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        Packing.of(lengths, "cpu")


def test_tokens_that_do_not_divide():
    with pytest.raises(ValueError, match="7 tokens do not divide over 2"):
        Packing.of([3, 4], "cpu", cp=2)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_groups_attend_like_sample_by_sample(cp):
    """On a CPU: the grouped form against one causal attention a sample, for every chunk."""
    from types import SimpleNamespace

    from mtpctl.model.layers import PackedAttention

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
    for rank in range(cp):
        packing = Packing.of(lengths, "cpu", cp_rank=rank, cp=cp)
        found = attention._grouped(q[packing.chunk], k[packing.seen], v[packing.seen], packing)
        torch.testing.assert_close(found, expected[packing.chunk], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (12, 12), (12, 8), (8, 16), (24, 12)])
@pytest.mark.parametrize("cp", [1, 2])
def test_the_flash_kernel_is_given_what_it_takes(monkeypatch, dim, value_dim, cp):
    """One width for all, in eights, and a scale that does not count what was added: held by a stand-in that knows no other."""
    from types import SimpleNamespace

    from mtpctl.model.layers import PackedAttention

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, scale, enable_gqa):
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0 and window_size == (-1, 0) and enable_gqa
        out = torch.empty_like(q)
        for i in range(len(cu_q) - 1):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            count, seen = rows.stop - rows.start, keys.stop - keys.start
            assert count <= max_q and seen <= max_k
            mask = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
            qs, ks, vs = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
            out[rows] = F.scaled_dot_product_attention(qs, ks, vs, mask, scale=scale, enable_gqa=True).transpose(0, 1)
        return out

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    lengths = [5, 17, 1, 9, 2, 6]
    torch.manual_seed(0)
    q, k = (torch.randn(sum(lengths), heads, dim) for heads in (4, 2))
    v = torch.randn(sum(lengths), 2, value_dim)
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1))
    for rank in range(cp):
        packing = Packing.of(lengths, "cpu", cp_rank=rank, cp=cp)
        inputs = (q[packing.chunk], k[packing.seen], v[packing.seen], packing)
        torch.testing.assert_close(attention._flash(*inputs), attention._grouped(*inputs), atol=1e-6, rtol=0)
