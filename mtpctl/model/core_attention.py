"""Core attention of packed samples: flash kernel, portable version, and the attention of a drafter that repeats one MTP layer.

In an engine, the first drafting step of a repeated layer runs over all tokens and fills the KV cache. Each further step runs over one token
at the next position. It attends to the first step's keys up to the token where drafting began, and to the keys of the steps since,
including its own.

In training, depth d has one query per token i. It stands for step d of a draft that begins after token i, and therefore attends to

    the keys of depth 1 at tokens 0 … i,  and the keys of depths 2 … d at token i only.

The second part has a few keys per query. For a DFlash block (`mtpctl.model.drafters`), the first part is the context up to token i, and the
second part has all inputs of the block that begins after token i.

The parts are combined by their log-sum-exps. The flash kernel's backward pass gets the combined output and log-sum-exp, so it returns the
gradients of the first part under the whole softmax (as in ring attention, arXiv 2310.01889).

A sink of a query head (arXiv 2309.17453; as in gpt-oss and MiMo-V2-Flash) is one more score in the softmax of each query, without a value.
It is combined in the same way, so windows and sinks use the same kernel as full attention, without a mask.

Shape legend: t tokens, s keys, h query heads, g key-value heads, d width of queries and keys, w width of values, E depths after the first
including the current one, or inputs of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mtpctl.kernels import exact_grad, invariant
from mtpctl.model.layers import is_bitwise
from mtpctl.model.packing import Packing

LaterKeysValues = tuple[Tensor, Tensor]
"""Keys [E, t, g, d] and values [E, t, g, w] that only the queries of the same token attend to: those of later depths, or of all inputs of a
DFlash block."""


def _causal_window(window: int | None) -> dict[str, int]:
    """The flash operators' window: the last `window` keys, including the query's; None: all earlier keys."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


FlashArguments = tuple[Tensor, Tensor, int, int, float, bool]


def flash_arguments(p: Packing) -> FlashArguments:
    """Sequence boundaries, maximum lengths, dropout 0 and causal masking, in the order of the flash operators' arguments.

    Autograd functions save these instead of the packing. The packing has the keys of `earlier` depths, which may depend on the function's
    output. That would be a reference cycle through the autograd graph, which Python's garbage collector cannot free.
    """
    return p.cu_seqlens_q, p.cu_seqlens_kv, p.max_seqlen_q, p.max_seqlen_kv, 0.0, True


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """PyTorch's variable-length flash kernel: causal attention of q [t, h, d] to k and v [s, g, d] within the packing's samples.

    window: number of keys that a query attends to, including its own; None: all. Returns the output [t, h, d], which is differentiable, and
    the log-sum-exp, fp32 [h, t] or [t, h]. d must be a multiple of 8. Calls the operator of
    `torch.nn.attention.varlen.varlen_attn` directly, because the wrapper takes more host time than a short pass takes GPU time.
    """
    return_debug_mask = False
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q, k, v, *arguments, return_debug_mask, scale=scale, **_causal_window(window)
    )
    return out, lse


