"""Per-token losses on the probabilities of k named vocabulary entries and on the total probability of all others (the rest).

A token's loss depends on the log-probs of the k named entries and of the rest r. Let c_j and c_r be its derivatives with respect to them,
and S = Σ c_j + c_r. The gradient of a scaled logit is then

named    c_j − S p_j
others   (c_r − S p_r) p_v / p_r

If the policy is close to its teacher, these are small differences of large terms. They are therefore computed in fp32 or wider before they
are rounded for the matrix products. The named entries' part of the hidden gradient accumulates in fp32, too. p_r is a sum over the other
entries, which is more precise than 1 minus the named probabilities.

Shape legend: N tokens, n rows of a slice (tokens with nonzero weight only), k named entries, H hidden size, V vocabulary entries of this
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels import products
from mtpctl.kernels.backend import Shard, gather_shards, row_slices, sum_shards, vocab_shard
from mtpctl.kernels.inputs import DEFAULT_WORKSPACE_BYTES, FiniteCheck, PrecomputedGrads, weight_grad_buffer

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""divergence(named [n, k], rest [n], rows [n]) -> [n], differentiable in the log-probs `named` and `rest`. `rows`: indices among all N."""

TEMPORARIES = 3  # tensors of the size of a slice's logits
MIN_LOGPROB = -1e4  # lower limit of the rest's log-prob, which is -inf if all entries are named


@dataclass(frozen=True)
class CandidateTerm:
    """A weighted sum of divergences: `weight` [N] per token, named entries `ids` [N, k]. Tokens with weight 0 are skipped."""

    ids: Tensor
    weight: Tensor
    divergence: Divergence


class CandidateLossOut(NamedTuple):
    """loss_sum: differentiable once. divergence [N]: not differentiable; 0 for skipped tokens."""

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
    """Compute the loss `term` from hidden states `hidden` [N, H] and this rank's rows of the LM head, `weight` [V, H].

    group: ranks that share the vocabulary. All pass the same hidden and term, and all get the complete gradient of hidden. Other arguments:
    as in `linear_policy_loss`. Raises ValueError if the shape of `term.ids` does not match `hidden`, or if the logits are not finite. The
    latter is raised in the backward pass, if there is one.
    """
    if term.ids.dim() != 2 or len(term.ids) != len(hidden):
        raise ValueError(f"ids: shape {tuple(term.ids.shape)} does not fit hidden {tuple(hidden.shape)}: expected [{len(hidden)}, k]")
    shard = vocab_shard(weight, group, valid_vocab)
    workspace = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    needs_grad = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    arguments = _Arguments(term, shard, 1 / temperature, workspace, grad_scale, main_grad, *needs_grad)
    return CandidateLossOut(*_CandidateLoss.apply(arguments, hidden, weight))


class _Arguments(NamedTuple):
    term: CandidateTerm
    shard: Shard
    inverse_temperature: float
    workspace: int
    grad_scale: float
    main_grad: bool
    needs_hidden_grad: bool
    needs_weight_grad: bool


