"""Attention to the first depth's keys by the variable-length flash kernel, with the log-sum-exp that `joined_attention` joins by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.model.packing import Packing


@dataclass
class FlashPrefix:
    """A `Prefix` over a packing's samples, for one pass. `heads_first`: whether the kernel tells the log-sum-exp as [h, t], not [t, h]."""

    packing: Packing
    scale: float
    heads_first: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        p = self.packing
        found = varlen_attn(
            q,
            k,
            v,
            p.cu_seqlens_q,
            p.cu_seqlens_kv,
            p.max_seqlen_q,
            p.max_seqlen_kv,
            return_aux=AuxRequest(lse=True),
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(found, tuple)
        out, lse = found
        self.heads_first = lse.shape[0] == q.shape[1]
        return out, lse.transpose(0, 1).contiguous() if self.heads_first else lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p = self.packing
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            lse.transpose(0, 1).contiguous() if self.heads_first else lse,
            p.cu_seqlens_q,
            p.cu_seqlens_kv,
            p.max_seqlen_q,
            p.max_seqlen_kv,
            True,
            unused,
            self.scale,
            [-1, 0],
        )
        return found
