"""One sweep over slices of rows: it makes the trunk's logits once, for the trunk's own loss and for the drafts that learn from them.

The gradient of a logit depends on its row's softmax and on two numbers: the derivatives of the loss by that token's log-prob and entropy.
When the loss is separable (each token's term depends on that token alone), both numbers are known as soon as the token's row of logits is.
So rows are taken a slice at a time: logits, statistics, the loss and its two derivatives, the gradient of the logits, written over the
logits, and the two products that need it. Nothing is computed twice, and only gradients and a few numbers a row outlive a slice.

For each slice a draft adds its own logits, the sums over both distributions, the gradient of its logits, written over them, and the
products that need it. So learning from the trunk's whole distribution takes as many products as learning from the sampled tokens.
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
from mtpctl.kernels.call import Call, WeightSink, weight_sink
from mtpctl.kernels.draft_terms import Draft, DraftLossOut, DraftTerm, TrunkSlice
from mtpctl.kernels.made_grads import MadeGrads
from mtpctl.kernels.problem import Backend, Problem, RowGrads, slices

# token_loss(logprob [r], entropy [r] or None, rows [r]) -> (summed loss, named sums). `rows` are indices among all N rows.
TokenLoss = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, dict[str, Tensor]]]
FITS = 1 << 62
"""`workspace_bytes` of a slice whose rows are so few already that all of its logits fit the workspace of the call."""


class Swept(NamedTuple):
    """loss_sum: can be differentiated once. The rest has no gradient; `sums` are those that `token_loss` named."""

    loss_sum: Tensor
    sums: dict[str, Tensor]
    logprob: Tensor
    entropy: Tensor
    hit: Tensor
    drafts: list[DraftLossOut]


def sweep(
    name: str,
    call: Call,
    backend: Backend,
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

    name: that of the public function, for errors in the backward pass.
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
    backend: Backend
    token_loss: TokenLoss | None
    entropy: bool
    grad_scale: float
    hidden: bool
    weight: bool
    sums: dict[str, Tensor]
    drafts: list[Draft]
    wanted: list[tuple[bool, bool]]
    """For each draft: whether its states take a gradient from its loss, and whether the weight does."""

    @property
    def learns(self) -> bool:
        """Whether the trunk's states or the weight take a gradient from the trunk's own loss."""
        return self.hidden or self.weight

    @property
    def any_weight(self) -> bool:
        return self.weight or any(by_weight for _, by_weight in self.wanted)


class _TrunkTerm:
    """The trunk's own loss over a sweep: its results, and the gradient of its states."""

    def __init__(self, arguments: _Arguments, whole: Problem) -> None:
        self.arguments, states = arguments, whole.hidden
        rows, n = arguments.call.rows, len(states)
        self.index = torch.arange(rows.total, device=states.device) if rows.index is None else rows.index
        self.share = arguments.call.share_dtype(states) if arguments.hidden else None
        self.hidden_grad = None if self.share is None else torch.empty(states.shape, dtype=self.share, device=states.device)
        self.logprob, self.entropy, self.checked = torch.zeros(3, n, dtype=whole.wide, device=states.device).unbind(0)
        self.hit = torch.zeros(n, dtype=torch.bool, device=states.device)
        self.loss_sum = torch.zeros((), dtype=whole.wide, device=states.device)

    def run(self, part: slice, trunk: TrunkSlice, sink: WeightSink, *, add: bool) -> bool:
        """Take the selected rows `part`: results, loss and gradients. Returns whether the weight's gradient was written.

        May overwrite the slice's kept logits.
        """
        arguments, stats = self.arguments, trunk.stats
        self.checked[part] = stats.lse + stats.entropy if arguments.entropy else stats.lse
        self.logprob[part], self.hit[part] = stats.logprob, stats.hit
        if arguments.entropy:
            self.entropy[part] = stats.entropy
        if arguments.token_loss is None:
            return False
        value, per_row = _loss_and_grads(arguments.token_loss, stats, self.index[part], arguments)
        self.loss_sum += value
        if per_row is None:
            return False
        out = sink.out if arguments.weight else None
        local = arguments.backend.grads(trunk.problem, per_row, trunk.kept, hidden=self.share, weight=out, add=add)
        if self.hidden_grad is not None and local is not None:
            self.hidden_grad[part] = local
        return out is not None

    def finished_grad(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient of the trunk's states [N, H], over all ranks of the vocabulary."""
        return None if self.hidden_grad is None else self.arguments.call.whole_hidden_grad(self.hidden_grad, dtype)

    def outputs(self) -> tuple[Tensor, ...]:
        """Log-probs, entropies and hits [N]."""
        spread = self.arguments.call.rows.spread
        return spread(self.logprob), spread(self.entropy), spread(self.hit)


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
        sink = weight_sink(weight, arguments.any_weight, call.main_grad)
        trunk = _TrunkTerm(arguments, whole)
        terms = [
            DraftTerm(draft, state, call, arguments.grad_scale, by_hidden=by_hidden, by_weight=by_weight)
            for draft, state, (by_hidden, by_weight) in zip(arguments.drafts, states, arguments.wanted, strict=True)
        ]
        parts = slices(len(whole.hidden), _rows_at_once(arguments, whole))
        cuts = [term.cut(parts) for term in terms]
        written = sink.add
        for number, part in enumerate(parts):
            problem = whole.part(part)
            if terms:
                problem = replace(problem, workspace_bytes=FITS)
            scores = backend.scores(problem, entropy=arguments.entropy, topk=0, keep=arguments.learns or bool(terms))
            some = TrunkSlice(part.start, problem, reduce.join_shards(scores.stats, call.shard), scores.kept)
            for term, cut in zip(terms, cuts, strict=True):
                written |= term.run(backend, cut[number], some, sink, add=written)
            written |= trunk.run(part, some, sink, add=written)
            del scores, some  # frees this slice's logits before the next slice's are made
        if sink.out is not None and not written:
            sink.out.zero_()
        loss = trunk.loss_sum + sum(term.draft.weight * term.loss_sum for term in terms)
        checked = [("hidden" if arguments.token_loss else "teacher", whole.hidden, trunk.checked)]
        checked += [("hidden", term.hidden, term.checked) for term in terms]
        check = partial(_enforce, [(name, state.detach(), inputs.FiniteCheck(x)) for name, state, x in checked], weight.detach())
        if arguments.learns or any(by_hidden or by_weight for by_hidden, by_weight in arguments.wanted):
            grads = [trunk.finished_grad(hidden.dtype), *(term.finished_grad(hidden.dtype) for term in terms)]
            ctx.made, ctx.name = MadeGrads(grads, sink, arguments.grad_scale, check), arguments.name
        else:
            check()
        outputs = loss, *trunk.outputs(), *(x for term in terms for x in term.outputs())
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


def _rows_at_once(arguments: _Arguments, whole: Problem) -> int:
    """How many rows a slice may have. Ranks join statistics once a slice, so all need the same slices: those that fit the first rank, which
    has the most columns."""
    shard = arguments.call.shard
    widest = replace(whole, valid=min(shard.columns, shard.total))
    if arguments.drafts:
        return arguments.backend.rows_that_keep(widest, states=2)
    return arguments.backend.rows_that_keep(widest) if arguments.learns else len(whole.hidden)


def _enforce(checks: list[tuple[str, Tensor, inputs.FiniteCheck]], weight: Tensor) -> None:
    for name, state, check in checks:
        check.enforce(state, weight, name)


def _loss_and_grads(token_loss: TokenLoss, stats: reduce.RowStats, rows: Tensor, arguments: _Arguments) -> tuple[Tensor, RowGrads | None]:
    """The loss of a slice, and its derivatives by each row's log-prob and entropy; None where no gradient is wanted."""
    keep = arguments.learns
    logprob = stats.logprob.detach().requires_grad_(keep)
    entropy = stats.entropy.detach().requires_grad_(keep) if arguments.entropy else None
    with torch.set_grad_enabled(keep):
        value, sums = token_loss(logprob, entropy, rows)
    for name, x in sums.items():
        arguments.sums[name] = arguments.sums[name] + x.detach() if name in arguments.sums else x.detach()
    if not keep:
        return value, None
    if not value.requires_grad:  # a constant, such as where no token of the slice is trained on
        return value, RowGrads(torch.zeros_like(logprob), stats.lse)
    leaves = [logprob] if entropy is None else [logprob, entropy]
    grads = torch.autograd.grad(value, leaves, grad_outputs=torch.full_like(value, arguments.grad_scale), allow_unused=True)
    by_logprob = torch.zeros_like(logprob) if grads[0] is None else grads[0].contiguous()
    by_entropy = grads[1] if entropy is not None else None
    if by_entropy is None:
        return value.detach(), RowGrads(by_logprob, stats.lse)
    return value.detach(), RowGrads(by_logprob, stats.lse, by_entropy.contiguous(), stats.entropy)
