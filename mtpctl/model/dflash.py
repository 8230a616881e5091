"""A DFlash drafter (arXiv 2602.06036), which drafts a block of tokens in one pass.

The trunk's states at several boundaries, projected to one state for each token, are the drafter's context: every layer computes keys and
values from them. The block's inputs are the embeddings of the last sampled token and of one mask token for each draft. The inputs of a
block attend to the context before the block and, in both directions, to one another.

In training a block begins at every token, so a row of t tokens has t blocks, which do not see each other. Their inputs are computed offset
by offset, as [t, 1, H] each.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import cast

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from mtpctl.families.shape import DFlashShape
from mtpctl.model.attention import SelfAttention
from mtpctl.model.core_attention import PackedAttention
from mtpctl.model.layers import ReplicatedLinear, RMSNorm
from mtpctl.model.packing import Packing
from mtpctl.model.rope import Rotary


class BlockAttention(SelfAttention):
    """Attention of the inputs of blocks to the context, and within each block."""

    core_attention: PackedAttention

    def forward(  # type: ignore[override]
        self, context: Tensor, block: list[Tensor], rotary: list[Rotary | None], packing: Packing
    ) -> list[Tensor]:
        """context [t, 1, H], block and rotary by offset → by offset [t, 1, H]. Sequences are split over tp with sequence parallelism."""
        known = self._heads(context, packing)
        keys, values = self.core_attention.visible(known.keys, known.values.contiguous(), packing)
        heads = [self._heads(x, packing.with_rotary(angles)) for x, angles in zip(block, rotary, strict=True)]
        own = torch.stack([each.keys for each in heads]), torch.stack([each.values for each in heads])
        return [self.linear_proj(self.core_attention.attend(each.queries, keys, values, packing, own))[0] for each in heads]


class BlockLayers(MegatronModule):
    """The layers. Not a ModuleList: upstream's checkpoints would store one rank's shards of its parameters only."""

    def __init__(self, config: TransformerConfig, layers: list[TransformerLayer]) -> None:
        super().__init__(config)
        for index, layer in enumerate(layers):
            self.add_module(f"layer_{index}", layer)

    def __iter__(self) -> Iterator[TransformerLayer]:
        return cast(Iterator[TransformerLayer], self.children())


class BlockDrafter(MegatronModule):
    """The whole drafter. Its parts are named as in `MtpLayer`; upstream reads `layer_number` and `mtp_model_layer`."""

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
        # Otherwise megatron-core sums the gradients of these norms itself.
        sums_norms = not config.qk_layernorm and not config.sequence_parallel
        config = _layer_config(config, dflash)
        super().__init__(config)
        self.mask_token, self.layer_number = dflash.mask_token, layer_number
        self.eh_proj = ReplicatedLinear(len(dflash.boundaries) * config.hidden_size, config.hidden_size, config)
        self.hnorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.final_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        options = {"config": config, "vp_stage": vp_stage, "is_mtp_layer": True, "pg_collection": pg_collection}
        layers = [build_module(layer, layer_number=layer_number + index, **options) for index in range(dflash.layers)]
        for built in layers:
            for norm in (built.self_attention.q_layernorm, built.self_attention.k_layernorm):
                norm.is_head_sharded = sums_norms
        self.mtp_model_layer = BlockLayers(config, layers)

    def forward(self, states: Tensor, block: list[Tensor], rotary: list[Rotary | None], packing: Packing) -> list[Tensor]:
        """Draft a block at every token.

        Args:
            states: the trunk's states at the boundaries, concatenated [t, 1, boundaries · H].
            block: by offset, the embeddings [t, 1, H] of the sampled token and of the masks.
            rotary: by offset, the rotation at the positions of the inputs.
            packing: the layout of the row.

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
            states = [x + change for x, change in zip(block, attended, strict=True)]
            return tuple(state + layer.mlp(state)[0] for state in states)

        if self.config.recompute_granularity == "full" and self.training:
            return list(tensor_parallel.checkpoint(run, False, context, *block))
        return list(run(context, *block))


def _layer_config(config: TransformerConfig, dflash: DFlashShape) -> TransformerConfig:
    """The trunk's config with the drafter's kind of layer."""
    own = copy(config)
    own.add_qkv_bias = own.attention_output_gate = False
    own.qk_layernorm = True
    own.num_moe_experts, own.ffn_hidden_size = None, dflash.ffn
    return own
