"""The variable-length flash kernel of PyTorch, for packed samples on a card in half precision.

PyTorch's public function for it, `torch.nn.attention.varlen.varlen_attn`, passes through a custom operator, whose wrapper takes the host
longer than a kernel of a short pass takes the card. Called here is the operator below it, which autograd knows by itself.

Shape legend: t tokens, s keys, h query heads, g key-value heads, d width of a head, the same for queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.model.packing import Packing


def _samples(p: Packing) -> tuple[Tensor, Tensor, int, int, float, bool]:
    """What the operator and its backward pass take of a packing, no dropout, and that attention is causal."""
    return p.cu_seqlens_q, p.cu_seqlens_kv, p.max_seqlen_q, p.max_seqlen_kv, 0.0, True


_CAUSAL_WINDOW = {"window_size_left": -1, "window_size_right": 0}


def flash_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of q [t, h, d] to k and v [s, g, d] within the packing's samples → [t, h, d], and the log-sum-exp of the scores as
    the kernel tells it, fp32 [h, t] or [t, h]. The first is differentiable. d is a multiple of 8."""
    no_mask_for_debugging = False
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q, k, v, *_samples(packing), no_mask_for_debugging, scale=scale, **_CAUSAL_WINDOW
    )
    return out, lse


@dataclass
class FlashPrefix:
    """A `Prefix` over a packing's samples, for one pass. `heads_first`: whether the kernel tells the log-sum-exp as [h, t], not [t, h]."""

    packing: Packing
    scale: float
    heads_first: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attention(q, k, v, self.packing, self.scale)
        self.heads_first = lse.shape[0] == q.shape[1]
        return out, lse.transpose(0, 1).contiguous() if self.heads_first else lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a random generator, for dropout
        told = lse.transpose(0, 1).contiguous() if self.heads_first else lse
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward.default(
            grad.contiguous(), q, k, v, out, told, *_samples(self.packing), unused, unused, scale=self.scale, **_CAUSAL_WINDOW
        )
        return found
