"""The layer of an EAGLE-3 drafter (arXiv 2503.01840), and the trunk states that it reads.

The drafter drafts like a repeated MTP layer: the first depth reads the trunk, each later depth reads the previous one. It differs in three
ways. The first depth reads the states at several boundaries between decoder layers, projected to one. Embedding and state are inputs of
the attention side by side, and the state alone is the residual. Attention has neither biases nor norms of its heads.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mtpctl.families.shape import Eagle3Shape
from mtpctl.model.gpt import MtpLayer
from mtpctl.model.layers import ColumnParallelLinear, ReplicatedLinear
from mtpctl.model.packing import Packing


class PairedColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer of twice the input width: [..., 2 · in] → [..., out / tp]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        own = copy(config)
        own.hidden_size = 2 * input_size  # By which Megatron-Bridge divides the weight into heads.
        super().__init__(2 * input_size, output_size, config=own, **kwargs)


class Eagle3Layer(MtpLayer):
    """`MtpLayer` with the structure of EAGLE-3. `project` maps the trunk's states to the first depth's input."""

    passes_prenorm = True

    def __init__(self, config: TransformerConfig, *args: object, eagle3: Eagle3Shape, **kwargs: Any) -> None:
        super().__init__(_layer_config(config, eagle3), *args, **kwargs)
        self.eh_proj = ReplicatedLinear(len(eagle3.boundaries) * config.hidden_size, config.hidden_size, config)

    def project(self, states: Tensor) -> Tensor:
        """The trunk's states, concatenated [T, 1, boundaries · H] → [T, 1, H]."""
        projected: Tensor = self.eh_proj(states)[0]
        return projected

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


def _layer_config(config: TransformerConfig, eagle3: Eagle3Shape) -> TransformerConfig:
    """The trunk's config with the drafter's kind of layer."""
    own = copy(config)
    own.qk_layernorm = own.add_qkv_bias = own.attention_output_gate = False
    own.num_moe_experts, own.ffn_hidden_size = None, eagle3.ffn
    return own


class BoundaryStates:
    """Collects the states at some boundaries of a decoder during its forward pass; boundary i is the input of layer i.

    The states are detached: a drafter's loss never updates the trunk. So they may also come from inside a recomputed region, which
    discards its graph.
    """

    def __init__(self, layers: nn.ModuleList, final_norm: nn.Module, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries
        self._states: dict[int, Tensor] | None = None
        for boundary in boundaries:
            if boundary < len(layers):
                layers[boundary].register_forward_pre_hook(self._of_layer(boundary), with_kwargs=True)
        final_norm.register_forward_pre_hook(lambda _, args: self._save(len(layers), args[0]))

    def begin(self) -> None:
        """Collect the states of the next forward pass, but not those of its recomputation."""
        self._states = {}

    def take(self) -> Tensor:
        """The states, concatenated: [T, 1, boundaries · H]."""
        assert self._states is not None
        states, self._states = self._states, None
        return torch.cat([states[boundary] for boundary in self.boundaries], -1)

    def _of_layer(self, boundary: int) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            self._save(boundary, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return hook

    def _save(self, boundary: int, state: Tensor) -> None:
        if self._states is not None and boundary in self.boundaries:
            self._states[boundary] = state.detach()
