"""Matrix products that accumulate in fp32: for the LM head, and for linear layers whose weight gradients bypass autograd.

LM head: on CUDA, half-precision operands use cuBLAS's mixed-precision product (half in, fp32 out). CPUs have none, so operands are
converted to fp32.

Linear layers write their weight gradient to Megatron's fp32 buffer `main_grad`. Megatron adds the gradients of all microbatches to the
buffer. Zeroing it before an update and reading the zeros would take as much memory traffic as another microbatch's gradient.
Instead, the buffer is marked stale and the first gradient overwrites it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)
ALIGNED_COLUMNS = 8  # products are fast if rows have a multiple of this many elements


def _uses_mixed_product(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF_DTYPES


def _to_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_DTYPES else x


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n, H] x [c, H] -> [n, c] in fp32 (fp64 from fp64)."""
    if _uses_mixed_product(hidden):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return _to_fp32(hidden) @ _to_fp32(weight).T


def hidden_grad(total: Tensor | None, logit_grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """logit_grad [n, c] x weight [c, H] -> [n, H].

    With `total`, fp32 (fp64 from fp64), adds to it in place and returns it. Else returns a new tensor in `dtype`, or in fp32 on CUDA if
    c exceeds `ALIGNED_COLUMNS` and is not a multiple of it.
    """
    if not _uses_mixed_product(weight):
        if total is None:
            return (_to_fp32(logit_grad) @ _to_fp32(weight)).to(dtype)
        return total.addmm_(_to_fp32(logit_grad), _to_fp32(weight))
    logit_grad = logit_grad.to(weight.dtype)
    aligned = logit_grad.shape[1] // ALIGNED_COLUMNS * ALIGNED_COLUMNS
    if 0 < aligned < logit_grad.shape[1]:  # cuBLAS is several times slower for unaligned lengths.
        total = hidden_grad(total, logit_grad[:, :aligned], weight[:aligned], torch.float32)
        logit_grad, weight = logit_grad[:, aligned:], weight[aligned:]
    if total is not None:
        return torch.addmm(total, logit_grad, weight, out_dtype=total.dtype, out=total)
    return torch.mm(logit_grad, weight) if dtype == weight.dtype else torch.mm(logit_grad, weight, out_dtype=dtype)


def weight_grad(logit_grad: Tensor, hidden: Tensor, out: Tensor, add: bool) -> None:
    """Write logit_gradᵀ x hidden to `out` [c, H], or `add` it. logit_grad [n, c], hidden [n, H]; `out` is fp32 or of hidden's dtype."""
    if not _uses_mixed_product(hidden):
        product = _to_fp32(logit_grad).T @ _to_fp32(hidden)
        if add and out.dtype == product.dtype:
            out.add_(product)
        else:
            out.copy_(out + product if add else product)
        return
    logit_grad = logit_grad.to(hidden.dtype)
    if out.dtype == hidden.dtype:
        torch.addmm(out, logit_grad.T, hidden, out=out) if add else torch.mm(logit_grad.T, hidden, out=out)
    elif add:
        torch.addmm(out, logit_grad.T, hidden, out_dtype=out.dtype, out=out)
    else:
        torch.mm(logit_grad.T, hidden, out_dtype=out.dtype, out=out)


def is_buffered(weight: Tensor) -> bool:
    """Whether the weight is trained and has a gradient buffer."""
    return weight.requires_grad and getattr(weight, "main_grad", None) is not None


def autograd_leaf(weight: Tensor, x: Tensor) -> Tensor | None:
    """The weight, if autograd must track it in a product with the input x; otherwise None.

    If x requires a gradient, the backward pass runs anyway, and computes the gradient of a buffered weight. Tracking that weight would
    only run a hook that finds no gradient.
    """
    return None if x.requires_grad and is_buffered(weight) else weight


def mark_stale(buffer: Tensor) -> None:
    """Mark the start of an update: the next gradient overwrites `buffer`."""
    buffer.stale = True  # type: ignore[attr-defined]


def take_stale(buffer: Tensor) -> bool:
    """Whether the next gradient overwrites `buffer`. Clears the mark, so that later gradients are added."""
    stale: bool = getattr(buffer, "stale", False)
    if stale:
        buffer.stale = False  # type: ignore[attr-defined]
    return stale


def add_to_buffer(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Add an fp32 gradient to the weight's buffer and return None, or return it in the weight's dtype if the weight has no buffer.

    The buffer must not be marked stale. Bypassing autograd avoids rounding the gradient, and saves the host the time of a hook.
    """
    if not is_buffered(weight):
        return grad.to(weight.dtype)
    weight.main_grad.add_(grad)  # type: ignore[attr-defined]
    return None


def accumulate_weight_grad(buffer: Tensor, grad: Tensor, x: Tensor) -> None:
    """Write gradᵀ · x to the fp32 `buffer` [out, in], or add it if the buffer is not stale. grad [R, out], x [R, in].

    On CUDA, products of half-precision operands accumulate in fp32. On a CPU, the product of a microbatch is rounded to half precision
    before it is added.
    """
    stale = take_stale(buffer)
    if x.dtype == buffer.dtype:
        torch.mm(grad.t(), x, out=buffer) if stale else buffer.addmm_(grad.t(), x)
    elif not x.is_cuda:
        product = grad.t() @ x
        buffer.copy_(product) if stale else buffer.add_(product)
    elif stale:
        torch.mm(grad.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        torch.addmm(buffer, grad.t(), x, out_dtype=buffer.dtype, out=buffer)


def buffered_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] · weightᵀ → [..., out]. `weight` [out, in] must satisfy `is_buffered`."""
    return _BufferedLinear.apply(x, (weight,), autograd_leaf(weight, x))


class _BufferedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor], _leaf: Tensor | None) -> Tensor:
        (weight,) = weights  # in a tuple, so that autograd does not track it
        ctx.save_for_backward(x)
        ctx.weight = weight  # a parameter, which outlives the graph
        return torch.mm(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x_grad, _weight_grad = linear_backward(ctx, grads[0])
        return x_grad, None, None


def linear_backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x [..., in] (the saved tensor) and of `ctx.weight`. If the weight has a buffer, its gradient goes there instead."""
    (x,), weight = ctx.saved_tensors, ctx.weight
    grad = out_grad.flatten(0, -2)
    x_grad = (grad @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
    if is_buffered(weight):
        accumulate_weight_grad(weight.main_grad, grad, x.flatten(0, -2))
        return x_grad, None
    return x_grad, grad.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
