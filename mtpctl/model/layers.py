"""Plain PyTorch modules for megatron-core's layer specs, in place of Transformer Engine's.

Parameters carry Transformer Engine's fused names (`linear_qkv.layer_norm_weight`), so that Megatron-Bridge's mappings and
checkpoints fit with either.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from mtpctl.kernels.norm import gated_rms_norm, rms_norm
from mtpctl.kernels.swiglu import swiglu
from mtpctl.model.draft_attention import joined_attention
from mtpctl.model.flash import FlashPrefix, flash_attention
from mtpctl.model.linear import ColumnParallelLinear
from mtpctl.model.packing import Packing
from mtpctl.model.recompute import recomputed


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    init = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = torch.nn.Parameter(init(size, dtype=config.params_dtype, device=device))
    # megatron-core sums the gradients of parameters marked so over the tensor-parallel ranks.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def norm_offset(config: TransformerConfig) -> float:
    """What is added to the weights of norms."""
    return 1.0 if config.layernorm_zero_centered_gamma else 0.0


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; works on sequence-parallel input.

    of_own_heads: the input has all tokens but only this tensor-parallel rank's heads, so that the weight's gradient has to be summed over
    the ranks. megatron-core does that with sequence parallelism, and always for norms of queries and keys.
    """

    of_own_heads = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._summed_weight(), self.eps, norm_offset(self.config))

    def _summed_weight(self) -> Tensor:
        return copy_to_tensor_model_parallel_region(self.weight) if self.of_own_heads else self.weight


class GatedRMSNorm(RMSNorm):
    """The output norm of linear attention. Its weight is centered on 1, as in folders and engines, even if other norms are centered on 0.

    Adding 1 to a stored weight would round it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: object) -> None:
        super().__init__(config, hidden_size, eps, **options)
        torch.nn.init.ones_(self.weight)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm of x times silu(gate); x and gate have the same shape."""
        return gated_rms_norm(x, gate, self._summed_weight(), self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then column-parallel linear, with the norm's weight under the linear layer's name.

    The norm's input is kept for the backward pass, which recomputes the linear layer's input. Megatron-Bridge tells from the class's name
    which of its parameters are split over tp.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        normed = self._normed(input_)
        with recomputed(normed, partial(self._normed, input_.detach())):
            return super().forward(normed, *args, **kwargs)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon, norm_offset(self.config))


class GatedMlp(MLP):
    """SwiGLU between two linear layers. Gate and up-projection are kept for the backward pass, which recomputes their product."""

    def forward(self, hidden_states: Tensor, /, per_token_scale: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor | None]:
        gate_up, _bias = self.linear_fc1(hidden_states)
        return self.down(gate_up, per_token_scale)

    def down(self, gate_up: Tensor, per_token_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The second half: the gated product, and the layer that brings it back to the hidden size."""
        product = swiglu(gate_up, per_token_scale)
        scale = None if per_token_scale is None else per_token_scale.detach()
        with recomputed(product, partial(swiglu, gate_up.detach(), scale)):
            result: tuple[Tensor, Tensor | None] = self.linear_fc2(product)
        return result


class PackedAttention(torch.nn.Module):
    """Causal attention of each packed sample within itself.

    query [t, 1, heads, dim], key and value [t, 1, kv heads, dim], or all without the 1 → [t, 1, heads * value dim], for the
    t tokens of this rank; queries and keys are rotated already. With context parallelism the keys and values of all ranks are gathered,
    and their gradients summed back. In half precision a card runs one variable-length flash kernel; else one
    `scaled_dot_product_attention` is run for each group of samples of like length. Where the packing holds `earlier` depths, it is the
    attention of a drafter (`mtpctl.model.draft_attention`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: object,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **__: object,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.cp_group: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.cp_group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *_: object, packed_seq_params: Packing, **__: object
    ) -> Tensor:
        # Values are a view into one tensor of queries, keys and values; saving the view would keep that whole tensor.
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value.contiguous()))
        later: tuple[Tensor, Tensor] | None = None
        if (earlier := packed_seq_params.earlier) is not None:
            earlier.keys.append(k)
            earlier.values.append(v)
            if len(earlier.keys) > 1:
                k, v = earlier.keys[0], earlier.values[0]
                later = torch.stack(earlier.keys[1:]), torch.stack(earlier.values[1:])
        if self.cp_group is not None:
            k, v = (packed_seq_params.seen(gather_from_sequence_parallel_region(x, group=self.cp_group)) for x in (k, v))
        flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        if later is not None and flash:
            out = self._flash_joined(q, k, v, *later, packed_seq_params)
        elif flash:
            out = self._flash(q, k, v, packed_seq_params)
        else:
            out = self._grouped(q, k, v, packed_seq_params, later)
        return out.reshape(query.shape[0], 1, -1)

    def _flash_joined(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, p: Packing) -> Tensor:
        dim, wanted = q.shape[2], v.shape[2]
        q, k, v, keys, values = _alike_wide(q, k, v, keys, values)
        scale = self._scale(dim)
        return joined_attention(q, k, v, keys, values, FlashPrefix(p, scale), scale)[..., :wanted]

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, p: Packing) -> Tensor:
        dim, wanted = q.shape[2], v.shape[2]
        q, k, v = _alike_wide(q, k, v)
        out, _lse = flash_attention(q, k, v, p, self._scale(dim))
        return out[..., :wanted]

    def _scale(self, dim: int) -> float:
        """What scores of heads of width `dim` are multiplied by."""
        return dim**-0.5 if self.scale is None else self.scale

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, later: tuple[Tensor, Tensor] | None = None) -> Tensor:
        places, parts = [], []
        for group in packing.alike:
            # A short sample is filled up with the first key of all behind its last token, which causality hides from its tokens.
            qs = q[group.queries].transpose(1, 2)
            ks, vs = (x[group.keys].transpose(1, 2) for x in (k, v))
            mask = group.mask
            if later is not None:
                ks, vs, mask = _with_later(ks, vs, mask, [x[:, group.queries].transpose(2, 3) for x in later])
            mixed = F.scaled_dot_product_attention(qs, ks, vs, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
            places.append(group.queries[group.valid])
            parts.append(mixed.transpose(1, 2)[group.valid])
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2]).index_put((torch.cat(places),), torch.cat(parts))


def _alike_wide(*tensors: Tensor) -> list[Tensor]:
    """The flash kernel takes one width for all, a multiple of 8. Zeros change no score, and only add columns of zeros to the output."""
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


def _with_later(k: Tensor, v: Tensor, mask: Tensor | None, later: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [samples, heads, keys, width] followed by those of later depths [depths, samples, heads, queries, width], of which
    each query sees its own token's alone, and the mask of all."""
    depths, queries = later[0].shape[0], later[0].shape[3]
    if mask is None:
        mask = torch.ones(queries, k.shape[2], dtype=torch.bool, device=k.device).tril()
    own = torch.eye(queries, dtype=torch.bool, device=k.device)
    k, v = (torch.cat([first, *more.unbind(0)], dim=2) for first, more in zip((k, v), later, strict=True))
    return k, v, torch.cat([mask, *[own] * depths], dim=1)
