"""LoRA adapters under PEFT's names. Converts checkpoints of adapters to PEFT's files, or to a folder with merged weights.

A fused layer (QKV) becomes several layers in PEFT, which share A and have separate rows of B. B [out, rank] is split like the fused weight
[out, hidden], by the same mapping, with the rank in place of the hidden size.
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
from mtpctl.convert.mappings import ConversionTask, ParamMapping, is_packed_experts
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.parts import ConversionModel, partition
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.errors import UserError
from mtpctl.model.lora import REPLICATED_TARGETS, ROW_PARALLEL_TARGETS, Adapter
from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.recipe.train import LoraConfig

NUM_SAMPLED_ROWS = 8


def export_adapter(bridge: WeightBridge, chunks: list[MegatronModule], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (`base_model.model.<layer>.lora_A.weight`, [rank, in]) and (`….lora_B.weight`, [out, rank]) of every layer with an adapter.

    Collective: every rank must iterate, and gets all tensors. Raises UserError if PEFT has no name for a target.
    """
    for task in bridge.tasks(chunks):
        path = task.global_param_name.split(".")
        layer_name = path[-2] if len(path) > 2 else ""
        if path[0] != "decoder" or path[-1] != "weight" or layer_name not in lora.targets:
            continue
        if is_packed_experts(task):
            raise UserError(
                f"train.lora.targets: {task.mapping.hf_param} packs all experts, for which PEFT has no names; leave {layer_name} out, or "
                "publish merged weights"
            )
        a_matrices, b_matrices = _adapter_matrices(task, layer_name, lora.rank)
        for name in b_matrices:
            layer = ADAPTER_PREFIX + name.removesuffix(".weight")
            yield f"{layer}.lora_A.weight", a_matrices[name].reshape(lora.rank, -1)
            yield f"{layer}.lora_B.weight", b_matrices[name].reshape(-1, lora.rank)


