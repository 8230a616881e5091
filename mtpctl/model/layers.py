"""Plain PyTorch modules that megatron-core's layer specs are filled with where Transformer Engine is not wanted.

Parameters carry Transformer Engine's fused names (`linear_qkv.layer_norm_weight`), so that Megatron-Bridge's mappings and
checkpoints fit with either.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from mtpctl.model.packing import Packing
from mtpctl.model.rebuild import gated_product, rebuilt


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    init = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = torch.nn.Parameter(init(size, dtype=config.params_dtype, device=device))
    # megatron-core sums the gradients of parameters marked so over the tensor-parallel ranks.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def _rms_norm(x: Tensor, weight: Tensor, config: TransformerConfig, eps: float) -> Tensor:
    scale = 1.0 + weight if config.layernorm_zero_centered_gamma else weight
    return F.rms_norm(x, (weight.shape[0],), scale, eps)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; works on sequence-parallel input.

    `of_own_heads`: what it sees of all tokens is a tensor-parallel rank's heads, so that its weight's gradient is to be summed over
    the ranks. With sequence parallelism megatron-core does that, and for norms of queries and keys in any case.
    """

    of_own_heads = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight) if self.of_own_heads else self.weight
        # Of keys, x is a part of the queries', keys' and values' memory, and keeping it would keep all of that.
        return _rms_norm(x.contiguous(), weight, self.config, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then column-parallel linear, with the norm's weight under the linear layer's name.

    What is kept for the backward pass is the norm's input; the linear layer's own is normed again. Megatron-Bridge tells by
    the class's name which of its parameters are split over tp.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        normed = self._normed(input_)
        with rebuilt(normed, partial(self._normed, input_.detach())):
            return super().forward(normed, *args, **kwargs)

    def _normed(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.layer_norm_weight, self.config, self.config.layernorm_epsilon)


class GatedMlp(MLP):
    """SwiGLU between two linear layers. What is kept for the backward pass is gate and up-projection; their product is made again."""

    def forward(self, hidden_states: Tensor, /, per_token_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        both, _bias = self.linear_fc1(hidden_states)
        product = gated_product(both, per_token_scale)
        scale = None if per_token_scale is None else per_token_scale.detach()
        with rebuilt(product, partial(gated_product, both.detach(), scale)):
            result: tuple[Tensor, Tensor | None] = self.linear_fc2(product)
        return result


class SharedExperts(SharedExpertMLP, GatedMlp):
    """Experts that every token visits, with `GatedMlp`'s way of keeping little."""


class Experts(SequentialMLP):
    """Routed experts, one after another, with `GatedMlp`'s way of keeping little."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            expert.__class__ = GatedMlp  # upstream makes its own MLP here, and offers no choice


class PackedAttention(torch.nn.Module):
    """Causal attention of each packed sample within itself.

    query [t, 1, heads, dim], key and value [t, 1, kv heads, dim], or all without the 1 → [t, 1, heads * value dim], for the
    t tokens of this rank. With context parallelism the keys and values of all ranks are gathered, and their gradients
    summed back. In half precision a card runs one variable-length flash kernel; else one `scaled_dot_product_attention` is run
    for each group of samples of like length.
    """

    def __init__(
        self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, packed_seq_params: Packing, **__: Any
    ) -> Tensor:
        # Values come as a part of the memory of queries, keys and values; kept so, they would keep all of it.
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value.contiguous()))
        if self.cp_group is not None:
            k, v = (packed_seq_params.seen(gather_from_sequence_parallel_region(x, group=self.cp_group)) for x in (k, v))
        flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        out = self._flash(q, k, v, packed_seq_params) if flash else self._grouped(q, k, v, packed_seq_params)
        return out.reshape(query.shape[0], 1, -1)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, p: Packing) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # The kernel knows one width for all three, and in eights. Zeros add nothing to a score, and to an output only themselves.
        dim, wanted = q.shape[2], v.shape[2]
        width = -(-max(dim, wanted) // 8) * 8
        q, k, v = (F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x for x in (q, k, v))
        out = varlen_attn(
            q,
            k,
            v,
            p.cu_seqlens_q,
            p.cu_seqlens_kv,
            p.max_seqlen_q,
            p.max_seqlen_kv,
            window_size=(-1, 0),
            scale=dim**-0.5 if self.scale is None else self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(out, Tensor)
        return out[..., :wanted]

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        places, parts = [], []
        for group in packing.alike:
            # Behind its last token a short sample repeats the first key of all; causality keeps that from the valid ones.
            qs = q[group.queries].transpose(1, 2)
            ks, vs = (x[group.keys].transpose(1, 2) for x in (k, v))
            causal = group.mask is None
            mixed = F.scaled_dot_product_attention(qs, ks, vs, group.mask, is_causal=causal, scale=self.scale, enable_gqa=True)
            places.append(group.queries[group.valid])
            parts.append(mixed.transpose(1, 2)[group.valid])
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2]).index_put((torch.cat(places),), torch.cat(parts))
