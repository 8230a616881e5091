"""`linear_draft_loss`: an MTP depth's loss against the trunk's own distribution, both from hidden states and one LM head.

It makes the trunk's logits for this alone. Where the trunk has a separable loss of its own in the same step, `linear_policy_loss` takes
drafts along and saves that product. `mtpctl.kernels.draft_terms` has the losses.

Shape legend: N rows (tokens), H hidden size.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.call import prepare
from mtpctl.kernels.choice import ONE_PASS, choose
from mtpctl.kernels.draft_terms import Draft, DraftLossOut
from mtpctl.kernels.problem import DraftLoss
from mtpctl.kernels.reference import reference_draft
from mtpctl.kernels.sweep import sweep

IMPLEMENTATIONS = (*ONE_PASS, "reference")


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
    """`mix` times the sum of `loss` over the selected rows, and 1 − `mix` times their cross-entropy. `loss_sum` is differentiable, once.

    hidden [N, H]: the draft's states; teacher [N, H]: the trunk's states that the same tokens were sampled from, which take no gradient,
        and through which the weight takes none; labels [N]: the sampled tokens.
    grad_scale: the gradient that `loss_sum` will receive; see `linear_policy_loss`, also for the error where another one comes.
    implementation: as in `linear_policy_loss`, or "reference" (float64, every logit in memory).

    All else is as in `linear_logprob`. Raises ValueError, naming the argument, for what does not fit.
    """
    if not 0 <= grad_scale < math.inf:
        raise ValueError(f"grad_scale: {grad_scale}, expected a finite number, 0 or above")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    if teacher.shape != hidden.shape or teacher.dtype != hidden.dtype:
        raise ValueError(f"teacher: {tuple(teacher.shape)} of {teacher.dtype}, expected hidden's {tuple(hidden.shape)} of {hidden.dtype}")
    draft = Draft(hidden, loss=loss, mix=mix, detach_weight=detach_weight)
    draft.check(hidden)
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
    if implementation == "reference":
        head = weight.detach() if detach_weight else weight
        return DraftLossOut(*reference_draft(hidden, teacher, head, labels, call, loss, mix))
    swept = sweep(
        "linear_draft_loss",
        call,
        choose(implementation, hidden, weight, rows=call.rows.count),
        teacher,
        weight,
        labels,
        None,
        [draft],
        entropy=False,
        grad_scale=grad_scale,
        detach_weight=True,
    )
    return swept.drafts[0]._replace(loss_sum=swept.loss_sum)
