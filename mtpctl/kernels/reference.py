"""The oracle: float64, every logit in memory, gradients by autograd. For tests and for small checks of a suspicious number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtpctl.kernels.inputs import Rows, Shard
from mtpctl.kernels.reduce import gather


class _Whole(torch.autograd.Function):
    """All ranks' shards along dimension 0. Every rank computes the same loss from the whole, so its own slice of the gradient is all
    of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.mine = slice(shard.rank * x.shape[0], (shard.rank + 1) * x.shape[0])
        return gather(x, shard).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad[ctx.mine], None


def reference_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    rows: Rows,
    shard: Shard,
    sequence_parallel: bool,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log-prob, entropy, hit, top-k log-probs and top-k ids of the selected rows, in float64 (ids int64)."""
    hidden, weight = hidden.double(), weight.double()
    if sequence_parallel:
        hidden = _Whole.apply(hidden, shard)
    if shard.world > 1:
        weight = _Whole.apply(weight, shard)
    hidden, labels = rows.take(hidden), rows.take(labels).long()
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = rows.take(temperature).double().unsqueeze(1)
    logits = (hidden @ weight[: shard.total].T) / temperature
    logp = logits.log_softmax(1)
    mine = logp.gather(1, labels.unsqueeze(1)).squeeze(1)
    best = logp.topk(topk, dim=1)
    return (
        mine,
        -(logp.exp() * logp).sum(1),
        logits.gather(1, labels.unsqueeze(1)).squeeze(1) >= logits.amax(1),
        best.values.detach(),
        best.indices,
    )
