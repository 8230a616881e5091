"""Root-mean-square norms (arXiv 1910.07467) over the last dimension:

    rms_norm(x, w)          x / rms(x) · w                      rms(x) = sqrt(mean x² + eps)
    gated_rms_norm(x, z, w) x / rms(x) · w · silu(z)

Where flash-linear-attention is installed, its kernel computes the gated norms of rows as wide as an attention head, on a card: in fp32,
rounded once.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

try:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated as _fla_gated_norm
except ImportError:
    _fla_gated_norm = None


NARROW = 256
"""Columns of the widest rows whose norms flash-linear-attention's kernel computes."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight, in the shape and dtype of x [..., n]; weight [n]."""
    return F.rms_norm(x, (len(weight),), weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight · silu(gate), in the shape and dtype of x [..., n]; gate [..., n], weight [n]."""
    # The kernel cannot be started for no rows at all.
    if x.is_cuda and _fla_gated_norm is not None and x.shape[-1] <= NARROW and x.numel() > 0:
        found: Tensor = _fla_gated_norm(x, gate, weight, None, eps=eps)
        return found
    return (F.rms_norm(x, (len(weight),), weight, eps) * F.silu(gate.float())).to(x.dtype)
