"""Self-attention layers on packed sequences: grouped-query attention, and multi-head latent attention (arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.attention import SelfAttention as UpstreamSelfAttention
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor

from mtpctl.kernels import exact_grad
from mtpctl.kernels.qkv import HeadLayout, HeadNorm, Heads, apply_rotary, split_heads
from mtpctl.model.layers import ReplicatedLinear, RMSNorm, is_bitwise, norm_offset
from mtpctl.model.packing import Packing
from mtpctl.model.rope import Rope, Rotary


class SelfAttention(UpstreamSelfAttention):
    """[t, 1, H] → [t, 1, H]. Parameters and checkpoints are upstream's; `split_heads` computes the heads in one kernel."""

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *_: object, packed_seq_params: Packing, **__: object
    ) -> tuple[Tensor, Tensor | None]:
        queries, keys, values, gates = self._heads(hidden_states, packed_seq_params)
        run = self._checkpointed_attention_forward if self.checkpoint_core_attention and self.training else self.core_attention
        out = run(queries, keys, values, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params)
        if self.config.attention_output_gate:
            gates = gates.reshape(out.shape)
            out = out * (exact_grad.sigmoid(gates) if is_bitwise(self.config) else gates.sigmoid())
        return self.linear_proj(out)

    def _heads(self, hidden_states: Tensor, packing: Packing) -> Heads:
        config = self.config
        if config.num_query_groups < self.world_size:
            return self._shared_heads(hidden_states, packing)
        qkv, _bias = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        layout = HeadLayout(
            groups,
            self.num_attention_heads_per_partition // groups,
            self.hidden_size_per_attention_head,
            gated=config.attention_output_gate,
            value_width=self.val_hidden_size,
        )
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        qk_norm = None
        if isinstance(q_norm, RMSNorm):
            qk_norm = HeadNorm(q_norm.reduced_weight(), k_norm.reduced_weight(), q_norm.eps, norm_offset(config))
            if is_bitwise(config):
                return exact_grad.split_normed_heads(qkv.squeeze(1), layout, qk_norm, self._rotary(packing))
        return split_heads(qkv, layout, qk_norm, self._rotary(packing))

    def _rotary(self, packing: Packing) -> Rotary | None:
        return packing.rotary

    def _shared_heads(self, hidden_states: Tensor, packing: Packing) -> Heads:
        """Heads if tensor-parallel ranks share a key-value head. Upstream selects and norms this rank's queries."""
        gated = self.config.attention_output_gate
        tensors = self.get_query_key_value_tensors(hidden_states, output_gate=gated)
        queries, keys, values, *gates = (tensor.squeeze(1) for tensor in tensors)
        if packing.rotary is not None:
            queries, keys = (apply_rotary(x, *packing.rotary) for x in (queries, keys))
        return Heads(queries, keys, values, gates[0] if gated else queries[:, :0])


@dataclass(frozen=True)
class WindowAttentionShape:
    """The differences of a `WindowAttention` layer from grouped-query attention.

    kv_heads: number of key-value heads. value_width, value_scale: width and factor of values. is_window: whether the layer uses the rotary
    embedding of window layers.
    """

    kv_heads: int
    value_width: int
    value_scale: float
    is_window: bool


class WindowAttention(SelfAttention):
    """Grouped-query attention of models with window layers (MiMo-V2-Flash): values are scaled, and may be narrower than keys.

    The window and the sinks are in `core_attention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: object,
        window_shape: WindowAttentionShape,
        **kwargs: object,
    ) -> None:
        config = copy(config)
        config.num_query_groups = window_shape.kv_heads
        super().__init__(config, submodules, *args, **kwargs)
        self.window_shape, self.val_hidden_size = window_shape, window_shape.value_width
        column, row = submodules.linear_qkv, submodules.linear_proj
        keys, values = window_shape.kv_heads * self.hidden_size_per_attention_head, window_shape.kv_heads * window_shape.value_width
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": self.pg_collection.tp}
        self.linear_qkv = column(
            config.hidden_size,
            self.query_projection_size + keys + values,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **shared,
        )
        self.linear_proj = row(
            config.num_attention_heads * window_shape.value_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )

    def _heads(self, hidden_states: Tensor, packing: Packing) -> Heads:
        heads = super()._heads(hidden_states, packing)
        return heads if self.window_shape.value_scale == 1 else heads._replace(values=heads.values * self.window_shape.value_scale)

    def _rotary(self, packing: Packing) -> Rotary | None:
        return packing.window_rotary if self.window_shape.is_window else packing.rotary


class PackedRotary:
    """Replaces the rotary table of upstream's latent attention. Looks up angles by the position ids of packed tokens."""

    def __init__(self, rope: Rope, *, scaled: bool) -> None:
        self.rope, self.scaled = rope, scaled

    def get_rotary_seq_len(self, *args: object) -> Packing:
        """Return the packing, which is the last argument. Upstream passes the result to `__call__` as the sequence length."""
        packing = args[-1]
        assert isinstance(packing, Packing)
        return packing

    def __call__(self, packing: Packing, **_: object) -> Tensor | tuple[Tensor, float]:
        angles = self.rope.angles(packing.position_ids)
        return (angles, self.rope.scaling) if self.scaled else angles


class LatentAttention(MLASelfAttention):
    """Upstream's latent attention with positions that restart at each sample and replicated down-projections.

    Upstream can split the down-projections over tensor-parallel ranks, but then it gathers the part that all heads share and does not
    reduce its gradient.
    """

    def __init__(self, config: MLATransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        # Upstream requires a query norm even if the query is not compressed and has none.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def use_rope(self, rope: Rope) -> None:
        """Use `rope` for the positional part of queries and keys."""
        del self._modules["rotary_pos_emb"]
        self.rotary_pos_emb = PackedRotary(rope, scaled=self.config.rope_type == "yarn")
