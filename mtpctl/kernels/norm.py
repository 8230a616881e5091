"""Root-mean-square norms (arXiv 1910.07467) over the last dimension:

    rms_norm(x, w)          x / rms(x) · w                      rms(x) = sqrt(mean x² + eps)
    gated_rms_norm(x, z, w) x / rms(x) · w · silu(z)

Where flash-linear-attention is installed, its kernels compute the norms of rows as wide as an attention head, on a card. They compute in
fp32, round once, and take less than half the time of PyTorch's. On wider rows they take as long as PyTorch's, and more of the host's time.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

try:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated as _fla_gated_norm
    from fla.modules.norm.layernorm import rms_norm as _fla_norm
except ImportError:
    _fla_norm = _fla_gated_norm = None


NARROW = 256
"""Columns of the widest rows whose norms flash-linear-attention's kernels compute."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight, in the shape and dtype of x [..., n]; weight [n]."""
    if _by_kernels(x):
        found: Tensor = _fla_norm(x, weight, None, eps=eps)
        return found
    return F.rms_norm(x, (len(weight),), weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight · silu(gate), in the shape and dtype of x [..., n]; gate [..., n], weight [n]."""
    if _by_kernels(x):
        found: Tensor = _fla_gated_norm(x, gate, weight, None, eps=eps)
        return found
    return (F.rms_norm(x, (len(weight),), weight, eps) * F.silu(gate.float())).to(x.dtype)


def _by_kernels(x: Tensor) -> bool:
    """Whether flash-linear-attention's kernels compute the norms of these rows. They cannot be started for no rows at all."""
    return x.is_cuda and _fla_norm is not None and x.shape[-1] <= NARROW and x.numel() > 0
