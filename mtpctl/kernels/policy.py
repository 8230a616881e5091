"""`linear_policy_loss` and `linear_draft_loss`: losses and their gradients from hidden states, in one pass over the rows.

A policy loss takes three matrix products. The gradient of a logit depends on its row's softmax and on two numbers: the derivatives of the
loss with respect to the token's log-prob and entropy. If the loss is separable (each token's term depends on that token only), these
two numbers are known as soon as the row's logits are. Rows are therefore processed in slices. Each slice computes the logits and their
statistics, then the loss and its two derivatives. The logit gradient overwrites the logits, and two products with it complete the slice.
Nothing is computed twice, and only gradients and a few numbers per row are kept after a slice.

A draft (the states of a draft head, with their loss) adds to each slice its own logits, the sums over both distributions, its logit
gradient, and the two products with it. Learning from the trunk's whole distribution thus takes as many products as learning from the
sampled tokens.

Losses that couple tokens, such as GSPO with its ratio per response, are computed from the log-probs of `linear_logprob` instead. Gradients
are computed in the forward pass, for an upstream gradient that the caller passes in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels.backend import Backend, DraftLoss, GradOutputs, Problem, RowGrads, RowStats, combine_shards, row_slices
from mtpctl.kernels.dispatch import ONE_PASS, reference_draft, select_backend
from mtpctl.kernels.drafts import Draft, DraftLossOut, DraftTerm, TrunkSlice
from mtpctl.kernels.inputs import Call, FiniteCheck, HeadOptions, PrecomputedGrads, WeightGradBuffer, prepare_call, weight_grad_buffer

# token_loss(logprob [r], entropy [r] or None, rows [r]) -> (summed loss, named sums). `rows` are indices among all N rows.
TokenLoss = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, dict[str, Tensor]]]
UNLIMITED = 1 << 62
"""`workspace_bytes` of a slice whose logits are known to fit the call's workspace."""


class PolicyLossOut(NamedTuple):
    """loss_sum: differentiable once. Other fields are not differentiable.

    sums: the sums that `token_loss` returned, added over slices. logprob, entropy, hit [N]: as in `LogProbOut`. drafts: each draft's
    results; its loss does not include `Draft.weight`.
    """

    loss_sum: Tensor
    sums: dict[str, Tensor]
    logprob: Tensor
    entropy: Tensor | None
    hit: Tensor | None
    drafts: list[DraftLossOut]


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    drafts: Sequence[Draft] = (),
    grad_scale: float = 1.0,
    entropy: bool = False,
    hit: bool = False,
    detach_weight: bool = False,
    implementation: str = "auto",
    **options: Unpack[HeadOptions],
) -> PolicyLossOut:
    """Sum `token_loss` over the selected rows, plus the drafts' weighted losses, and compute gradients of hidden, weight and drafts.

    token_loss: called once per slice of rows with their log-probs, entropies (None unless `entropy`) and row indices; returns the slice's
        summed loss and sums to report. Must be differentiable and separable: no term may depend on another token's log-prob.
    drafts: states of draft heads, each with its loss on the distributions of these rows. `hidden` gets no gradient from them; the weight
        gets one through a draft's own logits unless the draft detaches it.
    grad_scale: the gradient that `loss_sum` will receive (1 / global denominator, times a loss scale). Gradients are computed for it. If
        `loss_sum` receives another one, they are rescaled. If that is impossible (they were added to `main_grad`, or computed for 0), the
        backward pass raises ValueError.
    implementation: "auto", "chunked", "triton" or "exact".

    Other arguments and errors: as in `linear_logprob`. The default workspace of 1 GiB allows slices of about 3,000 rows at 150,000
    vocabulary entries, 1,600 with drafts. Each slice after the first rounds a half-precision weight gradient again, unless it is added to
    an fp32 `main_grad`.
    """
    _check_grad_scale(grad_scale)
    call = prepare_call(hidden, weight, labels, **options)
    for draft in drafts:
        draft.check(hidden)
    backend = select_backend(implementation, hidden, weight, rows=call.rows.count)
    out = _run_slices(
        "linear_policy_loss",
        call,
        backend,
        hidden,
        weight,
        labels,
        token_loss,
        list(drafts),
        entropy=entropy,
        grad_scale=grad_scale,
        detach_weight=detach_weight,
    )
    return out._replace(entropy=out.entropy if entropy else None, hit=out.hit if hit else None)


