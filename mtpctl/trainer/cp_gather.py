"""Log-probs of a micro-batch whose tokens lie on several context-parallel ranks, gathered so that every rank has all of them.

Each rank computes the log-probs of its own tokens, and an all-reduce over disjoint places puts them together. A loss over all tokens is
then the same on every rank. In the backward pass each rank takes the gradient of its own tokens alone, so that the sum over ranks counts
every token once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.logprob import LogProbOut, TopK


class _Gather(torch.autograd.Function):
    """values [r, ...] of this rank → [total, ...] of all ranks; `places` [r] says where this rank's values go."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(total, *values.shape[1:])
        whole[places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None, None


def gather_over_cp(
    logprob: Callable[[Tensor, Tensor, float | Tensor], LogProbOut],
    rows: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    *,
    here: Tensor,
    group: dist.ProcessGroup,
) -> LogProbOut:
    """Call `logprob(rows, labels, temperature)` for the rows that are this rank's, and return the results for all `rows` on every rank.

    rows [R]: places in the whole micro-batch; labels [R]; temperature: a number or [R]; here: `Packing.here`, from a place in the whole
    micro-batch to one among this rank's tokens.
    """
    own = here[rows]
    places = torch.nonzero(own >= 0).squeeze(1)
    out = logprob(own[places], labels[places], temperature[places] if isinstance(temperature, Tensor) else temperature)

    def gathered(values: Tensor) -> Tensor:
        return _Gather.apply(values, places, len(rows), group)

    return LogProbOut(
        gathered(out.logprob),
        None if out.entropy is None else gathered(out.entropy),
        None if out.hit is None else gathered(out.hit.float()) > 0,
        None if out.topk is None else TopK(gathered(out.topk.logprob), gathered(out.topk.ids)),
    )
