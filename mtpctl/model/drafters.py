"""Drafters in the subfolder `drafter/` of a model's folder: the layers of EAGLE-3 and DFlash, and the trunk states that they read.

An EAGLE-3 drafter (arXiv 2503.01840) drafts like a repeated MTP layer: the first depth reads the trunk, and each later depth reads the
previous depth. It differs in four ways. The first depth reads the states at several boundaries between decoder layers, projected to one
state. The input of the attention is the concatenation of embedding and state, and only the state is the residual. Attention has no
biases, QK norm or output gate. The FFN is dense.

A DFlash drafter (arXiv 2602.06036) drafts a block of tokens in one pass. The trunk's states at several boundaries, projected to one state
for each token, are the drafter's context: every layer computes keys and values from them. The block's inputs are the embeddings of the last
sampled token and of one mask token for each draft. The inputs of a block attend to the context before the block and, bidirectionally, to
each other. In training a block begins at every token, so a packed sequence of t tokens has t blocks, which do not attend to each other.
Their inputs are computed offset by offset, as [t, 1, H] each.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from mtpctl.families.shape import DFlashShape, Eagle3Shape
from mtpctl.model.attention import SelfAttention
from mtpctl.model.core_attention import PackedAttention
from mtpctl.model.gpt import MtpLayer
from mtpctl.model.layers import ColumnParallelLinear, ReplicatedLinear, RMSNorm
from mtpctl.model.packing import Packing
from mtpctl.model.rope import Rotary


def _layer_config(config: TransformerConfig, ffn: int, *, qk_norm: bool) -> TransformerConfig:
    """The trunk's config, adapted to the drafter's layers."""
    layer_config = copy(config)
    layer_config.add_qkv_bias = layer_config.attention_output_gate = False
    layer_config.qk_layernorm = qk_norm
    layer_config.num_moe_experts, layer_config.ffn_hidden_size = None, ffn
    return layer_config


class PairedColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer of twice the input width: [..., 2 · in] → [..., out / tp]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        pair_config = copy(config)
        pair_config.hidden_size = 2 * input_size  # Megatron-Bridge splits the weight into heads by this size.
        super().__init__(2 * input_size, output_size, config=pair_config, **kwargs)


class Eagle3Layer(MtpLayer):
    """`MtpLayer` with the structure of EAGLE-3. `project` maps the trunk's states to the first depth's input."""

    passes_prenorm = True

    def __init__(self, config: TransformerConfig, *args: object, eagle3: Eagle3Shape, **kwargs: Any) -> None:
        super().__init__(_layer_config(config, eagle3.ffn, qk_norm=False), *args, **kwargs)
        self.eh_proj = ReplicatedLinear(len(eagle3.boundaries) * config.hidden_size, config.hidden_size, config)

    def project(self, states: Tensor) -> Tensor:
        """The trunk's states, concatenated [T, 1, boundaries · H] → [T, 1, H]."""
        return self.eh_proj(states)[0]

    def _proj_and_transformer_layer(
        self,
        hidden_states: Tensor,
        decoder_input: Tensor,
        attention_mask: None = None,
        padding_mask: Tensor | None = None,
        *_: None,
        packed_seq_params: Packing | None = None,
        **__: None,
    ) -> tuple[Tensor, Tensor]:
        assert packed_seq_params is not None
        layer = self.mtp_model_layer
        pair = torch.cat((self.enorm(decoder_input), self.hnorm(hidden_states)), -1)
        attended, _bias = layer.self_attention(pair, attention_mask, packed_seq_params=packed_seq_params)
        state = hidden_states + attended
        down, _bias = layer.mlp(state)
        state = state + down
        return self.final_layernorm(state), state