class _CandidateLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: _Arguments, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        term, shard = arguments.term, arguments.shard
        wide_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        buffer = weight_grad_buffer(weight, arguments.needs_weight_grad, arguments.main_grad)
        accumulate = buffer.accumulates
        grad_dtype = hidden.dtype if shard.world == 1 else wide_dtype
        hidden_grad = torch.zeros(hidden.shape, dtype=grad_dtype, device=hidden.device) if arguments.needs_hidden_grad else None
        total = torch.zeros((), dtype=wide_dtype, device=hidden.device)
        divergence = torch.zeros(len(hidden), dtype=wide_dtype, device=hidden.device)
        weighted_rows = term.weight.nonzero().squeeze(1)
        lse = torch.zeros(len(weighted_rows), dtype=wide_dtype, device=hidden.device)
        # Ranks combine statistics per slice, so all use the slices that fit rank 0, which has the most vocabulary entries: all columns of
        # its shard, or the whole vocabulary (`total`) if that is smaller.
        max_columns = min(shard.columns, shard.total)
        row_bytes = TEMPORARIES * wide_dtype.itemsize * max(max_columns, term.ids.shape[1] * hidden.shape[1])
        for span in row_slices(len(weighted_rows), max(1, arguments.workspace // max(1, row_bytes))):
            rows = weighted_rows[span]
            if not len(rows):
                continue
            # A shard that is all padding keeps one column; its logits of −inf add nothing to the sums.
            states, head = hidden.detach()[rows], weight.detach()[: max(1, shard.vocab_columns)]
            logits = products.logits(states, head).mul_(arguments.inverse_temperature)
            if not shard.vocab_columns:
                logits.fill_(float("-inf"))
            grads = _slice_grads(logits, rows, arguments)
            total += grads.loss
            divergence[rows], lse[span] = grads.divergence, grads.lse
            if hidden_grad is not None:
                rest_part = products.hidden_grad(None, grads.rest, head, wide_dtype)
                hidden_grad[rows] = rest_part.add_(
                    torch.einsum("nk,nkh->nh", grads.named_grads, head[grads.local_columns].to(wide_dtype))
                ).to(grad_dtype)
            if buffer.out is not None:
                products.weight_grad(
                    grads.rest.scatter_add_(1, grads.local_columns, grads.named_grads), states, buffer.out[: len(head)], accumulate
                )
                if not accumulate:
                    buffer.out[shard.vocab_columns :] = 0
                accumulate = True
        if buffer.out is not None and not accumulate:
            buffer.out.zero_()
        if hidden_grad is not None:
            hidden_grad = sum_shards(hidden_grad, shard).to(hidden.dtype)
        check = partial(FiniteCheck(lse).enforce, hidden.detach(), weight.detach())
        if arguments.needs_hidden_grad or arguments.needs_weight_grad:
            ctx.grads = PrecomputedGrads([hidden_grad], buffer, arguments.grad_scale, check)
        else:
            check()
        ctx.mark_non_differentiable(divergence)
        return total, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        if ctx.grads is None:
            raise RuntimeError("candidate_loss: its gradients support one backward pass only")
        grads, ctx.grads = ctx.grads, None
        (hidden,), weight = grads.rescale(grad)
        return None, hidden, weight


class _SliceGrads(NamedTuple):
    """A slice's weighted loss, each row's divergence and log-sum-exp, and the gradients of this rank's unscaled logits.

    rest [n, V]: gradients of the other entries, 0 at named ones. named_grads [n, k]: gradients of the named entries, in
    columns `local_columns`; 0 for entries of other ranks.
    """

    loss: Tensor
    divergence: Tensor
    lse: Tensor
    rest: Tensor
    named_grads: Tensor
    local_columns: Tensor


def _slice_grads(logits: Tensor, rows: Tensor, arguments: _Arguments) -> _SliceGrads:
    """Loss and gradients of these rows from their scaled logits [n, V], which are overwritten."""
    term, shard, wide_dtype = arguments.term, arguments.shard, logits.dtype
    local_columns = term.ids[rows].long() - shard.start
    is_local = (local_columns >= 0) & (local_columns < logits.shape[1])
    local_columns = local_columns.masked_fill(~is_local, 0)
    named_logits = sum_shards(logits.gather(1, local_columns).masked_fill_(~is_local, 0), shard)
    # Set the named entries to −inf. An entry of another rank has local column 0; the minimum with inf leaves that column unchanged.
    floor = torch.where(is_local, float("-inf"), float("inf")).to(wide_dtype)
    logits.scatter_reduce_(1, local_columns, floor, "amin")
    rest_lse = torch.logsumexp(logits, 1)
    if shard.world > 1:
        rest_lse = torch.logsumexp(gather_shards(rest_lse, shard), 0)
    lse = torch.logaddexp(rest_lse, torch.logsumexp(named_logits, 1))
    with torch.enable_grad():
        named_logprob = (named_logits - lse.unsqueeze(1)).double().requires_grad_()
        rest_logprob = (rest_lse - lse).double().clamp_(min=MIN_LOGPROB).requires_grad_()
        divergence = term.divergence(named_logprob, rest_logprob, rows)
        loss = (term.weight[rows] * divergence).sum()
        named_derivative, rest_derivative = torch.autograd.grad(loss, (named_logprob, rest_logprob))
    derivative_sum = named_derivative.sum(1) + rest_derivative
    named_grad = named_derivative - derivative_sum.unsqueeze(1) * named_logprob.detach().exp()
    rest_grad = rest_derivative - derivative_sum * rest_logprob.detach().exp()
    scale = arguments.inverse_temperature * arguments.grad_scale
    # Each entry's share of the rest's gradient, 0 at named entries. The clamp avoids NaN if there is no rest.
    rest_logit_grads = (
        logits.sub_(rest_lse.clamp(min=torch.finfo(wide_dtype).min).unsqueeze(1))
        .exp_()
        .mul_((rest_grad * scale).to(wide_dtype).unsqueeze(1))
    )
    named_local_grads = (named_grad * scale).to(wide_dtype).masked_fill_(~is_local, 0)
    return _SliceGrads(
        loss.detach().to(wide_dtype), divergence.detach().to(wide_dtype), lse, rest_logit_grads, named_local_grads, local_columns
    )
