"""A loss, per token, of the probabilities of a few named vocabulary entries and of the total of all other entries.

The variables of a token's loss are the log-probs of the k named entries and of the rest r. With c_j and c_r the derivatives by them, and
S = Σ c_j + c_r, the gradient of a scaled logit is

named    c_j − S p_j
others   (c_r − S p_r) p_v / p_r

For a policy close to its teacher these are small differences of large terms. Therefore they are computed for each logit in at least fp32,
before they are rounded for the matrix products. The named entries' part of the gradient of the states is accumulated in fp32 as well,
because its terms may cancel. p_r is summed over the other entries rather than computed as 1 minus the named ones, to keep its precision.

Shape legend: N tokens, n of them with a weight, k named entries, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels import products, reduce
from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.call import DEFAULT_WORKSPACE_BYTES, weight_sink
from mtpctl.kernels.inputs import Shard, vocab_shard
from mtpctl.kernels.made_grads import MadeGrads
from mtpctl.kernels.problem import slices

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""divergence(named [n, k], rest [n], rows [n]) -> [n], differentiable by the log-probs `named` and `rest`. `rows`: indices among all N."""

TEMPORARIES = 3  # of a slice's logits
LEAST_LOGPROB = -1e4  # of the rest, if all entries are named


@dataclass(frozen=True)
class CandidateTerm:
    """The summed term: `weight` [N] times the divergence over the entries `ids` [N, k]. Tokens of weight 0 are left out."""

    ids: Tensor
    weight: Tensor
    divergence: Divergence


class CandidateLossOut(NamedTuple):
    """loss_sum: can be differentiated once. divergence [N]: without gradient; 0 for tokens that are left out."""

    loss_sum: Tensor
    divergence: Tensor


def candidate_loss(
    hidden: Tensor,
    weight: Tensor,
    term: CandidateTerm,
    *,
    grad_scale: float = 1.0,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    workspace_bytes: int | None = None,
    main_grad: bool = False,
) -> CandidateLossOut:
    """The loss of the term under states `hidden` [N, H] and this rank's rows of the head, `weight` [V, H].

    group: the ranks that share the vocabulary; every one of them has the same hidden and term, and its gradient of hidden is the whole one.
    grad_scale: the gradient that `loss_sum` will receive, for which gradients are made in the forward pass. The other arguments are as in
    `linear_policy_loss`. Raises ValueError for ids of another shape.
    """
    if term.ids.dim() != 2 or len(term.ids) != len(hidden):
        raise ValueError(f"ids: shape {tuple(term.ids.shape)} does not fit hidden {tuple(hidden.shape)}: expected [{len(hidden)}, k]")
    shard = vocab_shard(weight, group, valid_vocab)
    workspace = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    arguments = _Arguments(term, shard, 1 / temperature, workspace, grad_scale, main_grad, *wanted)
    return CandidateLossOut(*_CandidateLoss.apply(arguments, hidden, weight))


class _Arguments(NamedTuple):
    term: CandidateTerm
    shard: Shard
    inverse_temperature: float
    workspace: int
    grad_scale: float
    main_grad: bool
    by_hidden: bool
    by_weight: bool


class _Context(AutogradContext, Protocol):
    made: MadeGrads | None


