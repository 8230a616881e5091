"""`linear_policy_loss`: a policy loss and its gradients from hidden states, in one pass and three matrix products.

The gradient that a logit takes depends on its row's softmax and on two numbers: what the loss asks of that token's log-prob and
entropy. When the loss is separable (each token's term looks at that token alone), both numbers are known as soon as the token's row
of logits is. So rows are taken a slice at a time: logits, statistics, the loss and its two numbers, the gradient of the logits in
their own place, and the two products that need it. Nothing is computed twice, and nothing but the gradients outlives a slice.

A loss that couples tokens is made separable by a first pass: GSPO's sequence ratio comes from `linear_logprob` without gradient, and
is then a constant of each token.

Unlike in plain autograd the gradients are made in the forward pass, for an upstream gradient that the caller states beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels import inputs, reduce
from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.call import Call, prepare, weight_sink
from mtpctl.kernels.choice import Features, choose
from mtpctl.kernels.made_grads import MadeGrads
from mtpctl.kernels.problem import Backend, Problem, RowGrads

# token_loss(logprob [r], entropy [r] or None, rows [r]) -> (summed loss, named sums). `rows` are indices among all N rows.
TokenLoss = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, dict[str, Tensor]]]


class PolicyLossOut(NamedTuple):
    """loss_sum: differentiable, once. sums: those that `token_loss` named, added up. logprob, entropy and hit [N]: as in `LogProbOut`,
    without gradient."""

    loss_sum: Tensor
    sums: dict[str, Tensor]
    logprob: Tensor
    entropy: Tensor | None
    hit: Tensor | None


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    grad_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy: bool = False,
    hit: bool = False,
    rows: Tensor | None = None,
    detach_weight: bool = False,
    valid_vocab: int | None = None,
    workspace_bytes: int | None = None,
    implementation: str = "auto",
    main_grad: bool = False,
) -> PolicyLossOut:
    """The sum of `token_loss` over the selected rows, with its gradients of hidden and weight.

    token_loss: called once a slice of rows with their log-probs, entropies (None unless `entropy`) and row indices; gives the
        slice's summed loss and any sums to report. It must be separable: no term may look at another token's log-prob. It is
        differentiated inside.
    grad_scale: the gradient that `loss_sum` will receive (1 / global denominator, times a loss scale). Gradients are made for it.
        If another comes they are rescaled. Where they cannot be (they are in `main_grad` already, or were made for 0) the backward pass
        raises ValueError.

    All else is as in `linear_logprob`. The default workspace of 1 GiB makes slices of about 3,000 rows at 150,000 vocabulary entries; of a
    half-precision weight gradient every further slice costs one more rounding, unless it is added to an fp32 `main_grad`.
    """
    if not 0 <= grad_scale < math.inf:
        raise ValueError(f"grad_scale: {grad_scale}, expected a finite number, 0 or above")
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
    backend = choose(implementation, hidden, weight, Features(call, separable_loss=True))
    sums: dict[str, Tensor] = {}
    by_hidden, by_weight = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    arguments = _Arguments(call, backend, token_loss, entropy, grad_scale, by_hidden, by_weight, sums)
    loss, logprob, row_entropy, greedy = _LinearPolicyLoss.apply(hidden, weight, labels, arguments)
    return PolicyLossOut(loss, sums, logprob, row_entropy if entropy else None, greedy if hit else None)


class _Arguments(NamedTuple):
    call: Call
    backend: Backend
    token_loss: TokenLoss
    entropy: bool
    grad_scale: float
    hidden: bool
    weight: bool
    sums: dict[str, Tensor]


class _Context(AutogradContext, Protocol):
    made: MadeGrads | None


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, labels: Tensor, arguments: _Arguments) -> tuple[Tensor, ...]:
        call, backend = arguments.call, arguments.backend
        whole = call.problem(hidden, weight, labels)
        n, keep = len(whole.hidden), arguments.hidden or arguments.weight
        index = torch.arange(call.rows.total, device=labels.device) if call.rows.index is None else call.rows.index
        sink = weight_sink(weight, arguments.weight, call.main_grad)
        share = call.share_dtype(hidden) if arguments.hidden else None
        hidden_grad = None if share is None else torch.empty(whole.hidden.shape, dtype=share, device=hidden.device)
        logprob, row_entropy, checked = torch.zeros(3, n, dtype=whole.wide, device=hidden.device).unbind(0)
        greedy = torch.zeros(n, dtype=torch.bool, device=hidden.device)
        loss = torch.zeros((), dtype=whole.wide, device=hidden.device)
        # Ranks join statistics once a slice, so all of them need the same slices: those of the first rank, which has the most columns.
        widest = replace(whole, valid=min(call.shard.columns, call.shard.total))
        for number, part in enumerate(slices(n, backend.rows_that_keep(widest) if keep else n)):
            problem = part_of(whole, part)
            scores = backend.scores(problem, entropy=arguments.entropy, topk=0, keep=keep)
            stats = reduce.join_shards(scores.stats, call.shard)
            checked[part] = stats.lse + stats.entropy if arguments.entropy else stats.lse
            logprob[part], greedy[part] = stats.logprob, stats.hit
            if arguments.entropy:
                row_entropy[part] = stats.entropy
            value, per_row = _loss_and_grads(stats, index[part], arguments, keep)
            loss += value
            if per_row is not None:
                local = backend.grads(problem, per_row, scores.kept, hidden=share, weight=sink.out, add=sink.add or number > 0)
                if hidden_grad is not None and local is not None:
                    hidden_grad[part] = local
            del scores  # frees this slice's logits before the next slice's are made
        finite = inputs.FiniteCheck(checked)
        if keep:
            if hidden_grad is not None:
                hidden_grad = call.whole_hidden_grad(hidden_grad, hidden.dtype)
            check = partial(finite.enforce, whole.hidden.detach(), weight.detach())
            ctx.made = MadeGrads(hidden_grad, sink, arguments.grad_scale, check)
        else:
            finite.enforce(whole.hidden, weight)
        spread = call.rows.spread
        outputs = loss, spread(logprob), spread(row_entropy), spread(greedy)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("linear_policy_loss: its gradients were made for one backward pass, which has been")
        made, ctx.made = ctx.made, None
        return *made.given(grad.item()), None, None


def slices(n: int, at_most: int) -> list[slice]:
    """Ranges of rows, about equal (in whole 128s), none longer than `at_most`; one empty range where there are no rows."""
    count = max(1, math.ceil(n / max(1, at_most)))
    size = math.ceil(n / count)
    if at_most >= 128:
        size = min(at_most, math.ceil(size / 128) * 128)
    return [slice(start, min(start + size, n)) for start in range(0, max(n, 1), max(size, 1))]


def part_of(whole: Problem, part: slice) -> Problem:
    """The problem of some of the rows."""
    inverse = whole.inverse_temperature
    return replace(
        whole,
        hidden=whole.hidden[part],
        targets=whole.targets[part],
        inverse_temperature=inverse[part] if isinstance(inverse, Tensor) else inverse,
    )


def _loss_and_grads(stats: reduce.RowStats, rows: Tensor, arguments: _Arguments, keep: bool) -> tuple[Tensor, RowGrads | None]:
    """The loss of a slice, and what it asks of each row."""
    logprob = stats.logprob.detach().requires_grad_(keep)
    entropy = stats.entropy.detach().requires_grad_(keep) if arguments.entropy else None
    with torch.set_grad_enabled(keep):
        value, sums = arguments.token_loss(logprob, entropy, rows)
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
