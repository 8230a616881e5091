"""Convert an adapter's checkpoint: to PEFT's files, or merged into its base weights, a part at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mtpctl.checkpoint import sharded
from mtpctl.checkpoint.reading import reader_of, reading
from mtpctl.convert.adapters import export_adapter, fingerprint, peft_config
from mtpctl.convert.dtypes import common
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.parts import partition
from mtpctl.convert.skeleton import Skeleton
from mtpctl.errors import UserError
from mtpctl.model.lora import Adapter
from mtpctl.recipe.train import LoraConfig


def adapted(path: Path, folder: HfFolder, adapter: sharded.AdapterRecord, *, precision: str | None = None) -> Skeleton:
    """The model with adapters like those of the checkpoint at `path`, by default in their precision."""
    wide = all(saved.properties.dtype is torch.float32 for saved in _saved(path).values())
    return Skeleton(folder, mtp=True, precision=precision or ("fp32" if wide else "bf16"), lora=_config(adapter))


def needed_weights(path: Path, weights: ModelWeights | None) -> ModelWeights:
    """The base weights of an adapter. Raises UserError where they are None."""
    if weights is None:
        raise UserError(f"{path}: holds an adapter for weights that are not here; name their folder with --model")
    return weights


def write_adapter(path: Path, skeleton: Skeleton, folder: HfFolder, adapter: sharded.AdapterRecord, target: Path) -> tuple[int, int]:
    """Write `adapter_model.safetensors` and `adapter_config.json`. Returns tensors and bytes.

    Raises UserError where the adapter was trained on other weights than the folder's.
    """
    fill_adapter(path, skeleton, folder.path, adapter)
    lora = _config(adapter)
    tensors = {name: value.clone() for name, value in export_adapter(skeleton.bridge, [skeleton.model], lora)}
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_config(list(tensors), lora, str(folder.path))
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(tensors), sum(value.nbytes for value in tensors.values())


class MergedReader:
    """The model's weights with the adapters merged in, and the MTP layers that were trained beside them."""

    def __init__(self, path: Path, skeleton: Skeleton, weights: ModelWeights, adapter: sharded.AdapterRecord) -> None:
        fill_adapter(path, skeleton, weights.folder.path, adapter)
        self.skeleton, self.weights = skeleton, weights
        held = _saved(path)
        empty = {name: torch.empty(p.shape, device="meta") for name, p in skeleton.parameters.items()}
        self._trained = {name for name, value in empty.items() if all(piece.key in held for piece in skeleton.pieces(name, value))}
        types = {name: weights.dtype(name) for name in weights}
        self.dtypes = {name: common(types, parameter.needs) for name, parameter in skeleton.parameters.items()}
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
        value = self.skeleton.map.to_megatron(parameter, self.weights)
        adapter = getattr(parameter.task.megatron_module, "adapter", None)
        return adapter.merged(value) if isinstance(adapter, Adapter) and name.endswith(".weight") else value


def _config(adapter: sharded.AdapterRecord) -> LoraConfig:
    return LoraConfig(rank=adapter["rank"], alpha=adapter["alpha"], targets=adapter["targets"])


def _saved(path: Path) -> dict[str, TensorStorageMetadata]:
    """The model's tensors in a checkpoint."""
    with reading(path):
        stored = reader_of(path).read_metadata().state_dict_metadata
    return {name: saved for name, saved in stored.items() if isinstance(saved, TensorStorageMetadata) and not name.startswith("optimizer.")}


def fill_adapter(path: Path, skeleton: Skeleton, base: Path, adapter: sharded.AdapterRecord) -> None:
    """Load adapters and MTP layers from the checkpoint as the trainer restores them; the rest of the model stays without values."""
    held = _saved(path)
    names = {name for name, key in skeleton.saved_as() if key in held}
    contents = sharded.Contents(skeleton.model, None, 0, names, {**adapter, "base": fingerprint(base)})
    sharded.restore(path, contents)
