"""What autograd need not keep: inputs of matrix products that cheap work in front of them makes again.

A linear layer keeps its input for its weight's gradient. Where that input is a norm's output or a gated product, what it was
made of is kept as well, so the two are one too many: the elementwise work is done once more in the backward pass, at the
speed of memory, and no matrix product or attention is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def rebuilt(value: Tensor, build: Callable[[], Tensor]) -> Iterator[None]:
    """Within, whatever saves `value` for its backward pass saves nothing, and is given `build()` when it asks.

    `build` must give the same numbers again; it runs without gradients, once for everyone that asks.
    """
    place, count = value.data_ptr(), value.numel()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        whole = saved.data_ptr() == place and saved.numel() == count and saved.is_contiguous()
        return saved.shape if whole else saved

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return build().view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _GatedProduct(torch.autograd.Function):
    """silu(gate) · up · scale, which keeps its arguments alone."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, both: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(both, scale)  # type: ignore[arg-type]
        return _fused(_product, both)(both, scale)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        both, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        found: tuple[Tensor, Tensor | None] = _fused(_product_backward, both)(grads[0], both, scale)
        return found


def gated_product(both: Tensor, scale: Tensor | None = None) -> Tensor:
    """both [..., 2 F]: gate, then up; scale [...], or None for 1 → silu(gate) · up · scale [..., F] (SwiGLU, arXiv 2002.05202)."""
    product: Tensor = _GatedProduct.apply(both, scale)
    return product


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


_COMPILED = {function: torch.compile(function) for function in (_product, _product_backward)}


def _fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """One kernel on a card; a CPU runs the operations one by one, and so does an expert that no token visits."""
    return _COMPILED[function] if like.is_cuda and like.numel() else function
