"""Recomputing the inputs of matrix products in the backward pass, where elementwise work makes them.

A linear layer keeps its input for its weight's gradient. Where that input is a norm's output or a gated product, autograd keeps the
norm's or product's own inputs as well, and one of the two is enough: the elementwise work is repeated in the backward pass, at the speed
of memory. No matrix product or attention is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext


@contextmanager
def recomputed(value: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Operations inside the block that would save `value` for their backward pass save nothing, and call `compute` in the backward pass.

    `compute` has to give the same numbers again. It runs without gradients, once for each operation that saved `value`.
    """
    place, count = value.data_ptr(), value.numel()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        whole = saved.data_ptr() == place and saved.numel() == count and saved.is_contiguous()
        return saved.shape if whole else saved

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return compute().view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _GatedProduct(torch.autograd.Function):
    """silu(gate) · up · scale, which keeps only its arguments for the backward pass."""

    @staticmethod
    def forward(ctx: AutogradContext, both: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(both, scale)
        product = _compiled(_product) if _compiles(both) else _product
        return product(both, scale)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        both, scale = ctx.saved_tensors
        product_backward = _compiled(_product_backward) if _compiles(both) else _product_backward
        return product_backward(grads[0], both, scale)


def gated_product(both: Tensor, scale: Tensor | None = None) -> Tensor:
    """both [..., 2 F]: gate, then up; scale [...], or None for 1 → silu(gate) · up · scale [..., F] (SwiGLU, arXiv 2002.05202)."""
    return _GatedProduct.apply(both, scale)


def _product(both: Tensor, scale: Tensor | None) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    product = F.silu(gate) * up
    return product if scale is None else (product * scale[..., None]).to(both.dtype)


def _product_backward(grad: Tensor, both: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = both.chunk(2, dim=-1)
    share = gate.sigmoid()
    scale_grad = None
    if scale is not None:
        scale_grad = (grad.to(scale.dtype) * (gate * share * up)).sum(-1)
        grad = grad * scale[..., None]
    gate_grad = grad * up * (share * (1 + gate * (1 - share)))
    return torch.cat([gate_grad, grad * (gate * share)], dim=-1).to(both.dtype), scale_grad


# Not compiled at import, where torch would import its compiler: a CPU never asks for it.
_compiled = cache(torch.compile)


def _compiles(like: Tensor) -> bool:
    """Whether to run one compiled kernel: on a card. A CPU runs the operations one by one, and so does an expert that no token visits."""
    return like.is_cuda and like.numel() > 0
