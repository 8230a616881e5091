"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) on packed sequences."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from mtpctl.model.packing import Packing
from mtpctl.model.rope import Rope


class PackedRotary:
    """Stands where upstream's latent attention keeps its rotary table, and answers with the angles of the tokens at hand."""

    def __init__(self, rope: Rope, *, scaled: bool) -> None:
        self.rope, self.scaled = rope, scaled

    def get_rotary_seq_len(self, *args: Any) -> Packing:
        """What the table is asked for next: here the packing, the last of upstream's arguments."""
        packing: Packing = args[-1]
        return packing

    def __call__(self, packing: Packing, **_: Any) -> Tensor | tuple[Tensor, float]:
        angles = self.rope.angles(packing.position_ids).squeeze(1)  # upstream drops the batch dimension of packed queries
        return (angles, self.rope.scaling) if self.scaled else angles


class LatentAttention(MLASelfAttention):
    """Upstream's, with positions that restart at each sample."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # Upstream asks for a norm of the query even where the query is not compressed, and has none.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def use_rope(self, rope: Rope) -> None:
        """Rotate the shared part of queries and keys so."""
        del self.rotary_pos_emb
        self.__dict__["rotary_pos_emb"] = PackedRotary(rope, scaled=self.config.rope_type == "yarn")
