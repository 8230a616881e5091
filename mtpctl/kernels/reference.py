"""The oracle: float64, every logit in memory, gradients by autograd. For tests and for small checks of a suspicious number."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.call import Call
from mtpctl.kernels.inputs import Shard
from mtpctl.kernels.reduce import gather


class _Context(AutogradContext, Protocol):
    mine: slice


class _Whole(torch.autograd.Function):
    """All ranks' shards along dimension 0. Every rank computes the same loss from the whole, so its own slice of the gradient is all
    of it."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, shard: Shard) -> Tensor:
        ctx.mine = slice(shard.rank * x.shape[0], (shard.rank + 1) * x.shape[0])
        return gather(x, shard).flatten(0, 1)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad[ctx.mine], None


def reference_scores(hidden: Tensor, weight: Tensor, labels: Tensor, call: Call, topk: int) -> tuple[Tensor, ...]:
    """log-prob, entropy, hit [N], top-k log-probs and ids [N, k], as `linear_logprob` returns them."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    hidden, weight = hidden.double(), weight.double()
    if call.shard.world > 1:
        weight = _Whole.apply(weight, call.shard)
    take, spread = call.rows.take, call.rows.spread
    hidden, labels = take(hidden), take(labels).long().unsqueeze(1)
    temperature = call.temperature
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = take(temperature).double().unsqueeze(1)
    logits = (hidden @ weight[: call.shard.total].T) / temperature
    logp = logits.log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    hit = logits.gather(1, labels).squeeze(1) >= logits.amax(1)
    best = logp.detach().topk(topk, dim=1)
    logprob = logp.gather(1, labels).squeeze(1)
    return spread(logprob.to(wide)), spread(entropy.to(wide)), spread(hit), spread(best.values.to(wide)), spread(best.indices)
