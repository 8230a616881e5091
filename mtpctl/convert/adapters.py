"""LoRA adapters under PEFT's names, and the conversion of their checkpoints: to PEFT's files, or merged into the base weights.

A fused layer (QKV) becomes several layers in PEFT, which share A and have separate rows of B. The mapping of the fused weight splits these
rows: it treats B [out, rank] as a weight [out, hidden] of a model whose hidden size is the rank.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.transformer import MegatronModule
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mtpctl.checkpoint import sharded
from mtpctl.checkpoint.reading import convert_read_errors, reader_of
from mtpctl.convert.bridge import WeightBridge
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.hf_writer import common_dtype
from mtpctl.convert.mappings import ConversionTask, ParamMapping, packs_experts
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.parts import Skeleton, partition
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.errors import UserError
from mtpctl.model.lora import REPLICATED, ROW, Adapter
from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.recipe.train import LoraConfig

SAMPLED_ROWS = 8


def export_adapter(bridge: WeightBridge, chunks: list[MegatronModule], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (`base_model.model.<layer>.lora_A.weight`, [rank, in]) and (`….lora_B.weight`, [out, rank]) of every adapter_skeleton layer.

    Collective: every rank must iterate, and gets all tensors. Raises UserError if PEFT has no name for a target.
    """
    for task in bridge.tasks(chunks):
        path = task.global_param_name.split(".")
        leaf = path[-2] if len(path) > 2 else ""
        if path[0] != "decoder" or path[-1] != "weight" or leaf not in lora.targets:
            continue
        if packs_experts(task):
            raise UserError(
                f"train.lora.targets: {task.mapping.hf_param} packs all experts, for which PEFT has no names; leave {leaf} out, or "
                "publish merged weights"
            )
        a, b = _matrices(task, leaf, lora.rank)
        for name in b:
            layer = ADAPTER_PREFIX + name.removesuffix(".weight")
            yield f"{layer}.lora_A.weight", a[name].reshape(lora.rank, -1)
            yield f"{layer}.lora_B.weight", b[name].reshape(-1, lora.rank)


