"""Weights as they were loaded, where vLLM keeps them in another layout (vLLM 0.32.0).

A mixture's experts lie in `w13_weight` and `w2_weight`. On a CPU vLLM packs both for its grouped kernel, and nothing is left
that a weight update could write to or that a checksum could read; so the loaded weights are kept beside them there, and packed
anew after an update. The short convolution of a gated delta net is packed too, and there vLLM itself keeps the loaded one. On a
card only kernels that take the loaded layout are served: the others are refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned
from mtpctl.sync.parameters import ShapeMismatch

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_KEPT = "_mtpctl_plain"
_CONVOLUTION = "_cpu_unpacked_conv_weight"
_PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON")


class PackedWeight(ShapeMismatch):
    """A weight lies in a layout of its kernel's own."""


def install() -> bool:
    """Keep the weights that a CPU packs; returns whether that is in place. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if hasattr(CPUUnquantizedExperts.process_weights_after_loading, _KEPT):
        return True
    require_pinned(__name__)
    upstream = CPUUnquantizedExperts.process_weights_after_loading

    def process_weights_after_loading(self: CPUUnquantizedExperts, layer: nn.Module) -> None:
        if _KEPT not in layer.__dict__:
            # The layer has the router's bias too, which is updated where the router has it.
            leaves = [leaf for leaf, _ in layer.named_parameters(recurse=False) if leaf.startswith(("w13_", "w2_"))]
            kept = {leaf: layer.get_parameter(leaf).data.clone() for leaf in leaves}
            layer.__dict__[_KEPT] = (self, kept)
        upstream(self, layer)

    setattr(process_weights_after_loading, _KEPT, True)
    assign(CPUUnquantizedExperts, process_weights_after_loading=process_weights_after_loading)
    return True


def plain_weight(layer: nn.Module, leaf: str) -> torch.Tensor:
    """Memory of a layer's parameter in the layout of loading. Raises PackedWeight where there is none."""
    if leaf == "weight" and hasattr(layer, _CONVOLUTION):
        kernel: torch.Tensor = getattr(layer, _CONVOLUTION)
        return kernel.view(kernel.shape[0], 1, -1)
    if _KEPT in layer.__dict__:
        plain: torch.Tensor = layer.__dict__[_KEPT][1][leaf]
        return plain
    backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
    if backend is not None and backend.name not in _PLAIN_BACKENDS:
        raise PackedWeight(
            f"belongs to experts that vLLM packs for its {backend.name} kernel; set rollout.engine_args: {{moe_backend: triton}}"
        )
    found: torch.Tensor = getattr(layer, leaf).data
    if not found.numel():
        raise PackedWeight(
            "belongs to a layer that vLLM holds packed alone; take attention_backend out of rollout.engine_args, if it is there"
        )
    return found


def repack(model: nn.Module) -> None:
    """Pack anew, after an update of the memory that `plain_weight` gave, each weight that the model keeps packed."""
    for layer in model.modules():
        if hasattr(layer, _CONVOLUTION):
            from vllm import _custom_ops as ops

            layer.get_parameter("weight").data.copy_(ops.causal_conv1d_weight_pack(getattr(layer, _CONVOLUTION)))
        if _KEPT in layer.__dict__:
            experts, kept = layer.__dict__[_KEPT]
            for leaf, plain in kept.items():
                layer.register_parameter(leaf, nn.Parameter(plain.clone(), requires_grad=False))
            experts.process_weights_after_loading(layer)