def linear_draft_loss(
    hidden: Tensor,
    teacher: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss: DraftLoss = "tv",
    mix: float = 1.0,
    grad_scale: float = 1.0,
    detach_weight: bool = False,
    implementation: str = "auto",
    **options: Unpack[HeadOptions],
) -> DraftLossOut:
    """Sum `mix` times `loss` plus 1 − `mix` times the cross-entropy over the selected rows. `loss_sum` is differentiable once.

    The trunk's logits are computed for this loss only. If the trunk has a separable loss in the same step, pass the draft to
    `linear_policy_loss`: it computes the trunk's logits once, for both losses.

    hidden [N, H]: the draft's states. teacher [N, H]: the trunk's states from which the labels were sampled; no gradient flows through
        them. labels [N]: the sampled tokens. loss: see `mtpctl.kernels.drafts`.
    grad_scale: as in `linear_policy_loss`.
    implementation: as in `linear_policy_loss`, or "reference" (float64, all logits in memory).

    Other arguments: as in `linear_logprob`. Raises ValueError naming the argument.
    """
    _check_grad_scale(grad_scale)
    names = (*ONE_PASS, "reference")
    if implementation not in names:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(names)}")
    if teacher.shape != hidden.shape or teacher.dtype != hidden.dtype:
        raise ValueError(f"teacher: {tuple(teacher.shape)} of {teacher.dtype}, expected hidden's {tuple(hidden.shape)} of {hidden.dtype}")
    draft = Draft(hidden, loss=loss, mix=mix, detach_weight=detach_weight)
    draft.check(hidden)
    call = prepare_call(hidden, weight, labels, **options)
    if implementation == "reference":
        head = weight.detach() if detach_weight else weight
        return DraftLossOut(*reference_draft(hidden, teacher, head, labels, call, loss, mix))
    backend = select_backend(implementation, hidden, weight, rows=call.rows.count)
    out = _run_slices(
        "linear_draft_loss", call, backend, teacher, weight, labels, None, [draft], entropy=False, grad_scale=grad_scale, detach_weight=True
    )
    return out.drafts[0]._replace(loss_sum=out.loss_sum)


def _check_grad_scale(grad_scale: float) -> None:
    if not 0 <= grad_scale < math.inf:
        raise ValueError(f"grad_scale: {grad_scale}, expected a finite number, 0 or above")


def _run_slices(
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
) -> PolicyLossOut:
    """Compute the losses of trunk and drafts in one pass over slices of rows.

    name: function name in errors of the backward pass. token_loss: None if the trunk has no loss.
    """
    grad_enabled = torch.is_grad_enabled()
    needs_weight_grad = grad_enabled and weight.requires_grad
    has_trunk_loss = token_loss is not None
    sums: dict[str, Tensor] = {}
    arguments = _Arguments(
        name,
        call,
        backend,
        token_loss,
        entropy,
        grad_scale,
        has_trunk_loss and grad_enabled and hidden.requires_grad,
        has_trunk_loss and needs_weight_grad and not detach_weight,
        sums,
        drafts,
        [(grad_enabled and draft.hidden.requires_grad, needs_weight_grad and not draft.detach_weight) for draft in drafts],
    )
    if not arguments.any_weight_grad:
        weight = weight.detach()
    if not arguments.needs_hidden_grad:
        hidden = hidden.detach()
    loss, logprob, row_entropy, hit, *draft_fields = _SlicedLosses.apply(
        arguments, labels, weight, hidden, *(draft.hidden for draft in drafts)
    )
    field_count = len(DraftLossOut._fields)
    draft_outs = [DraftLossOut(*draft_fields[start : start + field_count]) for start in range(0, len(draft_fields), field_count)]
    return PolicyLossOut(loss, sums, logprob, row_entropy, hit, draft_outs)


