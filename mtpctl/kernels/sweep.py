"""One sweep over slices of rows: the trunk's logits made once, for its own loss and for the drafts that learn from them.

The gradient that a logit takes depends on its row's softmax and on two numbers: what the loss asks of that token's log-prob and
entropy. When the loss is separable (each token's term looks at that token alone), both numbers are known as soon as the token's row
of logits is. So rows are taken a slice at a time: logits, statistics, the loss and its two numbers, the gradient of the logits in
their own place, and the two products that need it. Nothing is computed twice, and nothing but the gradients outlives a slice.

A draft adds its own logits of the slice's tokens, what is summed over both distributions, the gradient of its logits in their place, and
the products that need it. So learning from the trunk's whole distribution takes as many products as learning from the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels import inputs, reduce
from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.call import Call, weight_sink
from mtpctl.kernels.draft_terms import Draft, DraftLossOut, DraftTerm, TrunkSlice
from mtpctl.kernels.made_grads import MadeGrads
from mtpctl.kernels.problem import Problem, RowGrads, SweepBackend, slices

# token_loss(logprob [r], entropy [r] or None, rows [r]) -> (summed loss, named sums). `rows` are indices among all N rows.
TokenLoss = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, dict[str, Tensor]]]
FITS = 1 << 62
"""The workspace of a slice whose rows were chosen so that all of its logits fit the call's."""


class Swept(NamedTuple):
    """loss_sum: differentiable, once. The rest is without gradient; sums: those that `token_loss` named."""

    loss_sum: Tensor
    sums: dict[str, Tensor]
    logprob: Tensor
    entropy: Tensor
    hit: Tensor
    drafts: list[DraftLossOut]


def sweep(
    name: str,
    call: Call,
    backend: SweepBackend,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss | None,
    drafts: list[Draft],
    *,
    entropy: bool,
    grad_scale: float,
    detach_weight: bool,
) -> Swept:
    """The sum of `token_loss` (None: 0) over the trunk's rows, and of the drafts' losses times their weights, with gradients.

    name: of the public function, for errors of its backward pass.
    """
    grad = torch.is_grad_enabled()
    by_weight = grad and weight.requires_grad
    trunk = token_loss is not None
    wanted = [(grad and draft.hidden.requires_grad, by_weight and not draft.detach_weight) for draft in drafts]
    sums: dict[str, Tensor] = {}
    arguments = _Arguments(
        name,
        call,
        backend,
        token_loss,
        entropy,
        grad_scale,
        trunk and grad and hidden.requires_grad,
        trunk and by_weight and not detach_weight,
        sums,
        drafts,
        wanted,
    )
    if not arguments.any_weight:
        weight = weight.detach()
    if not arguments.hidden:
        hidden = hidden.detach()
    loss, logprob, row_entropy, hit, *rest = _Sweep.apply(arguments, labels, weight, hidden, *(draft.hidden for draft in drafts))
    fields = len(DraftLossOut._fields)
    told = [DraftLossOut(*rest[start : start + fields]) for start in range(0, len(rest), fields)]
    return Swept(loss, sums, logprob, row_entropy, hit, told)


class _Arguments(NamedTuple):
    name: str
    call: Call
    backend: SweepBackend
    token_loss: TokenLoss | None
    entropy: bool
    grad_scale: float
    hidden: bool
    weight: bool
    sums: dict[str, Tensor]
    drafts: list[Draft]
    wanted: list[tuple[bool, bool]]
    """Of each draft, whether its states and the weight take a gradient from it."""

    @property
    def any_weight(self) -> bool:
        return self.weight or any(by_weight for _, by_weight in self.wanted)