class PrefixAttention(Protocol):
    """Causal attention to the keys of the first depth, of a block's context, or of a layer with sinks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output [t, h, w], and the log-sum-exp of the scores, fp32 [t, h]."""
        ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, for attention weights exp(score − lse) and the output `out`."""
        ...


@dataclass
class FlashPrefixAttention:
    """`PrefixAttention` with the flash kernel. Use one instance per forward and backward pass.

    heads_first: whether the kernel's log-sum-exp is [h, t] rather than [t, h]; set by `forward`.
    """

    arguments: FlashArguments
    scale: float
    window: int | None = None
    heads_first: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attention(q, k, v, self.arguments, self.scale, self.window)
        self.heads_first = lse.shape[0] == q.shape[1]
        return out, lse.transpose(0, 1).contiguous() if self.heads_first else lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout, unused
        kernel_lse = lse.transpose(0, 1).contiguous() if self.heads_first else lse
        return torch.ops.aten._flash_attention_backward.default(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            kernel_lse,
            *self.arguments,
            rng_state,
            rng_state,
            scale=self.scale,
            **_causal_window(self.window),
        )


def invariant_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """`invariant.attention` of q [t, h, d] to k and v [t, g, d], with the gradients of the flash kernel, for `numerics: bitwise`."""
    return _InvariantAttention.apply(q, k, v, packing, scale)


class _InvariantAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
        out, lse = invariant.attention(q, k, v, packing.cu_seqlens_q, packing.max_seqlen_q, scale, lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments, ctx.scale = flash_arguments(packing), scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        attention = FlashPrefixAttention(ctx.arguments, ctx.scale, heads_first=True)
        return *attention.backward(grads[0], q, k, v, out, lse.transpose(0, 1)), None, None


def combined_attention(
    q: Tensor, k: Tensor, v: Tensor, later: LaterKeysValues | None, prefix: PrefixAttention, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention to k and v (by `prefix`), to the `later` keys of the same token, and to the sinks, under one softmax → [t, h, w].

    Used for depths after the first, for DFlash blocks, and for layers with sinks. q [t, h, d]. k, v: keys and values of the first depth,
    of the block's context, or of the layer with sinks. later: see `LaterKeysValues`; the current depth is the last. sinks [h].
    """
    return _CombinedAttention.apply(q, k, v, *(later or (None, None)), sinks, prefix, scale)


class _CombinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        sinks: Tensor | None,
        prefix: PrefixAttention,
        scale: float,
    ) -> Tensor:
        out, lse = prefix.forward(q, k, v)
        combined_lse = lse if sinks is None else torch.logaddexp(lse, sinks.float())
        if keys is not None and values is not None:
            scores = _scores(q, keys, scale)
            combined_lse = torch.logaddexp(combined_lse, scores.logsumexp(0))
            weights = (scores - combined_lse).exp()
            combined = out.float() * (lse - combined_lse).exp().unsqueeze(-1) + (weights.unsqueeze(-1) * _per_query_head(values, q)).sum(0)
            combined = combined.to(out.dtype)
        else:
            # Computed in fp32, and written in the dtype of the output.
            combined = torch.mul(out, (lse - combined_lse).exp().unsqueeze(-1), out=torch.empty_like(out))
        ctx.save_for_backward(q, k, v, keys, values, sinks, combined, combined_lse)
        ctx.prefix, ctx.scale = prefix, scale
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, values, sinks, out, lse = ctx.saved_tensors
        grad = grads[0]
        q_grad, k_grad, v_grad = ctx.prefix.backward(grad, q, k, v, out, lse)
        keys_grad = values_grad = sinks_grad = None
        if sinks is not None:
            # A sink's value is 0. The products are rounded, which saves two fp32 copies of the output.
            sinks_grad = -((sinks.float() - lse).exp() * (grad * out).sum(-1, dtype=torch.float32)).sum(0).to(sinks.dtype)
        if keys is not None:
            grad_fp32 = grad.float()
            delta = (grad_fp32 * out.float()).sum(-1)
            weights = (_scores(q, keys, ctx.scale) - lse).exp()
            score_grad = weights * ((grad_fp32 * _per_query_head(values, q)).sum(-1) - delta) * ctx.scale
            q_grad = q_grad + (score_grad.unsqueeze(-1) * _per_query_head(keys, q)).sum(0).to(q_grad.dtype)
            keys_grad = _sum_query_heads(score_grad.unsqueeze(-1) * q.float(), keys)
            values_grad = _sum_query_heads(weights.unsqueeze(-1) * grad_fp32, values)
        return q_grad, k_grad, v_grad, keys_grad, values_grad, sinks_grad, None, None


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[E, t, g, ·] → fp32 [E, t, h, ·]: repeat key-value heads for their query heads."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[2], dim=2)


