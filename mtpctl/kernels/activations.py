"""Activations of MLPs and experts: SwiGLU (arXiv 2002.05202), and squared ReLU (arXiv 2109.08668) for Nemotron-H.

Each row may have a factor. Only the inputs are saved for the backward pass. On CUDA, one Triton kernel computes an activation and another
its gradients, in fp32 with one rounding.

Shape legend: R rows, F columns each of gate and up.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels.triton_support import launcher, on_device_of, tl, triton

BLOCK_COLUMNS = 1024
"""Maximum number of columns that a program processes at a time."""


def swiglu(gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up · scale [..., F], in the dtype of `gate_up` [..., 2 F], which is gate followed by up.

    scale [...]: a differentiable factor per row, such as an expert's routing weight; None means 1.
    """
    return _Swiglu.apply(gate_up, scale)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, scale)
        return swiglu_triton(gate_up, scale) if gate_up.is_cuda else swiglu_torch(gate_up, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up, scale = ctx.saved_tensors
        backward = swiglu_backward_triton if gate_up.is_cuda else swiglu_backward_torch
        return backward(grads[0], gate_up, scale)


def squared_relu(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """relu(x)² · scale [..., F], in the dtype of x [..., F].

    scale [...]: a differentiable factor per row, such as an expert's routing weight; None means 1.
    """
    return _SquaredRelu.apply(x, scale)


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        return squared_relu_triton(x, scale) if x.is_cuda else squared_relu_torch(x, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors
        backward = squared_relu_backward_triton if x.is_cuda else squared_relu_backward_torch
        return backward(grads[0], x, scale)


def squared_relu_torch(x: Tensor, scale: Tensor | None) -> Tensor:
    squared = F.relu(x).square()
    return squared if scale is None else (squared * scale[..., None]).to(x.dtype)


def squared_relu_backward_torch(grad: Tensor, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    positive = F.relu(x)
    if scale is None:
        return 2 * positive * grad, None
    scale_grad = (grad.to(scale.dtype) * positive.square()).sum(-1)
    return (2 * positive * (grad * scale[..., None])).to(x.dtype), scale_grad


def swiglu_torch(gate_up: Tensor, scale: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    product = F.silu(gate) * up
    return product if scale is None else (product * scale[..., None]).to(gate_up.dtype)


def swiglu_backward_torch(grad: Tensor, gate_up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    scale_grad = None
    if scale is not None:
        scale_grad = (grad.to(scale.dtype) * (gate * sigmoid * up)).sum(-1)
        grad = grad * scale[..., None]
    gate_grad = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat([gate_grad, grad * (gate * sigmoid)], dim=-1).to(gate_up.dtype), scale_grad


@triton.jit
@no_type_check
def _load_gate_up(gate_up_ptr, row, start, width, BLOCK: tl.constexpr):
    """A block of a row's columns: indices, mask, gate and up in fp32."""
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    return column, inside, gate, up


@triton.jit
@no_type_check
def swiglu_kernel(
    gate_up_ptr,  # [R, 2 F]
    scale_ptr,  # [R], read if SCALED
    out_ptr,  # [R, F]
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        column, inside, gate, up = _load_gate_up(gate_up_ptr, row, start, width, BLOCK)
        product = gate * tl.sigmoid(gate) * up * scale
        tl.store(out_ptr + row * width + column, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def swiglu_backward_kernel(
    grad_ptr,  # [R, F]
    gate_up_ptr,  # [R, 2 F]
    scale_ptr,  # [R], read if SCALED
    gate_up_grad_ptr,  # [R, 2 F]
    scale_grad_ptr,  # [R], written if SCALED
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column, inside, gate, up = _load_gate_up(gate_up_ptr, row, start, width, BLOCK)
        grad = tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        if SCALED:
            total += grad * gate * sigmoid * up
        grad *= scale
        gate_grad = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        tl.store(gate_up_grad_ptr + row * 2 * width + column, gate_grad.to(gate_up_grad_ptr.dtype.element_ty), mask=inside)
        up_grad = grad * gate * sigmoid
        tl.store(gate_up_grad_ptr + row * 2 * width + width + column, up_grad.to(gate_up_grad_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(scale_grad_ptr + row, tl.sum(total).to(scale_grad_ptr.dtype.element_ty))


@triton.jit
@no_type_check
def squared_relu_kernel(
    x_ptr,  # [R, F]
    scale_ptr,  # [R], read if SCALED
    out_ptr,  # [R, F]
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        positive = tl.where(x < 0, 0.0, x)  # keeps NaN, unlike tl.maximum on a GPU
        tl.store(out_ptr + row * width + column, (positive * positive * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def squared_relu_backward_kernel(
    grad_ptr,  # [R, F]
    x_ptr,  # [R, F]
    scale_ptr,  # [R], read if SCALED
    x_grad_ptr,  # [R, F]
    scale_grad_ptr,  # [R], written if SCALED
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        positive = tl.where(x < 0, 0.0, x)  # keeps NaN, unlike tl.maximum on a GPU
        grad = tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            total += grad * positive * positive
        tl.store(x_grad_ptr + row * width + column, (2 * positive * grad * scale).to(x_grad_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(scale_grad_ptr + row, tl.sum(total).to(scale_grad_ptr.dtype.element_ty))


def swiglu_triton(gate_up: Tensor, scale: Tensor | None) -> Tensor:
    return _activate(swiglu_kernel, gate_up, scale, gate_up.shape[-1] // 2)


def swiglu_backward_triton(grad: Tensor, gate_up: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return _activate_backward(swiglu_backward_kernel, grad, gate_up, scale)


def squared_relu_triton(x: Tensor, scale: Tensor | None) -> Tensor:
    return _activate(squared_relu_kernel, x, scale, x.shape[-1])


def squared_relu_backward_triton(grad: Tensor, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return _activate_backward(squared_relu_backward_kernel, grad, x, scale)


def _activate(kernel: Any, inputs: Tensor, scale: Tensor | None, width: int) -> Tensor:
    """Run the kernel of an activation. width: columns of its output."""
    inputs = inputs.contiguous()
    out = inputs.new_empty(*inputs.shape[:-1], width)
    if out.numel():
        scales = inputs if scale is None else scale.contiguous()
        with on_device_of(inputs):
            launcher(kernel, (out.numel() // width,))(inputs, scales, out, width, SCALED=scale is not None, BLOCK=_block(width))
    return out


def _activate_backward(kernel: Any, grad: Tensor, inputs: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run the kernel of an activation's gradients, of the inputs and of the scale."""
    inputs, grad = inputs.contiguous(), grad.contiguous()
    width = grad.shape[-1]
    inputs_grad = torch.empty_like(inputs)
    scale_grad = None if scale is None else torch.empty_like(scale, memory_format=torch.contiguous_format)
    if grad.numel():
        scales, scale_grads = (inputs, inputs) if scale is None else (scale.contiguous(), scale_grad)
        with on_device_of(inputs):
            launcher(kernel, (grad.numel() // width,))(
                grad, inputs, scales, inputs_grad, scale_grads, width, SCALED=scale is not None, BLOCK=_block(width)
            )
    return inputs_grad, scale_grad


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), BLOCK_COLUMNS)