class _Context(AutogradContext, Protocol):
    made: MadeGrads | None
    name: str


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, arguments: _Arguments, labels: Tensor, weight: Tensor, hidden: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        call, backend = arguments.call, arguments.backend
        whole = call.problem(hidden, weight, labels)
        n, keep = len(whole.hidden), arguments.hidden or arguments.weight
        index = torch.arange(call.rows.total, device=labels.device) if call.rows.index is None else call.rows.index
        sink = weight_sink(weight, arguments.any_weight, call.main_grad)
        share = call.share_dtype(hidden) if arguments.hidden else None
        hidden_grad = None if share is None else torch.empty(whole.hidden.shape, dtype=share, device=hidden.device)
        logprob, row_entropy, checked = torch.zeros(3, n, dtype=whole.wide, device=hidden.device).unbind(0)
        greedy = torch.zeros(n, dtype=torch.bool, device=hidden.device)
        loss = torch.zeros((), dtype=whole.wide, device=hidden.device)
        terms = [
            DraftTerm(draft, state, call, arguments.grad_scale, by_hidden=by_hidden, by_weight=by_weight)
            for draft, state, (by_hidden, by_weight) in zip(arguments.drafts, states, arguments.wanted, strict=True)
        ]
        parts = slices(n, _rows_at_once(arguments, whole, keep))
        cuts = [term.cut(parts) for term in terms]
        written = sink.add
        for number, part in enumerate(parts):
            problem = whole.part(part)
            if terms:
                problem = replace(problem, workspace_bytes=FITS)
            scores = backend.scores(problem, entropy=arguments.entropy, topk=0, keep=keep or bool(terms))
            stats = reduce.join_shards(scores.stats, call.shard)
            checked[part] = stats.lse + stats.entropy if arguments.entropy else stats.lse
            logprob[part], greedy[part] = stats.logprob, stats.hit
            if arguments.entropy:
                row_entropy[part] = stats.entropy
            for term, cut in zip(terms, cuts, strict=True):
                written |= term.run(backend, cut[number], TrunkSlice(part.start, problem, stats, scores.kept), sink, add=written)
            if arguments.token_loss is not None:
                value, per_row = _loss_and_grads(arguments.token_loss, stats, index[part], arguments, keep)
                loss += value
                if per_row is not None:
                    out = sink.out if arguments.weight else None
                    local = backend.grads(problem, per_row, scores.kept, hidden=share, weight=out, add=written)
                    written |= out is not None
                    if hidden_grad is not None and local is not None:
                        hidden_grad[part] = local
            del scores  # frees this slice's logits before the next slice's are made
        if sink.out is not None and not written:
            sink.out.zero_()
        loss += sum(term.draft.weight * term.loss_sum for term in terms)
        finite = [inputs.FiniteCheck(checked), *(inputs.FiniteCheck(term.checked) for term in terms)]
        named = [("hidden" if arguments.token_loss else "teacher", whole.hidden), *(("hidden", term.hidden) for term in terms)]
        check = partial(_enforce, finite, [(name, state.detach()) for name, state in named], weight.detach())
        if keep or sink.out is not None or any(by_hidden for by_hidden, _ in arguments.wanted):
            grads = [None if hidden_grad is None else call.whole_hidden_grad(hidden_grad, hidden.dtype)]
            grads += [term.finished_grad(hidden.dtype) for term in terms]
            ctx.made, ctx.name = MadeGrads(grads, sink, arguments.grad_scale, check), arguments.name
        else:
            check()
        spread = call.rows.spread
        outputs = loss, spread(logprob), spread(row_entropy), spread(greedy), *(x for term in terms for x in term.outputs())
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError(f"{ctx.name}: its gradients were made for one backward pass, which has been")
        made, ctx.made = ctx.made, None
        states, weight = made.given(grad.item())
        return None, None, weight, *states


def _rows_at_once(arguments: _Arguments, whole: Problem, keep: bool) -> int:
    """How many rows a slice may have. Ranks join statistics once a slice, so all of them need the same slices: those of the first rank,
    which has the most columns."""
    shard = arguments.call.shard
    widest = replace(whole, valid=min(shard.columns, shard.total))
    if arguments.drafts:
        return arguments.backend.rows_that_keep(widest, states=2)
    return arguments.backend.rows_that_keep(widest) if keep else len(whole.hidden)


def _enforce(checks: list[inputs.FiniteCheck], states: list[tuple[str, Tensor]], weight: Tensor) -> None:
    for check, (name, state) in zip(checks, states, strict=True):
        check.enforce(state, weight, name)


def _loss_and_grads(
    token_loss: TokenLoss, stats: reduce.RowStats, rows: Tensor, arguments: _Arguments, keep: bool
) -> tuple[Tensor, RowGrads | None]:
    """The loss of a slice, and what it asks of each row."""
    logprob = stats.logprob.detach().requires_grad_(keep)
    entropy = stats.entropy.detach().requires_grad_(keep) if arguments.entropy else None
    with torch.set_grad_enabled(keep):
        value, sums = token_loss(logprob, entropy, rows)
    for name, x in sums.items():
        arguments.sums[name] = arguments.sums[name] + x.detach() if name in arguments.sums else x.detach()
    if not keep:
        return value, None
    if not value.requires_grad:  # a constant, as where nothing in the slice is trained
        return value, RowGrads(torch.zeros_like(logprob), stats.lse)
    leaves = [logprob] if entropy is None else [logprob, entropy]
    grads = torch.autograd.grad(value, leaves, grad_outputs=torch.full_like(value, arguments.grad_scale), allow_unused=True)
    by_logprob = torch.zeros_like(logprob) if grads[0] is None else grads[0].contiguous()
    by_entropy = grads[1] if entropy is not None else None
    if by_entropy is None:
        return value.detach(), RowGrads(by_logprob, stats.lse)
    return value.detach(), RowGrads(by_logprob, stats.lse, by_entropy.contiguous(), stats.entropy)
