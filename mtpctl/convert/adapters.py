"""LoRA adapters as PEFT names them, and which weights they were made for.

A fused layer (q, k and v in one) becomes several layers in PEFT, which share A and have their own rows of B each. The mapping of the
layer's weight cuts those rows: it converts B [out, rank] like a weight [out, hidden] of a model whose hidden size is the rank.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.transformer import MegatronModule
from torch import Tensor

from mtpctl.convert.bridge import WeightBridge
from mtpctl.convert.folder_weights import FolderWeights
from mtpctl.convert.upstream import ConversionTask, ParamMapping, packs_experts
from mtpctl.errors import UserError
from mtpctl.model.lora import ROW, WHOLE, Adapter
from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.recipe.train import LoraConfig

SAMPLED_ROWS = 8


def export_adapter(bridge: WeightBridge, chunks: list[MegatronModule], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (`base_model.model.<layer>.lora_A.weight`, [rank, in]) and (`….lora_B.weight`, [out, rank]) of every adapted layer.

    Every rank must iterate, and every rank gets all of them. Raises UserError where PEFT has no name for a target.
    """
    for task in bridge.tasks(chunks):
        place, leaf = task.global_param_name.split("."), ""
        if len(place) > 2:
            leaf = place[-2]
        if place[0] != "decoder" or place[-1] != "weight" or leaf not in lora.targets:
            continue
        if packs_experts(task):
            raise UserError(
                f"train.lora.targets: {task.mapping.hf_param} packs all experts, which PEFT has no names for; leave {leaf} out, or "
                "publish merged weights"
            )
        a, b = _matrices(task, leaf, lora.rank)
        for name in b:
            layer = ADAPTER_PREFIX + name.removesuffix(".weight")
            yield f"{layer}.lora_A.weight", a[name].reshape(lora.rank, -1)
            yield f"{layer}.lora_B.weight", b[name].reshape(-1, lora.rank)


def _matrices(task: ConversionTask, leaf: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A and B, each by the name of the weight that it adapts."""
    _clear_caches(task.mapping)
    try:
        return _converted(task, leaf, rank)
    finally:
        _clear_caches(task.mapping)


def _clear_caches(mapping: ParamMapping) -> None:
    """Clear the shapes and configs that a mapping keeps from its last conversion, which was that of the weight or of its adapter."""
    kind = importlib.import_module("megatron.bridge.models.conversion.param_mapping").MegatronParamMapping
    mapping.clear_broadcast_cache()
    mapping.clear_tensor_spec_output_cache()
    for part in vars(mapping).values():
        if isinstance(part, kind):
            _clear_caches(part)


def _converted(task: ConversionTask, leaf: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module, a, b = task.megatron_module, None, None
    if module is not None:
        assert isinstance(module.adapter, Adapter)
        a, b = module.adapter.lora_a.detach(), module.adapter.lora_b.detach()
        config = copy.copy(getattr(module, "config", None))
        if config is not None:
            config.hidden_size = rank
            module = copy.copy(module)
            module.config = config
    if leaf in ROW:
        return task.mapping.megatron_to_hf(a, task.megatron_module), _same_on_all(task, b)
    if leaf in WHOLE:
        return _same_on_all(task, a), _same_on_all(task, b)
    return _same_on_all(task, a), task.mapping.megatron_to_hf(b, module)


def _same_on_all(task: ConversionTask, value: Tensor | None) -> dict[str, Tensor]:
    """A matrix that every tensor-parallel rank holds whole, under each name of the weight."""
    replicated = importlib.import_module("megatron.bridge.models.conversion.param_mapping").ReplicatedMapping
    names = task.mapping.hf_param
    found: dict[str, Tensor] = {}
    for name in [names] if isinstance(names, str) else names.values():
        found |= replicated(task.mapping.megatron_param, name).megatron_to_hf(value, task.megatron_module)
    return found


def peft_config(names: list[str], lora: LoraConfig, base: str) -> dict[str, object]:
    """PEFT's `adapter_config.json` for the tensors of these names, on the model called `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in names}),
    }


def fingerprint(folder: Path) -> str:
    """A hash of the weights in a folder: names, types, shapes and a few rows of each tensor, however they are split over files.

    Training changes every matrix, so that a few rows distinguish two sets of base weights without reading all of them.
    """
    lines = []
    weights = FolderWeights(folder)
    for name, entry in weights.entries.items():
        shape, tensor = list(entry.shape), weights.tensor(name)
        rows = sorted({i * (shape[0] - 1) // max(1, SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)}) if shape else []
        values = [tensor[row : row + 1].contiguous().view(torch.uint8).numpy().tobytes() for row in rows]
        lines.append(f"{name} {entry.code} {shape} {hashlib.sha256(b''.join(values)).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
