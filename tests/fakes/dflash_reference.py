"""A Llama, Qwen3 or Qwen3-MoE with a DFlash drafter in plain PyTorch and float64, drafting one block as an inference engine does."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fakes.eagle3_reference import Eagle3Reference
from tests.fakes.mimo_reference import rotated


class DFlashReference(Eagle3Reference):
    """The trunk is that of `Eagle3Reference`."""

    def block(self, ids: list[int], position: int, drafts: int) -> list[Tensor]:
        """States [H] for the LM head of `drafts` drafts, which follow the token after `position`. Later `ids` have no influence."""
        config = self.config["drafter"]
        own = config["dflash_config"]
        states = self.boundaries(ids[: position + 1])
        read = torch.cat([states[layer + 1] for layer in own["target_layer_ids"]], -1)
        context = self.norm(self.product(read, "drafter.fc"), "drafter.hidden_norm.weight")
        x = self.embedded([ids[position + 1], *[own["mask_token_id"]] * drafts])
        for index in range(config["num_hidden_layers"]):
            at = f"drafter.layers.{index}."
            x = x + self.block_attention(context, self.norm(x, f"{at}input_layernorm.weight"), f"{at}self_attn.")
            x = x + self.mlp(self.norm(x, f"{at}post_attention_layernorm.weight"), f"{at}mlp.")
        return list(self.norm(x, "drafter.norm.weight")[1:])

    def block_attention(self, context: Tensor, block: Tensor, at: str) -> Tensor:
        """Attention of a block to the context in front of it and to itself, in both directions."""
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        both = torch.cat([context, block])

        def split(x: Tensor, part: str, count: int) -> Tensor:
            y = self.product(x, f"{at}{part}_proj").view(len(x), count, -1)
            name = f"{at}{part}_norm.weight"
            return (self.norm(y, name) if name in self.weights else y).transpose(0, 1)

        q = rotated(split(block, "q", heads), self.config["rope_theta"], len(context))
        k, v = rotated(split(both, "k", kv_heads), self.config["rope_theta"], 0), split(both, "v", kv_heads)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        out = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.product(out.transpose(0, 1).reshape(len(block), -1), f"{at}o_proj")
