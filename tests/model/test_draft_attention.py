"""A drafter's attention, and attention with sinks: joined from parts it equals one softmax over all, in value and gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mtpctl.model.core_attention import PackedAttention, combined_attention
from mtpctl.model.packing import EarlierDepths, Packing

HEADS, KV_HEADS, WIDTH, VALUES = 6, 3, 8, 5
LENGTHS = [7, 12, 5]


class PlainPrefix:
    """Causal attention of each sample within itself to the last `window` keys, with all scores in memory; like a flash kernel's, its
    backward pass takes the output and log-sum-exp."""

    def __init__(self, lengths: list[int], scale: float, window: int | None = None) -> None:
        sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        token = torch.arange(len(sample))
        back = token[:, None] - token
        self.hidden = (sample[:, None] != sample) | (back < 0) | (back >= (window or len(sample)))
        self.scale = scale

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        return (torch.einsum("thd,shd->hts", q, k) * self.scale).masked_fill(self.hidden, float("-inf"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores, v = self._scores(q, k), v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        return torch.einsum("hts,shw->thw", scores.softmax(-1), v), scores.logsumexp(-1).T

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = (self._scores(q, k) - lse.T[..., None]).exp()
        wide_v, wide_k = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (v, k))
        by_score = weights * (torch.einsum("thw,shw->hts", grad, wide_v) - (grad * out).sum(-1).T[..., None]) * self.scale
        by_k, by_v = torch.einsum("hts,thd->shd", by_score, q), torch.einsum("hts,thw->shw", weights, grad)
        return torch.einsum("hts,shd->thd", by_score, wide_k), *(x.unflatten(1, (KV_HEADS, -1)).sum(2) for x in (by_k, by_v))


@pytest.mark.parametrize("later", [0, 1, 2])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (None, True), (4, False), (4, True)])
def test_combined_attention_matches_one_softmax(later: int, window: int | None, has_sinks: bool) -> None:
    """A query of a later depth is at a later position, so its window has fewer of the first depth's keys."""
    g = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    q, k, keys = (
        torch.randn(*shape, WIDTH, generator=g, dtype=torch.float64)
        for shape in ((tokens, HEADS), (tokens, KV_HEADS), (later, tokens, KV_HEADS))
    )
    v, values = (torch.randn(*shape, VALUES, generator=g, dtype=torch.float64) for shape in ((tokens, KV_HEADS), (later, tokens, KV_HEADS)))
    sinks = torch.randn(HEADS, generator=g, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, *((keys, values) if later else ()), *((sinks,) if has_sinks else ()))]
    module = PackedAttention(SimpleNamespace(context_parallel_size=1), softmax_scale=WIDTH**-0.5, window=window)  # type: ignore[arg-type]
    if has_sinks:
        del module.softmax_offset
        module.softmax_offset = sinks  # type: ignore[assignment]
    packing = Packing.of(LENGTHS, "cpu")
    if later:
        packing = packing.at_depth(packing.position_ids + later, None, EarlierDepths([k, *keys[:-1]], [v, *values[:-1]]))
    whole = module(q, [k, *keys][-1], [v, *values][-1], None, packed_seq_params=packing).view(tokens, HEADS, VALUES)
    prefix = PlainPrefix(LENGTHS, WIDTH**-0.5, None if window is None else window - later)
    joined = combined_attention(q, k, v, (keys, values) if later else None, prefix, WIDTH**-0.5, sinks if has_sinks else None)
    torch.testing.assert_close(joined, whole, atol=1e-6, rtol=0)  # log-sum-exps are fp32
    weights = torch.randn(joined.shape, generator=g, dtype=torch.float64)
    for tensor, expected in zip(
        torch.autograd.grad((joined * weights).sum(), leaves), torch.autograd.grad((whole * weights).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)
    assert not later or (packing.earlier is not None and len(packing.earlier.keys) == later + 1)


@pytest.mark.parametrize("window", [3, 4, 5])
def test_window_and_sinks_match_a_written_out_softmax(window: int) -> None:
    """A window of n are the n last tokens, the query's own included: one more or less would be another result."""
    g = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    q, k, v = (
        torch.randn(tokens, heads, width, generator=g, dtype=torch.float64) for heads, width in ((6, WIDTH), (3, WIDTH), (3, VALUES))
    )
    sinks = torch.randn(HEADS, generator=g, dtype=torch.float64)
    module = PackedAttention(SimpleNamespace(context_parallel_size=1), window=window)  # type: ignore[arg-type]
    del module.softmax_offset
    module.softmax_offset = sinks  # type: ignore[assignment]
    actual = module(q, k, v, None, packed_seq_params=Packing.of(LENGTHS, "cpu")).view(tokens, HEADS, VALUES)
    starts = [sum(LENGTHS[:i]) for i, length in enumerate(LENGTHS) for _ in range(length)]
    for token, start in enumerate(starts):
        first = max(start, token + 1 - window)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = (k[first : token + 1, group] @ q[token, head] * WIDTH**-0.5).exp()
            expected = scores @ v[first : token + 1, group] / (scores.sum() + sinks[head].exp())
            torch.testing.assert_close(actual[token, head], expected, atol=1e-12, rtol=0)
