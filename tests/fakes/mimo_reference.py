"""MiMo from its published formulas in plain PyTorch: one sequence at a time, no packing, no Megatron.

The MTP part follows how inference engines draft: the trunk's state before its final norm and the embedding of the next
token, each normed, concatenated as [hidden, embedding], projected, through one transformer layer and a norm. The
embedding at position 0 is zero. Each further drafting step is at the next position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, theta: float, first_position: int = 0) -> Tensor:
    """Rotary embedding of x [heads, T, dim], halves convention."""
    half = x.shape[-1] // 2
    angles = torch.arange(first_position, first_position + x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1).to(x.dtype)


Cache = list[Tensor]
"""Keys and values [heads, T, dim] of the tokens so far."""


def layer(x: Tensor, weights: dict[str, Tensor], at: str, config: dict[str, Any], cache: Cache | None = None) -> Tensor:
    """One transformer layer on x [T, H], the tokens after those in `cache`, to which it appends their keys and values."""
    earlier = cache[0].shape[1] if cache else 0
    heads, kv_heads, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]

    def split(name: str, count: int) -> Tensor:
        return (
            F.linear(y, weights[f"{at}self_attn.{name}.weight"], weights[f"{at}self_attn.{name}.bias"])
            .view(len(x), count, -1)
            .transpose(0, 1)
        )

    y = norm(x, weights[f"{at}input_layernorm.weight"], eps)
    q, k = (rotated(split(name, count), config["rope_theta"], earlier) for name, count in (("q_proj", heads), ("k_proj", kv_heads)))
    k, v = (z.repeat_interleave(heads // kv_heads, dim=0) for z in (k, split("v_proj", kv_heads)))
    if cache is not None:
        cache[:] = [torch.cat([old, new], dim=1) for old, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
        k, v = cache
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(len(x), earlier + len(x)).triu(1 + earlier).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
    x = x + F.linear(mixed, weights[f"{at}self_attn.o_proj.weight"])
    y = norm(x, weights[f"{at}post_attention_layernorm.weight"], eps)
    gate, up = (F.linear(y, weights[f"{at}mlp.{name}.weight"]) for name in ("gate_proj", "up_proj"))
    return x + F.linear(F.silu(gate) * up, weights[f"{at}mlp.down_proj.weight"])


def forward(
    weights: dict[str, Tensor], config: dict[str, Any], ids: list[int], depths: int = 0, *, isolated: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, vocab] of the trunk, and for depth k logits [T - k, vocab]: entry i predicts token i + k + 1.

    isolated: no gradient goes from the depths to the trunk, the embedding or the head.
    """
    eps = config["rms_norm_eps"]
    table = weights["model.embed_tokens.weight"]
    head = table if config["tie_word_embeddings"] else weights["lm_head.weight"]
    x = table[torch.tensor(ids)]
    for number in range(config["num_hidden_layers"]):
        x = layer(x, weights, f"model.layers.{number}.", config)
    logits = F.linear(norm(x, weights["model.norm.weight"], eps), head)
    drafts = []
    if isolated:
        x, table, head = x.detach(), table.detach(), head.detach()
    for depth in range(1, depths + 1):
        at = f"model.mtp_layers.{depth - 1}."
        x = x[: len(ids) - depth]
        embedded = table[torch.tensor(ids[depth:])].clone()
        embedded[0] = 0
        state = norm(x, weights[f"{at}hidden_layernorm.weight"], eps)
        embedded = norm(embedded, weights[f"{at}token_layernorm.weight"], eps)
        x = layer(F.linear(torch.cat([state, embedded], dim=-1), weights[f"{at}input_proj.weight"]), weights, at, config)
        x = norm(x, weights[f"{at}final_layernorm.weight"], eps)
        drafts.append(F.linear(x, head))
    return logits, drafts


def drafted(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int], position: int, steps: int) -> list[Tensor]:
    """Logits [vocab] of each step of a drafter that starts at `position`, if it drafted the tokens that follow there.

    So vLLM 0.32 drafts (v1/spec_decode/llm_base_proposer.py, models/mimo_mtp.py): the first step runs over all tokens; each
    next one over a single token, one position further on, which reads the last step's state and, of the same layer, the keys
    and values that all steps before it left.
    """
    eps, at = config["rms_norm_eps"], "model.mtp_layers.0."
    table, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    state = table[torch.tensor(ids[: position + 1])]
    for number in range(config["num_hidden_layers"]):
        state = layer(state, weights, f"model.layers.{number}.", config)
    logits: list[Tensor] = []
    cache: Cache = []
    for step in range(steps):
        here = torch.arange(position + 1) if step == 0 else torch.tensor([position + step])
        embedded = torch.where(here[:, None] == 0, 0.0, table[torch.tensor(ids)[here + 1]])
        state = norm(state, weights[f"{at}hidden_layernorm.weight"], eps)
        embedded = norm(embedded, weights[f"{at}token_layernorm.weight"], eps)
        x = F.linear(torch.cat([state, embedded], dim=-1), weights[f"{at}input_proj.weight"])
        state = norm(layer(x, weights, at, config, cache), weights[f"{at}final_layernorm.weight"], eps)[-1:]
        logits.append(F.linear(state[0], head))
    return logits