class BoundaryStates:
    """Collects the states at some boundaries of a decoder during its forward pass.

    Boundary i is the input of layer i, the last one that of the final norm.

    The states are detached, because a drafter's loss never updates the trunk. They may therefore also come from a recomputed region, which
    discards its graph.
    """

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries
        self._states: dict[int, Tensor] | None = None
        for boundary in boundaries:
            if boundary < len(layers):
                layers[boundary].register_forward_pre_hook(self._layer_hook(boundary), with_kwargs=True)
        final_norm.register_forward_pre_hook(lambda _, args: self._save(len(layers), args[0]))

    def begin(self) -> None:
        """Start collecting the states of a forward pass."""
        self._states = {}

    def states(self) -> Tensor:
        """The states since `begin`, concatenated: [T, 1, boundaries · H]."""
        assert self._states is not None
        return torch.cat([self._states[boundary] for boundary in self.boundaries], -1)

    def end(self) -> None:
        """Drop the states. Those of a recomputation in the backward pass are not collected."""
        self._states = None

    def _layer_hook(self, boundary: int) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            self._save(boundary, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return hook

    def _save(self, boundary: int, state: Tensor) -> None:
        if self._states is not None and boundary in self.boundaries:
            self._states[boundary] = state.detach()


class BlockAttention(SelfAttention):
    """Attention of the inputs of blocks to the context, and within each block."""

    core_attention: PackedAttention

    def forward(  # type: ignore[override]
        self, context: Tensor, block: list[Tensor], rotary: list[Rotary | None], packing: Packing
    ) -> list[Tensor]:
        """context [t, 1, H], block and rotary by offset → by offset [t, 1, H]. With sequence parallelism, tokens are split over tp."""
        context_heads = self._heads(context, packing)
        keys, values = self.core_attention.gather_visible(context_heads.keys, context_heads.values.contiguous(), packing)
        heads = [self._heads(x, packing.with_rotary(angles)) for x, angles in zip(block, rotary, strict=True)]
        block_keys_values = (
            torch.stack([input_heads.keys for input_heads in heads]),
            torch.stack([input_heads.values for input_heads in heads]),
        )
        return [
            self.linear_proj(self.core_attention.attend(input_heads.queries, keys, values, packing, block_keys_values))[0]
            for input_heads in heads
        ]


class BlockLayers(MegatronModule):
    """The drafter's layers. Not a ModuleList, because upstream's checkpoints would store only one rank's shards of its parameters."""

    def __init__(self, config: TransformerConfig, layers: list[TransformerLayer]) -> None:
        super().__init__(config)
        for index, layer in enumerate(layers):
            self.add_module(f"layer_{index}", layer)

    def __iter__(self) -> Iterator[TransformerLayer]:
        return cast(Iterator[TransformerLayer], self.children())


class BlockDrafter(MegatronModule):
    """A DFlash drafter. Its parts are named as in `MtpLayer`; upstream reads `layer_number` and `mtp_model_layer`."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dflash: DFlashShape,
        layer: ModuleSpec,
        layer_number: int,
        vp_stage: int | None,
        pg_collection: ProcessGroupCollection,
        **_: None,
    ) -> None:
        # With QK norms in the trunk or sequence parallelism, megatron-core sums the gradients of the drafter's QK norms over tp itself.
        sum_norm_grads = not config.qk_layernorm and not config.sequence_parallel
        config = _layer_config(config, dflash.ffn, qk_norm=True)
        super().__init__(config)
        self.mask_token, self.layer_number = dflash.mask_token, layer_number
        self.eh_proj = ReplicatedLinear(len(dflash.boundaries) * config.hidden_size, config.hidden_size, config)
        self.hnorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.final_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        options = {"config": config, "vp_stage": vp_stage, "is_mtp_layer": True, "pg_collection": pg_collection}
        layers = [build_module(layer, layer_number=layer_number + index, **options) for index in range(dflash.layers)]
        for drafter_layer in layers:
            for norm in (drafter_layer.self_attention.q_layernorm, drafter_layer.self_attention.k_layernorm):
                norm.is_head_sharded = sum_norm_grads
        self.mtp_model_layer = BlockLayers(config, layers)

    def forward(self, states: Tensor, block: list[Tensor], rotary: list[Rotary | None], packing: Packing) -> list[Tensor]:
        """Draft a block at every token.

        Args:
            states: the trunk's states at the boundaries, concatenated [t, 1, boundaries · H].
            block: by offset, the embeddings [t, 1, H] of the sampled token and of the masks.
            rotary: by offset, the rotation at the positions of the inputs.
            packing: the layout of the packed sequence.

        Returns:
            For each mask the states [t, 1, H] that the LM head reads.
        """
        context = self.hnorm(self.eh_proj(states)[0])
        for layer in self.mtp_model_layer:
            block = self._run(layer, context, block, rotary, packing)
        return [self.final_layernorm(x) for x in block[1:]]

    def _run(
        self, layer: TransformerLayer, context: Tensor, block: list[Tensor], rotary: list[Rotary | None], packing: Packing
    ) -> list[Tensor]:
        def run(context: Tensor, *block: Tensor) -> tuple[Tensor, ...]:
            attended = layer.self_attention(context, [layer.input_layernorm(x) for x in block], rotary, packing)
            states = [x + attention_out for x, attention_out in zip(block, attended, strict=True)]
            return tuple(state + layer.mlp(state)[0] for state in states)

        if self.config.recompute_granularity == "full" and self.training:
            return list(tensor_parallel.checkpoint(run, False, context, *block))
        return list(run(context, *block))
