"""Rotary position embeddings (RoPE, arXiv 2104.09864) of queries and keys. Dimension i of a head is paired with i + n:

    out[i]     = x[i] cos[i] − x[i + n] sin[i]    i < n, half the number of rotated dimensions
    out[i + n] = x[i + n] cos[i] + x[i] sin[i]    dimensions after the first 2 n are left as they are

The products are in x's dtype on a CPU, and in fp32 on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [t, heads, d] rotated by each token's angles: cos and sin fp32 [t, n], with 2 n ≤ d. Returns x's shape and dtype."""
    if x.is_cuda:
        return plainly_rotated(x.float(), cos, sin).to(x.dtype)
    return plainly_rotated(x, cos.to(x.dtype), sin.to(x.dtype))


def plainly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotated` in the dtype of its arguments."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
