"""Root-mean-square norms (arXiv 1910.07467) over the last dimension, one kernel each on a card:

    rms_norm(x, w)          x / rms(x) · w                      rms(x) = sqrt(mean x² + eps)
    gated_rms_norm(x, z, w) x / rms(x) · w · silu(z)

On a card flash-linear-attention's kernels run what has the width of a head, where they are installed. They compute in fp32 and round
once, and take less than half the time of PyTorch's there; on wider rows they take as long, and more of the host.
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
"""Columns up to which kernels take a norm."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] → x's shape and dtype."""
    if _by_kernels(x):
        found: Tensor = _fla_norm(x, weight, None, eps=eps)
        return found
    return F.rms_norm(x, (len(weight),), weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x and gate [..., n], weight [n] → x's shape and dtype."""
    if _by_kernels(x):
        found: Tensor = _fla_gated_norm(x, gate, weight, None, eps=eps)
        return found
    return (F.rms_norm(x, (len(weight),), weight, eps) * F.silu(gate.float())).to(x.dtype)


def _by_kernels(x: Tensor) -> bool:
    """Whether kernels take it. They have no rows to start with where there is none."""
    return x.is_cuda and _fla_norm is not None and x.shape[-1] <= NARROW and x.numel() > 0
