"""Token embeddings whose gradient goes straight into the weight's fp32 buffer.

A micro-batch touches few rows of a vocabulary. Autograd would make a gradient of the whole weight, zeroed first, and add all of it to the
buffer, which for a large vocabulary takes a card longer than a layer's attention.
"""

from __future__ import annotations

from typing import Protocol

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding as UpstreamVocabParallelEmbedding,
)
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.main_grad import is_buffered


class VocabParallelEmbedding(UpstreamVocabParallelEmbedding):
    """Ids [1, T] → [1, T, H], or [t, 1, H] with sequence parallelism. Megatron-Bridge knows its parameter by the class's name."""

    def forward(self, input_: Tensor) -> Tensor:
        weight, ids, outside = self.weight, input_, None
        if not is_buffered(weight):
            found: Tensor = super().forward(input_)
            return found
        if self.tp_group.size() > 1:
            outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = (input_ - self.vocab_start_index).masked_fill(outside, 0)
        rows: Tensor = _Rows.apply(weight, ids, outside)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group) if outside is not None else rows


class _Context(AutogradContext, Protocol):
    weight: Tensor


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, weight: Tensor, ids: Tensor, outside: Tensor | None) -> Tensor:
        ctx.save_for_backward(ids, outside)
        ctx.weight = weight  # a parameter, which lives longer than the graph
        rows = torch.nn.functional.embedding(ids, weight)
        return rows if outside is None else rows.masked_fill(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[None, None, None]:
        ids, outside = ctx.saved_tensors
        buffer: Tensor = ctx.weight.main_grad  # type: ignore[attr-defined]
        grad = grads[0].to(buffer.dtype)
        if outside is not None:
            grad = grad.masked_fill(outside.unsqueeze(-1), 0.0)
        # Adds rows of one id in a fixed order on a card too, other than `index_add_`.
        buffer.index_put_((ids.flatten(),), grad.flatten(0, -2), accumulate=True)
        return None, None, None