def _adapter_matrices(task: ConversionTask, layer_name: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A and B matrices, keyed by the name of the weight that they adapt."""
    _clear_caches(task.mapping)
    try:
        return _convert_matrices(task, layer_name, rank)
    finally:
        _clear_caches(task.mapping)


def _clear_caches(mapping: ParamMapping) -> None:
    """Clear the shapes and configs that a mapping caches: a weight and its adapter have different ones."""
    mapping_class = importlib.import_module("megatron.bridge.models.conversion.param_mapping").MegatronParamMapping
    mapping.clear_broadcast_cache()
    mapping.clear_tensor_spec_output_cache()
    for part in vars(mapping).values():
        if isinstance(part, mapping_class):
            _clear_caches(part)


def _convert_matrices(task: ConversionTask, layer_name: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module, a, b = task.megatron_module, None, None
    if module is not None:
        assert isinstance(module.adapter, Adapter)
        a, b = module.adapter.lora_a.detach(), module.adapter.lora_b.detach()
        config = copy.copy(getattr(module, "config", None))
        if config is not None:
            config.hidden_size = rank
            module = copy.copy(module)
            module.config = config
    if layer_name in ROW_PARALLEL_TARGETS:
        return task.mapping.megatron_to_hf(a, task.megatron_module), _convert_replicated(task, b)
    if layer_name in REPLICATED_TARGETS:
        return _convert_replicated(task, a), _convert_replicated(task, b)
    return _convert_replicated(task, a), task.mapping.megatron_to_hf(b, module)


def _convert_replicated(task: ConversionTask, matrix: Tensor | None) -> dict[str, Tensor]:
    """A matrix that is replicated over tensor-parallel ranks, under each name of the weight."""
    mapping_class = importlib.import_module("megatron.bridge.models.conversion.param_mapping").ReplicatedMapping
    names = task.mapping.hf_param
    matrices: dict[str, Tensor] = {}
    for name in [names] if isinstance(names, str) else names.values():
        matrices |= mapping_class(task.mapping.megatron_param, name).megatron_to_hf(matrix, task.megatron_module)
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


def hash_base_weights(folder: Path) -> str:
    """A hash of the names, dtypes, shapes and a few rows of the tensors in a folder. It does not depend on the sharding into files.

    Training changes every matrix, so a few rows distinguish two sets of base weights.
    """
    lines = []
    weights = FolderWeights(folder)
    for name, entry in weights.entries.items():
        shape, tensor = list(entry.shape), weights.tensor(name)
        last_row = shape[0] - 1 if shape else -1
        rows = sorted({i * last_row // (NUM_SAMPLED_ROWS - 1) for i in range(NUM_SAMPLED_ROWS)}) if shape else []
        values = [tensor[row : row + 1].contiguous().view(torch.uint8).numpy().tobytes() for row in rows]
        lines.append(f"{name} {entry.code} {shape} {hashlib.sha256(b''.join(values)).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def adapter_model(path: Path, folder: HfFolder, adapter: sharded.AdapterRecord, *, precision: str | None = None) -> ConversionModel:
    """The model with adapters of the same layers and rank as in the checkpoint at `path`. `fill_adapter` loads their values.

    precision: of the model; default: the checkpoint's.
    """
    all_fp32 = all(tensor.properties.dtype is torch.float32 for tensor in _saved_tensors(path).values())
    return ConversionModel(folder, mtp=True, precision=precision or ("fp32" if all_fp32 else "bf16"), lora=_lora_config(adapter))


def require_weights(path: Path, weights: ModelWeights | None) -> ModelWeights:
    """Return the base weights. Raises UserError if they are missing."""
    if weights is None:
        raise UserError(f"{path}: contains an adapter, but its base weights were not found; name their folder with --model")
    return weights


def write_adapter(
    path: Path, conversion: ConversionModel, folder: HfFolder, adapter: sharded.AdapterRecord, target: Path
) -> tuple[int, int]:
    """Write `adapter_model.safetensors` and `adapter_config.json`. Returns the numbers of tensors and bytes.

    Raises UserError if the adapter was trained on other base weights than the folder's.
    """
    fill_adapter(path, conversion, folder.path, adapter)
    lora = _lora_config(adapter)
    tensors = {name: value.clone() for name, value in export_adapter(conversion.bridge, [conversion.model], lora)}
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_config(list(tensors), lora, str(folder.path))
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(tensors), sum(value.nbytes for value in tensors.values())


class MergedReader:
    """Reads the base weights with adapters merged, and the trained MTP layers, one part at a time."""

    def __init__(self, path: Path, conversion: ConversionModel, weights: ModelWeights, adapter: sharded.AdapterRecord) -> None:
        fill_adapter(path, conversion, weights.folder.path, adapter)
        self.conversion, self.weights = conversion, weights
        saved_tensors = _saved_tensors(path)
        values = {name: torch.empty(parameter.shape, device="meta") for name, parameter in conversion.parameters.items()}
        self._trained = {
            name for name, value in values.items() if all(piece.key in saved_tensors for piece in conversion.pieces(name, value))
        }
        base_dtypes = {name: weights.dtype(name) for name in weights}
        self.dtypes = {name: common_dtype(base_dtypes, parameter.hf_names) for name, parameter in conversion.parameters.items()}
        sizes = {name: value.numel() * self.dtypes[name].itemsize for name, value in values.items()}
        self.parts = partition(sizes)
        self.nbytes = [sum(sizes[name] for name in part) for part in self.parts]

    def read(self, index: int) -> dict[str, Tensor]:
        """The values of a part's parameters."""
        return {name: self._value(name).to(self.dtypes[name]) for name in self.parts[index]}

    def _value(self, name: str) -> Tensor:
        parameter = self.conversion.parameters[name]
        if name in self._trained:
            return parameter.task.param_weight.detach()
        value = self.conversion.to_megatron(name, self.weights)
        adapter = getattr(parameter.task.megatron_module, "adapter", None)
        return adapter.merge_into(value) if isinstance(adapter, Adapter) and name.endswith(".weight") else value


def _lora_config(adapter: sharded.AdapterRecord) -> LoraConfig:
    return LoraConfig(rank=adapter["rank"], alpha=adapter["alpha"], targets=adapter["targets"])


def _saved_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """The model's tensors in a checkpoint."""
    with convert_read_errors(path):
        entries = reader_of(path).read_metadata().state_dict_metadata
    return {
        name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
    }


def fill_adapter(path: Path, conversion: ConversionModel, base_folder: Path, adapter: sharded.AdapterRecord) -> None:
    """Load adapters and MTP layers from the checkpoint, but no base weights.

    Raises UserError if the adapter was trained on other base weights than those in `base_folder`.
    """
    saved_tensors = _saved_tensors(path)
    names = {name for name, key in conversion.checkpoint_keys() if key in saved_tensors}
    contents = sharded.Contents(conversion.model, None, 0, names, {**adapter, "base": hash_base_weights(base_folder)})
    sharded.restore(path, contents)
