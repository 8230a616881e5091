"""The files of a model's folder beside its weights: config, generation config, tokenizer, chat template, code of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from mtpctl.checkpoint.listing import LISTING
from mtpctl.convert.folder_weights import INDEXES
from mtpctl.convert.hf_folder import HfConfig
from mtpctl.families.reading import MTP_COUNTS, stated_positions

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".distcp")
"""Suffixes of files that are weights, which are converted or left behind."""


def carried_files(folder: Path) -> Iterator[Path]:
    """Files that are copied unchanged, relative to `folder`. Hidden ones are not."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and path.suffix not in WEIGHTS and name.name not in (*INDEXES, LISTING, "config.json"):
            yield name


def carry(source: Path, target: Path) -> None:
    """Copy those files."""
    for name in carried_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def written_config(config: HfConfig, dtype: torch.dtype, *, mtp_layers: int) -> HfConfig:
    """The config of a folder whose weights are of `dtype` and hold `mtp_layers` MTP layers.

    max_position_embeddings is the length that the model was trained with, where the published file is known to state another.
    quantization_config is left out, since the weights are dequantised.
    """
    made = {name: value for name, value in config.items() if name != "quantization_config"}
    where = _part_with(made, "max_position_embeddings")
    if where.get("max_position_embeddings") is not None:
        where["max_position_embeddings"] = stated_positions(config)
    count = next((key for key in MTP_COUNTS if key in _part_with(made, key)), None)
    if count is not None:
        _part_with(made, count)[count] = mtp_layers
    named = [key for key in ("dtype", "torch_dtype") if key in made] or ["torch_dtype"]
    for key in named:
        made[key] = str(dtype).removeprefix("torch.")
    if "text_config" in made and "dtype" in made["text_config"]:
        made["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    return made


def _part_with(config: HfConfig, key: str) -> HfConfig:
    """The part of the config that has `key`: the config itself, or its `text_config`, which is replaced by a copy to write to."""
    if key not in config and key in (config.get("text_config") or {}):
        config["text_config"] = dict(config["text_config"])
        return config["text_config"]
    return config


def write_config(config: HfConfig, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