class _Arguments(NamedTuple):
    name: str
    call: Call
    backend: Backend
    token_loss: TokenLoss | None
    entropy: bool
    grad_scale: float
    needs_hidden_grad: bool
    """Whether the trunk's states get a gradient from the trunk's loss."""
    needs_weight_grad: bool
    """Whether the weight gets a gradient from the trunk's loss."""
    sums: dict[str, Tensor]
    drafts: list[Draft]
    draft_grads: list[tuple[bool, bool]]
    """For each draft: whether its states and whether the weight get a gradient from its loss."""

    @property
    def trunk_learns(self) -> bool:
        return self.needs_hidden_grad or self.needs_weight_grad

    @property
    def any_weight_grad(self) -> bool:
        return self.needs_weight_grad or any(needs_weight_grad for _, needs_weight_grad in self.draft_grads)


class _TrunkTerm:
    """The results of the trunk's loss and the gradient of its states, accumulated over slices."""

    def __init__(self, arguments: _Arguments, problem: Problem) -> None:
        self.arguments, states = arguments, problem.hidden
        rows, n = arguments.call.rows, len(states)
        self.index = torch.arange(rows.total, device=states.device) if rows.index is None else rows.index
        self.grad_dtype = arguments.call.partial_dtype(states) if arguments.needs_hidden_grad else None
        self.hidden_grad = None if self.grad_dtype is None else torch.empty(states.shape, dtype=self.grad_dtype, device=states.device)
        self.logprob, self.entropy, self.check_values = torch.zeros(3, n, dtype=problem.wide_dtype, device=states.device).unbind(0)
        self.hit = torch.zeros(n, dtype=torch.bool, device=states.device)
        self.loss_sum = torch.zeros((), dtype=problem.wide_dtype, device=states.device)

    def process(self, span: slice, trunk: TrunkSlice, buffer: WeightGradBuffer, *, add: bool) -> bool:
        """Compute results, loss and gradients of the selected rows `span`. Returns whether the weight gradient was written.

        May overwrite the slice's saved logits.
        """
        arguments, stats = self.arguments, trunk.stats
        self.check_values[span] = stats.lse + stats.entropy if arguments.entropy else stats.lse
        self.logprob[span], self.hit[span] = stats.logprob, stats.hit
        if arguments.entropy:
            self.entropy[span] = stats.entropy
        if arguments.token_loss is None:
            return False
        value, row_grads = _loss_and_grads(arguments.token_loss, stats, self.index[span], arguments)
        self.loss_sum += value
        if row_grads is None:
            return False
        out = buffer.out if arguments.needs_weight_grad else None
        local_grad = arguments.backend.grads(trunk.problem, row_grads, trunk.saved, GradOutputs(self.grad_dtype, out, add))
        if self.hidden_grad is not None and local_grad is not None:
            self.hidden_grad[span] = local_grad
        return out is not None

    def reduce_grad(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient of the trunk's states [N, H], summed over vocabulary shards."""
        return None if self.hidden_grad is None else self.arguments.call.reduce_hidden_grad(self.hidden_grad, dtype)

    def outputs(self) -> tuple[Tensor, ...]:
        """Log-probs, entropies and hits [N]."""
        scatter = self.arguments.call.rows.scatter
        return scatter(self.logprob), scatter(self.entropy), scatter(self.hit)


class _SlicedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arguments: _Arguments, labels: Tensor, weight: Tensor, hidden: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        call, backend = arguments.call, arguments.backend
        problem = call.selected_inputs(hidden, weight, labels)
        buffer = weight_grad_buffer(weight, arguments.any_weight_grad, call.main_grad)
        trunk = _TrunkTerm(arguments, problem)
        terms = [
            DraftTerm(draft, state, call, arguments.grad_scale, needs_hidden_grad=needs_hidden_grad, needs_weight_grad=needs_weight_grad)
            for draft, state, (needs_hidden_grad, needs_weight_grad) in zip(arguments.drafts, states, arguments.draft_grads, strict=True)
        ]
        trunk_slices = row_slices(len(problem.hidden), _rows_per_slice(arguments, problem))
        draft_slices = [term.draft_slices(trunk_slices) for term in terms]
        accumulate = buffer.accumulates
        for index, span in enumerate(trunk_slices):
            slice_problem = problem.select_rows(span)
            if terms:
                slice_problem = replace(slice_problem, workspace_bytes=UNLIMITED)
            for_backward = arguments.trunk_learns or bool(terms)
            scores = backend.scores(slice_problem, entropy=arguments.entropy, topk=0, for_backward=for_backward)
            trunk_slice = TrunkSlice(span.start, slice_problem, combine_shards(scores.stats, call.shard), scores.saved)
            for term, spans in zip(terms, draft_slices, strict=True):
                accumulate |= term.process(backend, spans[index], trunk_slice, buffer, add=accumulate)
            accumulate |= trunk.process(span, trunk_slice, buffer, add=accumulate)
            del scores, trunk_slice  # frees this slice's logits before the next slice's are computed
        if buffer.out is not None and not accumulate:
            buffer.out.zero_()
        loss = trunk.loss_sum + sum(term.draft.weight * term.loss_sum for term in terms)
        checks = [("hidden" if arguments.token_loss else "teacher", problem.hidden.detach(), FiniteCheck(trunk.check_values))]
        checks += [("hidden", term.hidden.detach(), FiniteCheck(term.lse)) for term in terms]
        check = partial(_run_checks, checks, weight.detach())
        if arguments.trunk_learns or any(
            needs_hidden_grad or needs_weight_grad for needs_hidden_grad, needs_weight_grad in arguments.draft_grads
        ):
            grads = [trunk.reduce_grad(hidden.dtype), *(term.reduce_grad(hidden.dtype) for term in terms)]
            ctx.grads, ctx.name = PrecomputedGrads(grads, buffer, arguments.grad_scale, check), arguments.name
        else:
            check()
        outputs = loss, *trunk.outputs(), *(x for term in terms for x in term.outputs())
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(f"{ctx.name}: its gradients support one backward pass only")
        grads, ctx.grads = ctx.grads, None
        states, weight = grads.rescale(grad)
        return None, None, weight, *states


def _rows_per_slice(arguments: _Arguments, problem: Problem) -> int:
    """Rows per slice. Ranks combine statistics per slice, so all use the slices that fit rank 0, which has the most vocabulary entries."""
    shard = arguments.call.shard
    widest = replace(problem, vocab_columns=min(shard.columns, shard.total))
    if arguments.drafts:
        return arguments.backend.rows_per_slice(widest, states_per_row=2)
    return arguments.backend.rows_per_slice(widest) if arguments.trunk_learns else len(problem.hidden)


def _run_checks(checks: list[tuple[str, Tensor, FiniteCheck]], weight: Tensor) -> None:
    for name, state, check in checks:
        check.enforce(state, weight, name)


def _loss_and_grads(token_loss: TokenLoss, stats: RowStats, rows: Tensor, arguments: _Arguments) -> tuple[Tensor, RowGrads | None]:
    """A slice's loss and its derivatives with respect to each row's log-prob and entropy (None if the trunk does not learn)."""
    learns = arguments.trunk_learns
    logprob = stats.logprob.detach().requires_grad_(learns)
    entropy = stats.entropy.detach().requires_grad_(learns) if arguments.entropy else None
    with torch.set_grad_enabled(learns):
        value, sums = token_loss(logprob, entropy, rows)
    for name, x in sums.items():
        arguments.sums[name] = arguments.sums[name] + x.detach() if name in arguments.sums else x.detach()
    if not learns:
        return value, None
    if not value.requires_grad:  # constant, for example if no token of the slice is trained on
        return value, RowGrads(torch.zeros_like(logprob), stats.lse)
    leaves = [logprob] if entropy is None else [logprob, entropy]
    grads = torch.autograd.grad(value, leaves, grad_outputs=torch.full_like(value, arguments.grad_scale), allow_unused=True)
    logprob_grad = torch.zeros_like(logprob) if grads[0] is None else grads[0].contiguous()
    entropy_grad = grads[1] if entropy is not None else None
    if entropy_grad is None:
        return value.detach(), RowGrads(logprob_grad, stats.lse)
    return value.detach(), RowGrads(logprob_grad, stats.lse, entropy_grad.contiguous(), stats.entropy)
