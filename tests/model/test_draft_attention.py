"""A drafter's attention: joined from two parts it equals one softmax over both, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.model.core_attention import PackedAttention, joined_attention
from mtpctl.model.packing import EarlierDepths, Packing

HEADS, KV_HEADS, WIDTH, VALUES = 6, 3, 8, 5
LENGTHS = [7, 12, 5]


class PlainPrefix:
    """Causal attention of each sample within itself with all scores in memory; like a flash kernel's, its backward pass takes the output
    and log-sum-exp."""

    def __init__(self, lengths: list[int], scale: float) -> None:
        sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self.hidden = (sample[:, None] != sample) | torch.ones(len(sample), len(sample)).triu(1).bool()
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


@pytest.mark.parametrize("later", [1, 2])
def test_joined_attention_matches_one_softmax(later: int) -> None:
    g = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    q, k, keys = (
        torch.randn(*shape, WIDTH, generator=g, dtype=torch.float64)
        for shape in ((tokens, HEADS), (tokens, KV_HEADS), (later, tokens, KV_HEADS))
    )
    v, values = (torch.randn(*shape, VALUES, generator=g, dtype=torch.float64) for shape in ((tokens, KV_HEADS), (later, tokens, KV_HEADS)))
    leaves = [x.requires_grad_() for x in (q, k, v, keys, values)]
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.cp_group = WIDTH**-0.5, None
    packing = Packing.of(LENGTHS, "cpu")
    packing = packing.at_depth(packing.position_ids + later, None, EarlierDepths([k, *keys[:-1]], [v, *values[:-1]]))
    whole = module(q, keys[-1], values[-1], None, packed_seq_params=packing).view(tokens, HEADS, VALUES)
    joined = joined_attention(q, k, v, keys, values, PlainPrefix(LENGTHS, module.scale), module.scale)
    torch.testing.assert_close(joined, whole, atol=1e-6, rtol=0)  # log-sum-exps are fp32
    weights = torch.randn(joined.shape, generator=g, dtype=torch.float64)
    for tensor, expected in zip(
        torch.autograd.grad((joined * weights).sum(), leaves), torch.autograd.grad((whole * weights).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)
    assert len(packing.earlier.keys) == later + 1
