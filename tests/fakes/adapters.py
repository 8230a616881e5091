"""Adapters on every linear layer of the tests' MiMo, under PEFT's names, and the weights that they amount to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.sync.packing import default_section
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import random_tensors, tiny_config

RANK, ALPHA = 4, 8.0
_ADAPTED = re.compile(r"model\.layers\.\d+\..*_proj\.weight")

Tensors = dict[str, torch.Tensor]
BASE = random_tensors(tiny_config(vocab_size=32), 0)
"""Base weights of a tiny MiMo."""


def adapter(base: Mapping[str, torch.Tensor], seed: int, *, rank: int = RANK, size: float = 0.1) -> Tensors:
    """A and B of every linear layer of the trunk; those of a fused layer share nothing."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, weight in base.items():
        if _ADAPTED.fullmatch(name):
            at = ADAPTER_PREFIX + name.removesuffix(".weight")
            result[f"{at}.lora_A.weight"] = size * torch.randn(rank, weight.shape[1], generator=generator)
            result[f"{at}.lora_B.weight"] = size * torch.randn(weight.shape[0], rank, generator=generator)
    return {name: tensor.to(next(iter(base.values())).dtype) for name, tensor in result.items()}


def config(rank: int = RANK) -> dict[str, Any]:
    """What goes along."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA, "bias": "none", "target_modules": targets}


def merged(base: Mapping[str, torch.Tensor], delta: Mapping[str, torch.Tensor], *, rank: int = RANK) -> Tensors:
    """The base with the adapter's product added."""
    tensors = dict(base)
    for name in [name for name in delta if ".lora_A." in name]:
        target = name.removeprefix(ADAPTER_PREFIX).replace(".lora_A", "")
        product = delta[name.replace("lora_A", "lora_B")].double() @ delta[name].double()
        tensors[target] = (tensors[target].double() + ALPHA / rank * product).to(tensors[target].dtype)
    return tensors


def section_of(name: str) -> Any:
    """Of a base's or an adapter's tensor."""
    return "adapter" if name.startswith(ADAPTER_PREFIX) else default_section(name)


def publisher(
    root: Path, *, bucket_bytes: int = 3000, rank: int = RANK, sections: tuple[str, ...] = ("adapter", "target", "draft")
) -> Publisher:
    """One that cuts most of these tensors over buckets."""
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "sections": sections, "section_of": section_of}
    return Publisher(VersionStore(root), **options, config={"adapter": config(rank)})