class _CandidateLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, arguments: _Arguments, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        term, shard = arguments.term, arguments.shard
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        sink = weight_sink(weight, arguments.by_weight, arguments.main_grad)
        written = sink.add
        share = hidden.dtype if shard.world == 1 else wide
        hidden_grad = torch.zeros(hidden.shape, dtype=share, device=hidden.device) if arguments.by_hidden else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        divergence = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
        trained = term.weight.nonzero().squeeze(1)
        # Ranks join statistics once a slice, so all need the same slices: those that fit the first rank, which has the most columns.
        columns = min(shard.columns, shard.total)
        row = TEMPORARIES * wide.itemsize * max(columns, term.ids.shape[1] * hidden.shape[1])
        for part in slices(len(trained), max(1, arguments.workspace // max(1, row))):
            rows = trained[part]
            if not len(rows):
                continue
            # One column where this rank's shard is all padding, which has no share of any sum.
            states, head = hidden.detach()[rows], weight.detach()[: max(1, shard.valid)]
            logits = products.logits(states, head).mul_(arguments.inverse_temperature)
            if not shard.valid:
                logits.fill_(float("-inf"))
            some = _slice_of(logits, rows, arguments)
            total += some.loss
            divergence[rows] = some.divergence
            if hidden_grad is not None:
                by_rest = products.hidden_grad(None, some.of_rest, head, wide)
                hidden_grad[rows] = by_rest.add_(torch.einsum("nk,nkh->nh", some.of_named, head[some.local].to(wide))).to(share)
            if sink.out is not None:
                products.weight_grad(some.of_rest.scatter_add_(1, some.local, some.of_named), states, sink.out[: len(head)], written)
                if not written:
                    sink.out[shard.valid :] = 0
                written = True
        if sink.out is not None and not written:
            sink.out.zero_()
        if hidden_grad is not None:
            hidden_grad = reduce.sum_ranks(hidden_grad, shard).to(hidden.dtype)
        ctx.made = MadeGrads([hidden_grad], sink, arguments.grad_scale, lambda: None)
        ctx.mark_non_differentiable(divergence)
        return total, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor, _: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        if ctx.made is None:
            raise RuntimeError("candidate_loss: its gradients support one backward pass only")
        made, ctx.made = ctx.made, None
        (hidden,), weight = made.given(grad.item())
        return None, hidden, weight


class _Slice(NamedTuple):
    """Of some rows: the weighed sum, each row's divergence, and the gradients of unscaled logits on this rank: `of_rest` [n, V], 0 at the
    named entries, and `of_named` [n, k] of the columns `local`, 0 where these are another rank's."""

    loss: Tensor
    divergence: Tensor
    of_rest: Tensor
    of_named: Tensor
    local: Tensor


def _slice_of(logits: Tensor, rows: Tensor, arguments: _Arguments) -> _Slice:
    """The loss of these rows, from their scaled logits [n, V], which are overwritten."""
    term, shard, wide = arguments.term, arguments.shard, logits.dtype
    local = term.ids[rows].long() - shard.start
    here = (local >= 0) & (local < logits.shape[1])
    local = local.masked_fill(~here, 0)
    named = reduce.sum_ranks(logits.gather(1, local).masked_fill_(~here, 0), shard)
    # Without the named entries: minus infinity in their places, and at columns that stand for another rank's what was there.
    floor = torch.where(here, float("-inf"), float("inf")).to(wide)
    logits.scatter_reduce_(1, local, floor, "amin")
    rest_lse = torch.logsumexp(logits, 1)
    if shard.world > 1:
        rest_lse = torch.logsumexp(reduce.gather(rest_lse, shard), 0)
    lse = torch.logaddexp(rest_lse, torch.logsumexp(named, 1))
    with torch.enable_grad():
        named_logprob = (named - lse.unsqueeze(1)).double().requires_grad_()
        rest_logprob = (rest_lse - lse).double().clamp_(min=LEAST_LOGPROB).requires_grad_()
        divergence = term.divergence(named_logprob, rest_logprob, rows)
        loss = (term.weight[rows] * divergence).sum()
        by_named, by_rest = torch.autograd.grad(loss, (named_logprob, rest_logprob))
    whole = by_named.sum(1) + by_rest
    of_named = by_named - whole.unsqueeze(1) * named_logprob.detach().exp()
    of_rest = by_rest - whole * rest_logprob.detach().exp()
    scale = arguments.inverse_temperature * arguments.grad_scale
    # A share of the rest, and 0 at the named entries; also if there is no rest.
    spread = logits.sub_(rest_lse.clamp(min=torch.finfo(wide).min).unsqueeze(1)).exp_().mul_((of_rest * scale).to(wide).unsqueeze(1))
    own = (of_named * scale).to(wide).masked_fill_(~here, 0)
    return _Slice(loss.detach().to(wide), divergence.detach().to(wide), spread, own, local)
