"""`linear_draft_loss`: an MTP depth's loss against the trunk's own distribution, both from hidden states and one LM head.

With p the trunk's distribution of a token and q the draft's, both at the rollout's temperature, and x the sampled token:

- ce:       −log q(x)
- soft_ce:  −Σ p log q
- kl:       Σ p (log p − log q), whose gradient is soft_ce's, and which is 0 for a drafter that has learned all there is
- tv:       1 − Σ min(p, q), the total variation, which is the share of probabilistic drafts that rejection sampling turns down
  (Leviathan et al., arXiv 2211.17192, section 3.2: a draft from q is accepted with probability min(1, p / q))

The rows come with what both kinds of drafts are accepted at: Σ min(p, q) where drafts are sampled from q, p(argmax q) where they are its
first choice.

Rows are taken a slice at a time: logits of both states in the workspace, statistics, the gradient of the draft's logits in their own place,
and the products that need it. So the gradients are made in the forward pass, for an upstream gradient stated beforehand, and no logits
outlive a slice. A vocabulary that is split over ranks is joined by two exchanges a slice, of a few numbers a row.

Shape legend: N rows (tokens), n selected rows, r rows of a slice, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels import inputs, products, reduce
from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.call import Call, prepare, weight_sink
from mtpctl.kernels.chunked import NARROWEST, scaled
from mtpctl.kernels.made_grads import MadeGrads
from mtpctl.kernels.policy import part_of, slices
from mtpctl.kernels.problem import Problem
from mtpctl.kernels.reference import reference_draft

DraftLoss = Literal["ce", "soft_ce", "kl", "tv"]
LOSSES = ("ce", "soft_ce", "kl", "tv")
IMPLEMENTATIONS = ("auto", "reference", "chunked")
TEMPORARIES = 4
"""Of a slice's logits: the draft's, the teacher's, and two of a sum over the vocabulary."""


class DraftLossOut(NamedTuple):
    """loss_sum: differentiable, once. The rest is [N], fp32 (hit: bool), without gradient, 0 in rows that were not selected.

    logprob, teacher_logprob: of the label under draft and teacher. overlap: Σ min(p, q), the chance that a draft sampled from q is kept.
    greedy: p(argmax q), the chance that its first choice is. hit: no entry is likelier than the label under the draft.
    """

    loss_sum: Tensor
    logprob: Tensor
    teacher_logprob: Tensor
    overlap: Tensor
    greedy: Tensor
    hit: Tensor


