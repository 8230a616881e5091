"""Grouped-query attention on packed sequences: heads, their norms and rotation, core attention, and the gate of its output."""

from __future__ import annotations

from megatron.core.transformer.attention import SelfAttention as UpstreamSelfAttention
from torch import Tensor

from mtpctl.kernels.heads import HeadLayout, HeadNorm, Heads, split_heads
from mtpctl.kernels.rotary import rotated
from mtpctl.model.layers import RMSNorm, norm_offset
from mtpctl.model.packing import Packing


class SelfAttention(UpstreamSelfAttention):
    """[t, 1, H] → [t, 1, H]. Parameters and checkpoints are upstream's; the forward pass is ours, so that one kernel makes the heads."""

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *_: object, packed_seq_params: Packing, **__: object
    ) -> tuple[Tensor, Tensor | None]:
        queries, keys, values, gates = self._heads(hidden_states, packed_seq_params)
        run = self._checkpointed_attention_forward if self.checkpoint_core_attention and self.training else self.core_attention
        out = run(queries, keys, values, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params)
        if self.config.attention_output_gate:
            out = out * gates.reshape(out.shape).sigmoid()
        result: tuple[Tensor, Tensor | None] = self.linear_proj(out)
        return result

    def _heads(self, hidden_states: Tensor, packing: Packing) -> Heads:
        config = self.config
        if config.num_query_groups < self.world_size:
            return self._shared_heads(hidden_states, packing)
        mixed, _bias = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        layout = HeadLayout(
            groups,
            self.num_attention_heads_per_partition // groups,
            self.hidden_size_per_attention_head,
            gated=config.attention_output_gate,
        )
        return split_heads(mixed.squeeze(1), layout, self._norm(), packing.rotary)

    def _norm(self) -> HeadNorm | None:
        queries, keys = self.q_layernorm, self.k_layernorm
        if not isinstance(queries, RMSNorm):
            return None
        return HeadNorm(queries.weight, keys.weight, queries.eps, norm_offset(self.config))

    def _shared_heads(self, hidden_states: Tensor, packing: Packing) -> Heads:
        """The heads where tensor-parallel ranks share a key-value head. Upstream finds the queries of this rank, and norms them."""
        gated = self.config.attention_output_gate
        parts = self.get_query_key_value_tensors(hidden_states, output_gate=gated)
        queries, keys, values, *gates = (part.squeeze(1) for part in parts)
        if packing.rotary is not None:
            queries, keys = (rotated(x, *packing.rotary) for x in (queries, keys))
        return Heads(queries, keys, values, gates[0] if gated else queries[:, :0])
