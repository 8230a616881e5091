"""Squared ReLU (arXiv 2109.08668): relu(x)² · scale, the activation of Nemotron-H's MLPs and experts.

Only the inputs are saved for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """relu(x)² · scale [..., F], in the dtype of x [..., F].

    scale [...]: a differentiable factor per row, such as an expert's routing weight; None means 1.
    """
    return _SquaredRelu.apply(x, scale)


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        squared = F.relu(x).square()
        return squared if scale is None else (squared * scale[..., None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors
        grad, positive = grads[0], F.relu(x)
        if scale is None:
            return 2 * positive * grad, None
        scale_grad = (grad.to(scale.dtype) * positive.square()).sum(-1)
        return (2 * positive * (grad * scale[..., None])).to(x.dtype), scale_grad
