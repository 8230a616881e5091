"""Tiny checkpoints that vLLM can serve, and the plain forward pass that says what it must answer.

`random_tensors` draws a MiMo-shaped model; `cycle_tensors` makes one whose next token is known: the trunk answers
`token + step` and the MTP layer `token + mtp_step`, so acceptance is exactly 1 or exactly 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from mtpctl.families.configs import toy_config

Tensors = dict[str, torch.Tensor]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a MiMo model with a hidden size of 128 and one MTP layer."""
    sizes = {"vocab_size": 512, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}
    return toy_config(**{**sizes, **changes})


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, by its Hugging Face name."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv = hidden // heads * kv_heads
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    mtp = {
        "token_layernorm.weight": (hidden,),
        "hidden_layernorm.weight": (hidden,),
        "input_proj.weight": (hidden, 2 * hidden),
        "final_layernorm.weight": (hidden,),
    }
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        result |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    result |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    for layer in range(config["num_nextn_predict_layers"]):
        result |= {f"model.mtp_layers.{layer}.{name}": shape for name, shape in (block | mtp).items()}
    return result


def random_tensors(config: Mapping[str, Any], seed: int, std: float = 0.08) -> Tensors:
    """Normal weights, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * drawn if "norm" in name else std * drawn
    return tensors


def cycle_tensors(config: Mapping[str, Any], step: int, mtp_step: int) -> Tensors:
    """The next token is `token + step` (mod vocabulary), and the MTP layer drafts `previous draft + mtp_step`.

    Attention and MLP write nothing. Embeddings are random unit rows, the head holds those of the token `step` before, and
    the MTP layer rotates nothing: it hands on the embedding half of its input, moved by a matrix that maps row `t` to row
    `t + mtp_step - step`, solved by least squares over an orthogonal embedding (the vocabulary is at most the hidden size).
    """
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    if vocab > hidden:
        raise ValueError(f"rows of {vocab} tokens cannot be orthogonal in {hidden} dimensions")
    generator = torch.Generator().manual_seed(0)
    rows, _ = torch.linalg.qr(torch.randn(hidden, vocab, generator=generator))
    embedding = rows.T * hidden**0.5
    tensors = {name: torch.ones(shape) if "norm" in name else torch.zeros(shape) for name, shape in shapes(config).items()}
    tensors["model.embed_tokens.weight"] = embedding.contiguous()
    tensors["lm_head.weight"] = (embedding.roll(step, 0) * 2).contiguous()
    shift = embedding.T @ embedding.roll(step - mtp_step, 0) / hidden
    for layer in range(config["num_nextn_predict_layers"]):
        tensors[f"model.mtp_layers.{layer}.input_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), shift.T], dim=1).contiguous()
    return tensors


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """An HF folder: config.json, generation_config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference_logprobs(config: Mapping[str, Any], tensors: Tensors, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs `[len(tokens) - 1]` of each token given those before it, by a forward pass of the trunk in float64."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps = hidden // heads, config["rms_norm_eps"]
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    ids = torch.tensor(tokens)
    frequency = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(len(tokens), dtype=torch.float64)[:, None] * frequency
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights[name]

    def rope(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        inner = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            F.linear(inner, weights[f"{at}self_attn.{p}_proj.weight"], weights[f"{at}self_attn.{p}_proj.bias"])
            .unflatten(-1, (-1, dim))
            .transpose(0, 1)
            for p in "qkv"
        )
        k, v = rope(k).repeat_interleave(heads // kv_heads, 0), v.repeat_interleave(heads // kv_heads, 0)
        mixed = F.scaled_dot_product_attention(rope(q), k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(0, 1).flatten(1), weights[at + "self_attn.o_proj.weight"])
        inner = norm(x, at + "post_attention_layernorm.weight")
        gated = F.silu(F.linear(inner, weights[at + "mlp.gate_proj.weight"])) * F.linear(inner, weights[at + "mlp.up_proj.weight"])
        x = x + F.linear(gated, weights[at + "mlp.down_proj.weight"])
    logits = F.linear(norm(x, "model.norm.weight"), weights["lm_head.weight"])
    return (logits / temperature).log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