def linear_draft_loss(
    hidden: Tensor,
    teacher: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss: DraftLoss = "tv",
    mix: float = 1.0,
    grad_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    rows: Tensor | None = None,
    detach_weight: bool = False,
    valid_vocab: int | None = None,
    workspace_bytes: int | None = None,
    implementation: str = "auto",
    main_grad: bool = False,
) -> DraftLossOut:
    """`mix` times the sum of `loss` over the selected rows, and 1 − `mix` times their cross-entropy.

    hidden [N, H]: the draft's states; teacher [N, H]: the trunk's states that the same tokens were sampled from, which take no gradient,
        and through which the weight takes none; labels [N]: the sampled tokens.
    grad_scale: the gradient that `loss_sum` will receive; see `linear_policy_loss`, also for the error where another one comes.
    implementation: "auto", "reference" (float64, every logit in memory) or "chunked" (plain torch, any device), which is what auto runs.

    All else is as in `linear_logprob`. Raises ValueError, naming the argument, for what does not fit.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss: {loss!r}, expected one of {', '.join(LOSSES)}")
    if not 0 <= mix <= 1:
        raise ValueError(f"mix: {mix}, expected 0 to 1")
    if not 0 <= grad_scale < math.inf:
        raise ValueError(f"grad_scale: {grad_scale}, expected a finite number, 0 or above")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    if teacher.shape != hidden.shape or teacher.dtype != hidden.dtype:
        raise ValueError(f"teacher: {tuple(teacher.shape)} of {teacher.dtype}, expected hidden's {tuple(hidden.shape)} of {hidden.dtype}")
    call = prepare(
        hidden,
        weight,
        labels,
        temperature=temperature,
        group=group,
        rows=rows,
        valid_vocab=valid_vocab,
        workspace_bytes=workspace_bytes,
        main_grad=main_grad,
    )
    if detach_weight:
        weight = weight.detach()
    if implementation == "reference":
        return DraftLossOut(*reference_draft(hidden, teacher, weight, labels, call, loss, mix))
    by_hidden, by_weight = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    shares = _Shares(loss, 0.0 if loss == "ce" else mix, 1.0 if loss == "ce" else 1 - mix)
    arguments = _Arguments(call, shares, grad_scale, by_hidden, by_weight)
    return DraftLossOut(*_LinearDraftLoss.apply(hidden, teacher.detach(), weight, labels, arguments))


@dataclass(frozen=True)
class _Shares:
    """The weight of `loss` in the sum, and that of the cross-entropy."""

    loss: DraftLoss
    main: float
    ce: float


class _Arguments(NamedTuple):
    call: Call
    shares: _Shares
    grad_scale: float
    hidden: bool
    weight: bool


class _Context(AutogradContext, Protocol):
    made: MadeGrads | None


class _LinearDraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, teacher: Tensor, weight: Tensor, labels: Tensor, arguments: _Arguments
    ) -> tuple[Tensor, ...]:
        call, shares = arguments.call, arguments.shares
        whole = call.problem(hidden, weight, labels)
        states = call.rows.take(teacher).contiguous()
        n, keep = len(whole.hidden), arguments.hidden or arguments.weight
        sink = weight_sink(weight, arguments.weight, call.main_grad)
        share = call.share_dtype(hidden) if arguments.hidden else None
        hidden_grad = None if share is None else torch.empty(whole.hidden.shape, dtype=share, device=hidden.device)
        logprob, teacher_logprob, overlap, greedy, checked = torch.zeros(5, n, dtype=whole.wide, device=hidden.device).unbind(0)
        hit = torch.zeros(n, dtype=torch.bool, device=hidden.device)
        value = torch.zeros((), dtype=whole.wide, device=hidden.device)
        # Ranks join statistics once a slice, so all of them need the same slices: those of the first rank, which has the most columns.
        widest = replace(whole, valid=min(call.shard.columns, call.shard.total))
        for number, part in enumerate(slices(n, _rows_at_once(widest))):
            problem = part_of(whole, part)
            found = _Slice(problem, states[part], call.shard, shares)
            logprob[part], teacher_logprob[part], hit[part] = found.draft.logprob, found.teacher.logprob, found.draft.hit
            overlap[part], greedy[part], checked[part] = found.overlap, found.greedy, found.draft.lse + found.teacher.lse
            value += found.loss_sum()
            if keep:
                grad = found.logit_grad(arguments.grad_scale)
                columns = problem.weight[: problem.valid]
                if hidden_grad is not None and share is not None:
                    hidden_grad[part] = products.hidden_grad(None, grad, columns, share)
                if sink.out is not None:
                    products.weight_grad(grad, problem.hidden, sink.out[: problem.valid], sink.add or number > 0)
            del found  # frees this slice's logits before the next slice's are made
        if sink.out is not None and not sink.add:
            sink.out[whole.valid :] = 0
        finite = inputs.FiniteCheck(checked)
        if keep:
            if hidden_grad is not None:
                hidden_grad = call.whole_hidden_grad(hidden_grad, hidden.dtype)
            ctx.made = MadeGrads(hidden_grad, sink, arguments.grad_scale, partial(finite.enforce, whole.hidden.detach(), weight.detach()))
        else:
            finite.enforce(whole.hidden, weight)
        outputs = value, *(call.rows.spread(x) for x in (logprob, teacher_logprob, overlap, greedy, hit))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("linear_draft_loss: its gradients were made for one backward pass, which has been")
        made, ctx.made = ctx.made, None
        by_hidden, by_weight = made.given(grad.item())
        return by_hidden, None, by_weight, None, None


def _rows_at_once(problem: Problem) -> int:
    """Of how many rows the workspace holds the logits of both states, and what is computed of them."""
    columns = max(1, -(-problem.valid // NARROWEST)) * NARROWEST
    return max(1, problem.workspace_bytes // (TEMPORARIES * problem.wide.itemsize * columns))


class _Slice:
    """Some rows over this rank's columns: both distributions, and what is summed of them over the whole vocabulary.

    q and p: probabilities [r, V]. overlap: Σ min(p, q); greedy: p(argmax q); below: Σ q where q < p; cross: −Σ p log q.
    """

    def __init__(self, problem: Problem, teacher: Tensor, shard: inputs.Shard, shares: _Shares) -> None:
        self.problem, self.shares = problem, shares
        weight = problem.weight[: problem.valid]
        zq, zp = (scaled(products.logits(state, weight), problem.inverse_temperature) for state in (problem.hidden, teacher))
        local = problem.targets.unsqueeze(1)
        self.here = (local >= 0) & (local < problem.valid)
        self.place = local.clamp(0, max(0, problem.valid - 1))
        at_best = self._at_best(zq, zp, shard)
        self.draft = reduce.join_shards(self._stats(zq, entropy=False), shard)
        self.teacher = reduce.join_shards(self._stats(zp, entropy=shares.loss == "kl"), shard)
        self.greedy = (at_best - self.teacher.lse).exp()
        logq = zq.sub_(self.draft.lse.unsqueeze(1))
        self.p = zp.sub_(self.teacher.lse.unsqueeze(1)).exp_()
        sums = torch.zeros(3, len(zq), dtype=zq.dtype, device=zq.device)
        if shares.loss in ("soft_ce", "kl"):
            sums[2] = -(self.p * logq).sum(1)
        self.q = logq.exp_()
        sums[0] = torch.minimum(self.p, self.q).sum(1)
        if shares.loss == "tv":
            sums[1] = (self.q * (self.q < self.p)).sum(1)
        self.overlap, self.below, self.cross = reduce.sum_ranks(sums, shard).unbind(0)
        self.overlap.clamp_(max=1)

    def _stats(self, z: Tensor, *, entropy: bool) -> reduce.RowStats:
        if not z.shape[1]:  # this rank's shard is all padding
            empty = z.new_full((len(z),), float("-inf"))
            return reduce.RowStats(empty, torch.zeros_like(empty), torch.zeros_like(empty), empty)
        top = z.amax(1)
        shifted = z - top.unsqueeze(1)
        target = torch.where(self.here, z.gather(1, self.place), float("-inf")).squeeze(1)
        weights = shifted.exp()
        mass = weights.sum(1)
        moment = weights.mul_(shifted).sum(1) if entropy else torch.zeros_like(mass)
        return reduce.RowStats(top, mass, moment, target)

    def _at_best(self, zq: Tensor, zp: Tensor, shard: inputs.Shard) -> Tensor:
        """The teacher's logit of the draft's first choice; of equally likely ones that on the first rank."""
        if zq.shape[1]:
            best, place = zq.max(1)
            found = torch.stack([best, zp.gather(1, place.unsqueeze(1)).squeeze(1)])
        else:
            found = zq.new_full((2, len(zq)), float("-inf"))
        if shard.world == 1:
            return found[1]
        best, theirs = reduce.gather(found, shard).unbind(1)
        return theirs.gather(0, best.argmax(0, keepdim=True)).squeeze(0)

    def loss_sum(self) -> Tensor:
        """The loss of these rows, over the whole vocabulary."""
        terms = {"ce": -self.draft.logprob, "soft_ce": self.cross, "kl": self.cross - self.teacher.entropy, "tv": 1 - self.overlap}
        return (self.shares.main * terms[self.shares.loss] - self.shares.ce * self.draft.logprob).sum()

    def logit_grad(self, factor: float) -> Tensor:
        """The gradient of the draft's unscaled logits, `factor` times the loss's, in the memory of its probabilities.

        Of a scaled logit j it is q_j − 1[j = x] for ce, q_j − p_j for soft_ce and kl, and q_j (Σ q [q < p] − [q_j < p_j]) for tv.
        """
        main, ce = self.shares.main, self.shares.ce
        if self.shares.loss == "tv":
            above = (main * self.below + ce).unsqueeze(1)
            grad = self.q.mul_(torch.where(self.q < self.p, above - main, above))
        else:
            grad = self.q.mul_(main + ce)
            if main:
                grad.sub_(self.p, alpha=main)
        if ce and grad.shape[1]:
            grad.scatter_add_(1, self.place, self.here.to(grad.dtype).mul_(-ce))
        return scaled(grad.mul_(factor), self.problem.inverse_temperature)
