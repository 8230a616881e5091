"""Log-probs of a micro-batch whose tokens lie on several context-parallel ranks, known on all of them.

Each rank computes those of its own tokens and all are summed over disjoint places. A loss over all of them is then the same
on every rank, while its gradient is taken by each for its own tokens alone: summed over ranks that is the whole, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.logprob import LogProbOut, TopK


class _Everywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(total, *values.shape[1:])
        whole[places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None, None


def over_ranks(
    scored: Callable[[Tensor, Tensor, Any], LogProbOut],
    rows: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    *,
    here: Tensor,
    group: dist.ProcessGroup,
) -> LogProbOut:
    """`scored` on those `rows` that are this rank's, by `Packing.here`, and the results for all `rows` on every rank."""
    own = here[rows]
    places = torch.nonzero(own >= 0).squeeze(1)
    out = scored(own[places], labels[places], temperature[places] if isinstance(temperature, Tensor) else temperature)

    def everywhere(values: Tensor) -> Tensor:
        return _Everywhere.apply(values, places, len(rows), group)

    return LogProbOut(
        everywhere(out.logprob),
        None if out.entropy is None else everywhere(out.entropy),
        None if out.hit is None else everywhere(out.hit.float()) > 0,
        None if out.topk is None else TopK(everywhere(out.topk.logprob), everywhere(out.topk.ids)),
    )
