"""Random weights, drawn where they will live: for measuring shapes whose trained weights are not at hand."""

from __future__ import annotations

import torch
from megatron.core import parallel_state


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Norms 1, biases 0, matrices normal(0, 0.02). The same layout and seed give the same weights; another layout gives others.

    Ranks that hold the same part of a parameter draw the same.
    """
    device = next(model.parameters()).device
    stage = 9176 * parallel_state.get_pipeline_model_parallel_rank()
    tp = 1009 * parallel_state.get_tensor_model_parallel_rank()
    expert = 1009 * parallel_state.get_expert_tensor_parallel_rank() + 5003 * parallel_state.get_expert_model_parallel_rank()

    def generator(offset: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed + offset)

    split, whole, experts, embedding = (generator(kind + place) for kind, place in enumerate((stage + tp, stage, stage + expert, tp)))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        if name == "embedding.word_embeddings.weight":  # the last stage has it too
            drawn_from = embedding
        elif not getattr(parameter, "allreduce", True):
            drawn_from = experts
        else:
            drawn_from = split if getattr(parameter, "tensor_model_parallel", False) else whole
        parameter.normal_(0.0, 0.02, generator=drawn_from)
