"""Have megatron-core's linear layers put weight gradients into fp32 buffers themselves, without Apex.

megatron-core does so by a compiled library of Apex, which most installations lack; otherwise a gradient in the weight's precision is made,
and a hook adds it to the buffer. torch's matrix products accumulate in fp32 buffers too, so they take the library's place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from torch import Tensor, nn

Accumulate = Callable[[Tensor, Tensor, Tensor], None]
"""Puts a weight's gradient into its buffer [out, in], from grad [R, out] and x [R, in]."""


class _Library:
    """What megatron-core calls of Apex's library."""

    def __init__(self, accumulate: Accumulate) -> None:
        self._accumulate = accumulate

    def wgrad_gemm_accum_fp32(self, x: Tensor, grad: Tensor, buffer: Tensor) -> None:
        self._accumulate(buffer, grad, x)


def fill_buffers(modules: Sequence[nn.Module], accumulate: Accumulate) -> None:
    """Have these linear layers call `accumulate` in their backward pass, for weights that have a `main_grad`.

    Raises RuntimeError where megatron-core's linear layers no longer look for Apex's library.
    """
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    if not hasattr(layers, "_grad_accum_fusion_available") or any(not hasattr(each, "gradient_accumulation_fusion") for each in modules):
        raise RuntimeError("megatron-core's linear layers no longer take Apex's library for weight gradients")
    vars(layers)["fused_weight_gradient_mlp_cuda"] = _Library(accumulate)
    for each in modules:
        vars(each)["gradient_accumulation_fusion"] = True