def _matrices(task: ConversionTask, leaf: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A and B matrices, keyed by the names of the adapter_skeleton weights."""
    _clear_caches(task.mapping)
    try:
        return _converted(task, leaf, rank)
    finally:
        _clear_caches(task.mapping)


def _clear_caches(mapping: ParamMapping) -> None:
    """Clear the shapes and configs that a mapping caches: a weight and its adapter have different ones."""
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
        return task.mapping.megatron_to_hf(a, task.megatron_module), _replicated(task, b)
    if leaf in REPLICATED:
        return _replicated(task, a), _replicated(task, b)
    return _replicated(task, a), task.mapping.megatron_to_hf(b, module)


def _replicated(task: ConversionTask, value: Tensor | None) -> dict[str, Tensor]:
    """A matrix that is replicated over tensor-parallel ranks, under each name of the weight."""
    replicated = importlib.import_module("megatron.bridge.models.conversion.param_mapping").ReplicatedMapping
    names = task.mapping.hf_param
    matrices: dict[str, Tensor] = {}
    for name in [names] if isinstance(names, str) else names.values():
        matrices |= replicated(task.mapping.megatron_param, name).megatron_to_hf(value, task.megatron_module)
    return matrices


def peft_config(names: list[str], lora: LoraConfig, base: str) -> dict[str, object]:
    """PEFT's `adapter_config.json` for tensors of these names and the base model `base`."""
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
    """A hash of the names, dtypes, shapes and a few rows of the tensors in a folder. It does not depend on the sharding into files.

    Training changes every matrix, so a few rows distinguish two sets of base weights.
    """
    lines = []
    weights = FolderWeights(folder)
    for name, entry in weights.entries.items():
        shape, tensor = list(entry.shape), weights.tensor(name)
        rows = sorted({i * (shape[0] - 1) // max(1, SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)}) if shape else []
        values = [tensor[row : row + 1].contiguous().view(torch.uint8).numpy().tobytes() for row in rows]
        lines.append(f"{name} {entry.code} {shape} {hashlib.sha256(b''.join(values)).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def adapter_skeleton(path: Path, folder: HfFolder, adapter: sharded.AdapterRecord, *, precision: str | None = None) -> Skeleton:
    """The model with (unfilled) adapters that match the checkpoint at `path`, by default in the checkpoint's precision."""
    all_fp32 = all(saved.properties.dtype is torch.float32 for saved in _saved(path).values())
    return Skeleton(folder, mtp=True, precision=precision or ("fp32" if all_fp32 else "bf16"), lora=_config(adapter))


def require_weights(path: Path, weights: ModelWeights | None) -> ModelWeights:
    """Return the base weights. Raises UserError if they are missing."""
    if weights is None:
        raise UserError(f"{path}: holds an adapter for weights that are not here; name their folder with --model")
    return weights


def write_adapter(path: Path, skeleton: Skeleton, folder: HfFolder, adapter: sharded.AdapterRecord, target: Path) -> tuple[int, int]:
    """Write `adapter_model.safetensors` and `adapter_config.json`. Returns the numbers of tensors and bytes.

    Raises UserError if the adapter was trained on other base weights than the folder's.
    """
    fill_adapter(path, skeleton, folder.path, adapter)
    lora = _config(adapter)
    tensors = {name: value.clone() for name, value in export_adapter(skeleton.bridge, [skeleton.model], lora)}
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_config(list(tensors), lora, str(folder.path))
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(tensors), sum(value.nbytes for value in tensors.values())


class MergedReader:
    """Reads the base weights with merged adapters, and the trained MTP layers, a part at a time."""

    def __init__(self, path: Path, skeleton: Skeleton, weights: ModelWeights, adapter: sharded.AdapterRecord) -> None:
        fill_adapter(path, skeleton, weights.folder.path, adapter)
        self.skeleton, self.weights = skeleton, weights
        saved = _saved(path)
        empty = {name: torch.empty(p.shape, device="meta") for name, p in skeleton.parameters.items()}
        self._trained = {name for name, value in empty.items() if all(piece.key in saved for piece in skeleton.pieces(name, value))}
        types = {name: weights.dtype(name) for name in weights}
        self.dtypes = {name: common_dtype(types, parameter.needs) for name, parameter in skeleton.parameters.items()}
        sizes = {name: value.numel() * self.dtypes[name].itemsize for name, value in empty.items()}
        self.parts = partition(sizes)
        self.nbytes = [sum(sizes[name] for name in part) for part in self.parts]

    def read(self, number: int) -> dict[str, Tensor]:
        """The values of a part's parameters."""
        return {name: self._value(name).to(self.dtypes[name]) for name in self.parts[number]}

    def _value(self, name: str) -> Tensor:
        parameter = self.skeleton.parameters[name]
        if name in self._trained:
            return parameter.task.param_weight.detach()
        value = self.skeleton.to_megatron(name, self.weights)
        adapter = getattr(parameter.task.megatron_module, "adapter", None)
        return adapter.merge_into(value) if isinstance(adapter, Adapter) and name.endswith(".weight") else value


def _config(adapter: sharded.AdapterRecord) -> LoraConfig:
    return LoraConfig(rank=adapter["rank"], alpha=adapter["alpha"], targets=adapter["targets"])


def _saved(path: Path) -> dict[str, TensorStorageMetadata]:
    """The model's tensors in a checkpoint."""
    with convert_read_errors(path):
        stored = reader_of(path).read_metadata().state_dict_metadata
    return {name: saved for name, saved in stored.items() if isinstance(saved, TensorStorageMetadata) and not name.startswith("optimizer.")}


def fill_adapter(path: Path, skeleton: Skeleton, base: Path, adapter: sharded.AdapterRecord) -> None:
    """Load adapters and MTP layers from the checkpoint, but no base weights.

    Raises UserError if the adapter was trained on other base weights than those in `base`.
    """
    saved = _saved(path)
    names = {name for name, key in skeleton.checkpoint_keys() if key in saved}
    contents = sharded.Contents(skeleton.model, None, 0, names, {**adapter, "base": fingerprint(base)})
    sharded.restore(path, contents)
