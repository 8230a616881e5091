"""Variants of published folders, each with a toy model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from tests.fakes.convert_models import change_config, model, tensors, write
from tests.fakes.tiny import mimo

Tensors = dict[str, Tensor]


def pack(weights: Tensors, experts: int, suffix: str = "") -> Tensors:
    """Pack the experts of each layer into one tensor."""
    retained = {name: value for name, value in weights.items() if ".mlp.experts." not in name}
    for at in sorted({name.partition(".mlp.experts.")[0] for name in weights if ".mlp.experts." in name}):
        part = {kind: [weights[f"{at}.mlp.experts.{e}.{kind}_proj.weight"] for e in range(experts)] for kind in ("gate", "up", "down")}
        both = [torch.cat(pair) for pair in zip(part["gate"], part["up"], strict=True)]
        retained[f"{at}.mlp.experts.gate_up_proj{suffix}"] = torch.stack(both)
        retained[f"{at}.mlp.experts.down_proj{suffix}"] = torch.stack(part["down"])
    return retained


def quantize(path: Path, block: int = 16) -> Tensors:
    """Quantize the folder's projections to FP8 with a scale per block. Returns the dequantized tensors and all others, in bf16."""
    weights = {name: value.bfloat16() for name, value in tensors(path).items()}
    stored, meant = dict(weights), dict(weights)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith("_proj.weight") and "eh_proj" not in name]:
        rows, columns = weights[name].shape
        scale = torch.rand(-(-rows // block), -(-columns // block), generator=generator) + 0.5
        whole = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        stored[name] = (weights[name].float() / whole).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        meant[name] = (stored[name].float() * whole).bfloat16()
    write(path, stored)
    change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]}, dtype="bfloat16")
    return meant


def fp8(folder: Path) -> None:
    model("deepseek-v3", folder)
    quantize(folder)


def fp8_dense(folder: Path) -> None:
    mimo(folder)
    quantize(folder)


def pickled(folder: Path) -> None:
    """Two shards with their index, as torch saves them."""
    mimo(folder)
    weights = sorted(tensors(folder).items())
    (folder / "model.safetensors").unlink()
    shards = {"pytorch_model-00001-of-00002.bin": dict(weights[::2]), "pytorch_model-00002-of-00002.bin": dict(weights[1::2])}
    for name, part in shards.items():
        torch.save(part, folder / name)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def prefixed(folder: Path) -> None:
    """With a wrapper's prefix and a vision tower."""
    mimo(folder)
    weights = {f"language_model.{name}": value for name, value in tensors(folder).items()}
    write(folder, weights | {"visual.patch_embed.proj.weight": torch.randn(8, 3, 2, 2)})


def packed(folder: Path) -> None:
    model("qwen3.5-moe", folder)
    write(folder, pack(tensors(folder), 6))


def unnamed(folder: Path) -> None:
    """A tied head and MTP layers that the config does not mention."""
    model("qwen3-next", folder)
    write(folder, {name: value for name, value in tensors(folder).items() if name != "lm_head.weight"})
    change_config(folder, num_nextn_predict_layers=None, tie_word_embeddings=None)
