"""`linear_policy_loss`: a policy loss and its gradients from hidden states, in one pass and three matrix products, and the losses of drafts
that learn from the same logits.

A loss that couples tokens is made separable by a first pass: GSPO's sequence ratio comes from `linear_logprob` without gradient, and
is then a constant of each token.

Unlike in plain autograd the gradients are made in the forward pass (`mtpctl.kernels.sweep`), for an upstream gradient that the caller
states beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.call import prepare
from mtpctl.kernels.choice import choose
from mtpctl.kernels.draft_terms import Draft, DraftLossOut
from mtpctl.kernels.sweep import TokenLoss, sweep

__all__ = ["PolicyLossOut", "TokenLoss", "linear_policy_loss"]


class PolicyLossOut(NamedTuple):
    """loss_sum: differentiable, once. sums: those that `token_loss` named, added up. logprob, entropy and hit [N]: as in `LogProbOut`,
    without gradient. drafts: of each draft its loss (before its weight) and rows, without gradient."""

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
    """The sum of `token_loss` over the selected rows, with its gradients of hidden and weight; and the drafts' losses times their weights.

    token_loss: called once a slice of rows with their log-probs, entropies (None unless `entropy`) and row indices; gives the
        slice's summed loss and any sums to report. It must be separable: no term may look at another token's log-prob. It is
        differentiated inside.
    drafts: what learns from the distributions of these rows, which take no gradient from it. Its states do, and unless it says otherwise
        the weight, through the draft's own logits.
    grad_scale: the gradient that `loss_sum` will receive (1 / global denominator, times a loss scale). Gradients are made for it.
        If another comes they are rescaled. Where they cannot be (they are in `main_grad` already, or were made for 0) the backward pass
        raises ValueError.

    All else is as in `linear_logprob`. The default workspace of 1 GiB makes slices of about 3,000 rows at 150,000 vocabulary entries, 1,600
    with drafts; of a half-precision weight gradient every further slice costs one more rounding, unless it is added to an fp32 `main_grad`.
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
    for draft in drafts:
        draft.check(hidden)
    backend = choose(implementation, hidden, weight, rows=call.rows.count)
    swept = sweep(
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
    row_entropy, greedy = swept.entropy if entropy else None, swept.hit if hit else None
    return PolicyLossOut(swept.loss_sum, swept.sums, swept.logprob, row_entropy, greedy, swept.drafts)
