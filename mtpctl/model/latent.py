"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) on packed sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor

from mtpctl.kernels.linear import buffered_linear
from mtpctl.kernels.main_grad import is_buffered
from mtpctl.model.packing import Packing
from mtpctl.model.rope import Rope


class PackedRotary:
    """Takes the place of the rotary table of upstream's latent attention: gives the angles of packed tokens, by their position ids."""

    def __init__(self, rope: Rope, *, scaled: bool) -> None:
        self.rope, self.scaled = rope, scaled

    def get_rotary_seq_len(self, *args: object) -> Packing:
        """The argument with which upstream calls the table: the packing, the last one here, in place of a sequence length."""
        packing = args[-1]
        assert isinstance(packing, Packing)
        return packing

    def __call__(self, packing: Packing, **_: object) -> Tensor | tuple[Tensor, float]:
        angles = self.rope.angles(packing.position_ids)
        return (angles, self.rope.scaling) if self.scaled else angles


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, and applies to its own tokens."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        # megatron-core sums the gradients of parameters marked so over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        # In two dimensions: with three torch picks the product by whether the weight takes a gradient, and rounds otherwise.
        if is_buffered(self.weight):
            return buffered_linear(x, self.weight), None
        return F.linear(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1]), None


class LatentAttention(MLASelfAttention):
    """Upstream's, with positions that restart at each sample, and with down-projections that are whole on every rank.

    Upstream can also split those over tp, and then gathers what all heads share without summing its gradient.
    """

    def __init__(self, config: MLATransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        # Upstream asks for a norm of the query even where the query is not compressed, and has none.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def use_rope(self, rope: Rope) -> None:
        """Have the shared part of queries and keys rotated by this embedding."""
        del self.rotary_pos_emb
        self.__dict__["rotary_pos_emb"] = PackedRotary(rope, scaled=self.config.rope_type == "yarn")
