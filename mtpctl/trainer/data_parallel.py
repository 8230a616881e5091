"""The model as data-parallel ranks train it: gradient buffers, and their reduction over ranks."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor


def wrap(model: MegatronModule, config: TransformerConfig, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """The model with fp32 gradient buffers, which the pipeline schedule reduces after its last backward pass (set in `config`)."""
    config.finalize_model_grads_func = _finish
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=False,
    )
    return DistributedDataParallel(config, settings, model)


def gradients(model: DistributedDataParallel) -> list[Tensor]:
    """The buffers that hold all gradients."""
    return [buffer.grad_data for buffer in [*model.buffers, *model.expert_parallel_buffers]]


def _finish(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: object) -> None:
    """megatron-core's gradient reductions without its division by tokens, since losses are divided by global counts already."""
    finalize_model_grads(model, None, **options)