def _sum_query_heads(x: Tensor, like: Tensor) -> Tensor:
    """[E, t, h, ·] summed over the query heads of each key-value head, in the shape and dtype of `like`."""
    return x.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """fp32 [E, t, h]: scores of each query against the E `LaterKeysValues` of the same token."""
    return (q.float() * _per_query_head(keys, q)).sum(-1) * scale


class PackedAttention(torch.nn.Module):
    """Causal attention of each packed sample within itself.

    query [t, 1, heads, dim], key and value [t, 1, kv heads, dim] → [t, 1, heads * value dim], for the t tokens of this rank. Inputs may
    lack the dimension 1. Queries and keys are already rotated. With context parallelism, keys and values are gathered from all ranks and
    their gradients are reduced. Half precision on CUDA uses one variable-length flash kernel; other cases use one
    `scaled_dot_product_attention` per group of samples of similar length. If the packing has `earlier` depths, computes a drafter's
    attention (see the module docstring). With `numerics: bitwise`, the kernels of `invariant` and `exact_grad` are used.

    window: number of tokens that a token attends to, including itself; None: all earlier ones. sinks: whether each query head has a sink,
    in the parameter `softmax_offset` [heads / tp].
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        *_: object,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        window: int | None = None,
        sinks: bool = False,
        **__: object,
    ) -> None:
        super().__init__()
        self.scale, self.window, self.bitwise = softmax_scale, window, is_bitwise(config)
        self.tp_group = None if pg_collection is None else pg_collection.tp
        self.register_parameter("softmax_offset", None)
        if sinks:
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        self.cp_group: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.cp_group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *_: object, packed_seq_params: Packing, **__: object
    ) -> Tensor:
        # Contiguous values: saving a view would keep the tensor of queries, keys and values in memory.
        q, k, v = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value.contiguous()))
        later: LaterKeysValues | None = None
        if (earlier := packed_seq_params.earlier) is not None:
            earlier.keys.append(k)
            earlier.values.append(v)
            if len(earlier.keys) > 1:
                k, v = earlier.keys[0], earlier.values[0]
                later = torch.stack(earlier.keys[1:]), torch.stack(earlier.values[1:])
        return self.attend(q, *self.gather_visible(k, v, packed_seq_params), packed_seq_params, later)

    def gather_visible(self, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """The keys and values that this rank's queries attend to, gathered from the context-parallel ranks."""
        if self.cp_group is None:
            return k, v
        k, v = (packing.select_visible(gather_from_sequence_parallel_region(x, group=self.cp_group)) for x in (k, v))
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, later: LaterKeysValues | None = None) -> Tensor:
        """Attention of q [t, h, d] to the visible keys and values [s, g, ·] and, if given, to `later` → [t, 1, h · w]."""
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            out = self._flash(q, k, v, packing, later)
        else:
            out = self._attend_by_group(q, k, v, packing, later)
        return out.reshape(q.shape[0], 1, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict[str, dist.ProcessGroup] | None = None
    ) -> ShardedStateDict:
        """megatron-core's checkpoint entry of the sinks, if there are any."""
        if self.softmax_offset is None:
            return {}
        assert metadata is not None
        state = self.state_dict(keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def _prefix_window(self, later: LaterKeysValues | None) -> int | None:
        """Number of first-depth keys that a query attends to: its window, less one for each key in `later`. None: no window."""
        if self.window is None:
            return None
        prefix_keys = self.window - (0 if later is None else len(later[0]))
        assert prefix_keys > 0, f"a window of {self.window} is too small for the depths of a repeated MTP layer"
        return prefix_keys

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, later: LaterKeysValues | None = None) -> Tensor:
        dim, value_dim = q.shape[2], v.shape[2]
        scale = dim**-0.5 if self.scale is None else self.scale
        if self.bitwise and later is None and self.window is None and self.softmax_offset is None:
            return invariant_attention(q, k, v, packing, scale)
        q, k, v, *padded_later = _pad_widths(q, k, v, *(later or ()))
        if later is None and self.softmax_offset is None:
            out, _lse = flash_attention(q, k, v, flash_arguments(packing), scale, self.window)
        else:
            prefix = FlashPrefixAttention(flash_arguments(packing), scale, self._prefix_window(later))
            out = combined_attention(
                q, k, v, (padded_later[0], padded_later[1]) if padded_later else None, prefix, scale, self.softmax_offset
            )
        return out[..., :value_dim]

    def _attend_by_group(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, later: LaterKeysValues | None = None) -> Tensor:
        indices, outputs = [], []
        for group in packing.attention_groups:
            # Short samples are padded after their last token with the first visible key, which the causal mask hides.
            qs = q[group.queries].transpose(1, 2)
            ks, vs = (x[group.keys].transpose(1, 2) for x in (k, v))
            mask = group.mask
            if (prefix_keys := self._prefix_window(later)) is not None:
                mask = _in_window(qs, ks, mask, prefix_keys)
            if later is not None:
                ks, vs, mask = _append_later(ks, vs, mask, [x[:, group.queries].transpose(2, 3) for x in later])
            if self.softmax_offset is not None:
                ks, vs, mask = _append_sink(ks, vs, mask, self.softmax_offset, queries=qs.shape[2])
            if self.bitwise and later is None and self.window is None and self.softmax_offset is None:
                visible_mask = _causal_mask(qs.shape[2], ks.shape[2], mask, q.device)
                out = exact_grad.attention(qs, ks, vs, visible_mask, q.shape[2] ** -0.5 if self.scale is None else self.scale)
            else:
                out = F.scaled_dot_product_attention(qs, ks, vs, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
            indices.append(group.queries[group.valid])
            outputs.append(out.transpose(1, 2)[group.valid])
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2]).index_put((torch.cat(indices),), torch.cat(outputs))


