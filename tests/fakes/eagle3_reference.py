"""A Llama, Qwen3 or Qwen3-MoE with an EAGLE-3 drafter in plain PyTorch and float64, drafting as an inference engine does.

The drafter first reads the tokens so far: at each, the trunk's states at some boundaries, projected to one, and the embedding of the next
token. It keeps their keys and values. Each further draft reads the drafter's own last state, at the next position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fakes.mimo_reference import norm, rotated

Cache = list[Tensor]
"""Keys and values [heads, T, dim] of the tokens so far."""


class Eagle3Reference:
    """weights: by the names of `families.tensors`, the drafter's with the prefix `drafter.`."""

    def __init__(self, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.weights = {name: value.double() for name, value in weights.items()}
        self.config = config

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.weights[name], self.config["rms_norm_eps"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def embedded(self, ids: list[int]) -> Tensor:
        return self.weights["model.embed_tokens.weight"][ids]

    def attention(self, x: Tensor, at: str, cache: Cache) -> Tensor:
        """Attention of x [T, in], the tokens after those in `cache`, to which it appends their keys and values."""
        config, earlier = self.config, cache[0].shape[1] if cache else 0
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

        def split(part: str, count: int) -> Tensor:
            y = self.product(x, f"{at}{part}_proj").view(len(x), count, -1)
            name = f"{at}{part}_norm.weight"
            return (self.norm(y, name) if name in self.weights else y).transpose(0, 1)

        q, k = (rotated(split(part, count), config["rope_theta"], earlier) for part, count in (("q", heads), ("k", kv_heads)))
        k, v = (z.repeat_interleave(heads // kv_heads, dim=0) for z in (k, split("v", kv_heads)))
        cache[:] = [torch.cat([old, new], dim=1) for old, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
        scores = q @ cache[0].transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(len(x), earlier + len(x)).triu(1 + earlier).bool(), float("-inf"))
        return self.product((scores.softmax(-1) @ cache[1]).transpose(0, 1).reshape(len(x), -1), f"{at}o_proj")

    def mlp(self, x: Tensor, at: str) -> Tensor:
        if f"{at}gate.weight" not in self.weights:
            return self.product(F.silu(self.product(x, f"{at}gate_proj")) * self.product(x, f"{at}up_proj"), f"{at}down_proj")
        shares, experts = self.product(x, f"{at}gate").softmax(-1).topk(self.config["num_experts_per_tok"])
        shares = shares / shares.sum(-1, keepdim=True)
        rows = [
            sum(share * self.mlp(row, f"{at}experts.{expert}.") for share, expert in zip(weights, chosen.tolist(), strict=True))
            for row, weights, chosen in zip(x, shares, experts, strict=True)
        ]
        return torch.stack(rows)

    def boundaries(self, ids: list[int]) -> list[Tensor]:
        """The trunk's states [T, H] before its first layer and after each layer."""
        states = [self.embedded(ids)]
        for index in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{index}."
            x = states[-1]
            x = x + self.attention(self.norm(x, f"{at}input_layernorm.weight"), f"{at}self_attn.", [])
            states.append(x + self.mlp(self.norm(x, f"{at}post_attention_layernorm.weight"), f"{at}mlp."))
        return states

    def drafted(self, ids: list[int], position: int, drafts: int) -> list[Tensor]:
        """States [H] for the LM head of `drafts` drafts, which are `ids` after the one that follows `position`."""
        states, at = self.boundaries(ids[: position + 1]), "drafter.midlayer."
        read = self.config["drafter"]["eagle_aux_hidden_state_layer_ids"]
        state = self.product(torch.cat([states[index] for index in read], -1), "drafter.fc")
        embedded, cache, result = self.embedded(ids[1 : position + 2]), [], []
        for depth in range(drafts):
            pair = torch.cat([self.norm(embedded, f"{at}input_layernorm.weight"), self.norm(state, f"{at}hidden_norm.weight")], -1)
            state = state + self.attention(pair, f"{at}self_attn.", cache)
            state = (state + self.mlp(self.norm(state, f"{at}post_attention_layernorm.weight"), f"{at}mlp."))[-1:]
            result.append(self.norm(state, "drafter.norm.weight")[0])
            embedded = self.embedded(ids[position + 2 + depth :][:1])
        return result
