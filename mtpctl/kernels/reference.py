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


def _logits(hidden: Tensor, weight: Tensor, call: Call) -> Tensor:
    """Scaled logits of the selected rows over the whole vocabulary, float64; `weight` is already that of all ranks."""
    temperature = call.temperature
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = call.rows.take(temperature).double().unsqueeze(1)
    return (call.rows.take(hidden.double()) @ weight[: call.shard.total].T) / temperature


def _whole_weight(weight: Tensor, call: Call) -> Tensor:
    weight = weight.double()
    return _Whole.apply(weight, call.shard) if call.shard.world > 1 else weight


def reference_draft(
    hidden: Tensor, teacher: Tensor, weight: Tensor, labels: Tensor, call: Call, loss: str, mix: float
) -> tuple[Tensor, ...]:
    """The summed loss, log-probs of the labels under draft and teacher, overlap, greedy acceptance and hits, as `linear_draft_loss` returns
    them. Sums run over the whole vocabulary, every probability in memory."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    whole = _whole_weight(weight, call)
    labels = call.rows.take(labels).long().unsqueeze(1)
    logq = _logits(hidden, whole, call).log_softmax(1)
    logp = _logits(teacher.detach(), whole.detach(), call).log_softmax(1)
    p, q = logp.exp(), logq.exp()
    picked = logq.gather(1, labels).squeeze(1)
    overlap = torch.minimum(p, q).sum(1)
    terms = {"ce": -picked, "soft_ce": -(p * logq).sum(1), "kl": (p * (logp - logq)).sum(1), "tv": 1 - overlap}
    value = (mix * terms[loss] + (1 - mix) * terms["ce"]).sum()
    best = logq.argmax(1, keepdim=True)
    rows = (picked, logp.gather(1, labels).squeeze(1), overlap, p.gather(1, best).squeeze(1))
    spread = call.rows.spread
    return value.to(wide), *(spread(x.detach().to(wide)) for x in rows), spread(picked.detach() >= logq.detach().amax(1))


def reference_scores(hidden: Tensor, weight: Tensor, labels: Tensor, call: Call, topk: int) -> tuple[Tensor, ...]:
    """log-prob, entropy, hit [N], top-k log-probs and ids [N, k], as `linear_logprob` returns them."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    labels, spread = call.rows.take(labels).long().unsqueeze(1), call.rows.spread
    logits = _logits(hidden, _whole_weight(weight, call), call)
    logp = logits.log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    hit = logits.gather(1, labels).squeeze(1) >= logits.amax(1)
    best = logp.detach().topk(topk, dim=1)
    logprob = logp.gather(1, labels).squeeze(1)
    return spread(logprob.to(wide)), spread(entropy.to(wide)), spread(hit), spread(best.values.to(wide)), spread(best.indices)