def _pad_widths(*tensors: Tensor) -> list[Tensor]:
    """Pad all tensors with zeros to one width, a multiple of 8, as the flash kernel requires. Scores are unchanged."""
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


def _causal_mask(queries: int, keys: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: the keys that each query attends to; `mask` if it is set."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril() if mask is None else mask


def _in_window(q: Tensor, k: Tensor, mask: Tensor | None, window: int) -> Tensor:
    """The mask of q and k [samples, heads, tokens, width], limited to each query's last `window` keys."""
    queries, keys = q.shape[2], k.shape[2]
    return _causal_mask(queries, keys, mask, q.device).triu(keys - queries - window + 1)


def _append_sink(k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor, *, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key and a value of zeros. sinks [heads].

    Returns them and an additive mask: 0 or -inf for the other keys, and the head's sink for the appended key.
    """
    visible = _causal_mask(queries, k.shape[2], mask, k.device)
    scores = torch.zeros(visible.shape, dtype=k.dtype, device=k.device).masked_fill(~visible, float("-inf"))
    columns = sinks.to(k.dtype)[None, :, None, None].expand(1, -1, queries, 1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return k, v, torch.cat([scores.expand(1, len(sinks), -1, -1), columns], dim=-1)


def _append_later(k: Tensor, v: Tensor, mask: Tensor | None, later: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Append the `later` keys and values [E, samples, heads, queries, width] to k and v [samples, heads, keys, width].

    Returns keys, values and the mask: each query attends to the later keys of the same token only.
    """
    depths, queries = later[0].shape[0], later[0].shape[3]
    mask = _causal_mask(queries, k.shape[2], mask, k.device)
    same_token = torch.eye(queries, dtype=torch.bool, device=k.device)
    k, v = (torch.cat([first, *later_tensors.unbind(0)], dim=2) for first, later_tensors in zip((k, v), later, strict=True))
    return k, v, torch.cat([mask, *[same_token] * depths], dim=1)
