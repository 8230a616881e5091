"""The logits of a few named entries of the vocabulary for each token, and a loss of them, without the logits of all entries.

A loss of log-probs of k named entries has, by a logit z_j, the gradient  c_j − M p_j, where c_j is its derivative by the log-prob of entry
j (0 where j is not named) and M the sum of c over the named entries. The second part is that of a multiple of any one log-prob, which a
kernel over the whole vocabulary makes anyway; the first one touches k rows of the head a token, and is made here.

Shape legend: N tokens, k named entries, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels import reduce
from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.call import DEFAULT_WORKSPACE_BYTES, weight_sink
from mtpctl.kernels.inputs import Shard, vocab_shard


@dataclass(frozen=True)
class Candidates:
    """The named entries of N tokens. logits [N, k]: scaled, over all ranks, without gradient, at least fp32.

    Set `pull` [N, k] to the derivatives of the loss by these logits, the part of M p_j left out; `loss()` then carries their gradient.
    """

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    inverse_temperature: float
    shard: Shard
    workspace_bytes: int
    main_grad: bool
    logits: Tensor
    pull: Tensor

    def loss(self) -> Tensor:
        """0, whose gradients of states and head are those that `pull` asks for times the one that comes from above."""
        made: Tensor = _Pull.apply(self, self.hidden, self.weight)
        return made


def candidates(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    workspace_bytes: int | None = None,
    main_grad: bool = False,
) -> Candidates:
    """The logits of `ids` [N, k] under states `hidden` [N, H] and this rank's rows of the head, `weight` [V, H].

    group: the ranks that share the vocabulary; every one of them has the same hidden and ids, and its gradient of hidden is the whole one.
    The other arguments are as in `linear_logprob`. Raises ValueError for ids of another shape.
    """
    if ids.dim() != 2 or len(ids) != len(hidden):
        raise ValueError(f"ids: shape {tuple(ids.shape)} does not fit hidden {tuple(hidden.shape)}: expected [{len(hidden)}, k]")
    shard = vocab_shard(weight, group, valid_vocab)
    workspace = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = torch.zeros(ids.shape, dtype=wide, device=hidden.device)
    with torch.no_grad():
        for part, local, here in _parts(hidden, ids, shard, workspace):
            rows = weight[local]
            logits[part] = torch.einsum("nh,nkh->nk", hidden[part].to(wide), rows.to(wide)).div_(temperature).masked_fill_(~here, 0)
        logits = reduce.sum_ranks(logits, shard)
    return Candidates(hidden, weight, ids, 1 / temperature, shard, workspace, main_grad, logits, torch.zeros_like(logits))


def _parts(hidden: Tensor, ids: Tensor, shard: Shard, workspace: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Ranges of tokens, with the rows of this rank's weight that they name, and which of those it has; the rows fit the workspace."""
    at_once = max(1, workspace // (3 * max(1, ids.shape[1]) * hidden.shape[1] * 4))
    for start in range(0, len(ids), at_once):
        part = slice(start, min(start + at_once, len(ids)))
        local = ids[part].long() - shard.start
        here = (local >= 0) & (local < shard.valid)
        yield part, local.masked_fill(~here, 0), here


class _Context(AutogradContext, Protocol):
    made: Candidates


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, made: Candidates, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.made = made
        return made.logits.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        made = ctx.made
        hidden, weight = made.hidden.detach(), made.weight
        by_hidden, by_weight = ctx.needs_input_grad[1:]
        sink = weight_sink(weight, by_weight, made.main_grad)
        if sink.out is not None and not sink.add:
            sink.out.zero_()
        pull = made.pull * (grad * made.inverse_temperature)
        hidden_grad = torch.zeros(hidden.shape, dtype=pull.dtype, device=hidden.device) if by_hidden else None
        for part, local, here in _parts(hidden, made.ids, made.shard, made.workspace_bytes):
            some = pull[part].masked_fill(~here, 0)
            if hidden_grad is not None:
                hidden_grad[part] = torch.einsum("nk,nkh->nh", some, weight.detach()[local].to(pull.dtype))
            if sink.out is not None:
                each = torch.einsum("nk,nh->nkh", some, hidden[part].to(pull.dtype))
                sink.out.index_add_(0, local.flatten(), each.flatten(0, 1).to(sink.out.dtype))
        if hidden_grad is not None:
            hidden_grad = reduce.sum_ranks(hidden_grad, made.shard).to(hidden.dtype)
        return None, hidden_grad, sink.finish()
