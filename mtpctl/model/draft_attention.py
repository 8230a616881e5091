"""The attention of a drafter that applies one MTP layer again and again.

An engine runs the layer's first step over all tokens, which leaves their keys and values in its cache. Every further step runs over one
token, a position further on: it attends to what the first step left of the tokens up to the one it began at, and to what the steps since
then left, itself included. So in training the query of depth d at token i, which an engine would draft from there, attends to

    the keys of depth 1 at tokens 0 … i,  and the keys of depths 2 … d at token i alone.

The second part is a few keys a query, whose scores are joined with the first part's by their log-sum-exps. With the joined output and
log-sum-exp in place of its own, the backward pass of a flash kernel gives the first part's gradients in the whole softmax (as where a ring
of ranks shares the keys, arXiv 2310.01889).

Shape legend: t tokens, h query heads, g key-value heads, d width of queries and keys, w width of values, E depths between the first and
this one, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext


@dataclass
class EarlierDepths:
    """Keys [t, g, d] and values [t, g, w] of the depths of one pass so far, of this rank's tokens; attention adds its own."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Prefix(Protocol):
    """Causal attention to the first depth's keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output [t, h, w], and the log-sum-exp of the scores, fp32 [t, h]."""
        ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, where every score weighs exp(score − lse) and the output was `out`."""
        ...


class _Context(AutogradContext, Protocol):
    prefix: Prefix
    scale: float


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, prefix: Prefix, scale: float) -> Tensor:
        out, lse = prefix.forward(q, k, v)
        scores = _scores(q, keys, scale)
        whole = torch.logaddexp(lse, scores.logsumexp(0))
        weights = (scores - whole).exp()
        joined = out.float() * (lse - whole).exp().unsqueeze(-1) + (weights.unsqueeze(-1) * _of_queries(values, q)).sum(0)
        joined = joined.to(out.dtype)
        ctx.save_for_backward(q, k, v, keys, values, joined, whole)
        ctx.prefix, ctx.scale = prefix, scale
        return joined

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, keys, values, out, lse = ctx.saved_tensors
        by_q, by_k, by_v = ctx.prefix.backward(grad, q, k, v, out, lse)
        weights = (_scores(q, keys, ctx.scale) - lse).exp()
        wide = grad.float()
        mean = (wide * out.float()).sum(-1)
        by_score = weights * ((wide * _of_queries(values, q)).sum(-1) - mean) * ctx.scale
        by_q = by_q + (by_score.unsqueeze(-1) * _of_queries(keys, q)).sum(0).to(by_q.dtype)
        by_keys = _of_heads(by_score.unsqueeze(-1) * q.float(), keys)
        by_values = _of_heads(weights.unsqueeze(-1) * wide, values)
        return by_q, by_k, by_v, by_keys, by_values, None, None


def joined_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, prefix: Prefix, scale: float) -> Tensor:
    """q [t, h, d]; k, v: the first depth's, as `prefix` takes them; keys [E, t, g, d] and values [E, t, g, w]: of the later depths, this
    one's last → [t, h, w]."""
    joined: Tensor = _Joined.apply(q, k, v, keys, values, prefix, scale)
    return joined


def _of_queries(x: Tensor, q: Tensor) -> Tensor:
    """[E, t, g, ·] → fp32 [E, t, h, ·]: the key-value head that each query head reads."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[2], dim=2)


def _of_heads(x: Tensor, like: Tensor) -> Tensor:
    """[E, t, h, ·] summed over the query heads that read one key-value head, as `like`."""
    return x.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """fp32 [E, t, h]: each query against the later depths' keys of its own token."""
    return (q.float() * _of_queries(keys, q)).sum(-1) * scale
