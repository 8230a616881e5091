"""Random weights, drawn where they will live: for measuring shapes whose trained weights are not at hand."""

from __future__ import annotations

import torch
from megatron.core import parallel_state


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int, std: float = 0.02) -> None:
    """Norms 1, biases 0, matrices normal(0, std). The same layout and seed give the same weights; another layout gives others."""
    tp_rank, pp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed + 1009 * tp_rank + 9176 * pp_rank)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, std, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
