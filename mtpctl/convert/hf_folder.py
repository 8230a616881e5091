"""Hugging Face model folders: reading the config of one without its weights, and making one with random weights."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpctl.checkpoint.listing import LISTING
from mtpctl.convert.tensor_files import INDEXES, FolderWeights
from mtpctl.errors import UserError
from mtpctl.families.reading import MTP_COUNTS, shape_of, stated_positions
from mtpctl.families.registry import FAMILIES
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, tensor_shapes

if TYPE_CHECKING:
    import torch

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
"""Prefixes that wrappers put before the names of a language model's decoder."""

HEADS = ("lm_head.weight", "language_model.lm_head.weight")
"""The names of a stored head."""

_LOG = logging.getLogger(__name__)

type HfConfig = dict[str, Any]
"""The contents of a `config.json`."""


@dataclass(frozen=True)
class HfFolder:
    """A folder with `config.json` and weights.

    `config` is the file's, completed from the names of the weights: MTP layers that it does not mention, and a tied head. Raises
    UserError where the folder, its config or its weights are missing or cannot be read.
    """

    path: Path
    config: HfConfig
    shape: ModelShape

    @classmethod
    def open(cls, path: str | Path, *, weights: bool = True, field: str = "model.path") -> HfFolder:
        """Read the config and the names of the weights; with `weights=False` the config alone, as it is.

        `field`: what the user calls the path. Raises UserError for a folder that holds no model.
        """
        folder = Path(path)
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"{field}: {folder} holds no config.json; name a Hugging Face model folder")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise UserError(f"{file}:{error.lineno}: not valid JSON: {error.msg}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"{file}:1: must hold an object")
        given = cls(folder, config, shape_of(config))
        return given.completed(FolderWeights(folder)) if weights else given

    def completed(self, weights: FolderWeights) -> HfFolder:
        """The folder with a config to which what only the weights show is added."""
        config = dict(self.config)
        family = next(family for family in FAMILIES if family.name == self.shape.family)
        if not self.shape.mtp_layers and family.mtp is not None:
            depth = 0
            names = family.mtp.layer + "input_layernorm.weight"
            while family.mtp.name(names, depth, self.shape.layers) in weights:
                depth += 1
            if depth:
                # Qwen3.5 has a key of its own for it.
                config[MTP_COUNTS[family.name.startswith("qwen3.5")]] = depth
        text = config.get("text_config") or {}
        stated = "tie_word_embeddings" in config or "tie_word_embeddings" in text
        if not stated and not self.shape.tied and not any(name.endswith("lm_head.weight") for name in weights.entries):
            config["tie_word_embeddings"] = True
        if self.shape.tied and (head := _other_head(weights)) is not None:
            _warn_of_head(self.path, head)
            config["tie_word_embeddings"] = False
        return self if config == self.config else HfFolder(self.path, config, shape_of(config))


def _other_head(weights: FolderWeights) -> str | None:
    """The name of a stored head that differs from the embedding, None if there is none: transformers and vLLM use such a head."""
    head = next((name for name in HEADS if name in weights), None)
    embedding = next((name for prefix in PREFIXES if (name := f"{prefix}embed_tokens.weight") in weights), None)
    if head is None or embedding is None:
        return None
    state = tuple((entry.file, entry.start, entry.file.stat().st_mtime_ns) for entry in (weights.entries[head], weights.entries[embedding]))
    if state not in _same_heads:
        _same_heads[state] = _same_values(weights.tensor(head), weights.tensor(embedding))
    return None if _same_heads[state] else head


_same_heads: dict[object, bool] = {}
"""Cache of comparisons of head and embedding, by files and their state: a process opens a folder several times."""


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two matrices are equal in the narrower of their dtypes. Starts with the first rows, which usually show a difference."""
    import torch

    if one.shape != other.shape:
        return False
    dtype = min(one.dtype, other.dtype, key=lambda each: each.itemsize)
    return torch.equal(one[:8].to(dtype), other[:8].to(dtype)) and torch.equal(one.to(dtype), other.to(dtype))


@cache
def _warn_of_head(path: Path, head: str) -> None:
    """Log once that the head is not tied."""
    _LOG.warning(
        f"{path / 'config.json'}: tie_word_embeddings is true, but the folder stores a different {head}; "
        "it is used, as in transformers and vLLM. Set tie_word_embeddings: false."
    )


def create_hf_folder(config: HfConfig, path: str | Path, seed: int, *, dtype: torch.dtype | None = None) -> HfFolder:
    """Make a folder of this config with random weights: norms are the identity, biases 0, the rest normal(0, initializer_range).

    `dtype`: of the weights, by default fp32. The same config and seed give the same bytes. The folder appears whole or not at all.
    """
    import torch
    from safetensors.torch import save_file

    dtype = dtype or torch.float32
    shape = shape_of(config)
    if "vision_config" in config:
        raise UserError(
            f"model.config: {shape.architecture} has a vision tower, which is carried from a folder and never made; "
            f"name one by model.path, or take {shape.architecture.replace('ForConditionalGeneration', 'ForCausalLM')}"
        )
    folder = Path(path)
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    std = config.get("initializer_range")
    std = 0.02 if std is None else std
    if isinstance(std, bool) or not isinstance(std, int | float) or not 0 <= std < math.inf:
        raise UserError(f"model config: initializer_range must be a number, 0 or above, got {std!r}")
    same = aliases(shape)
    tensors = {}
    for name, size in tensor_shapes(shape).items():
        if name not in same:
            tensors[name] = _drawn(name, size, shape, std, generator).to(dtype)
    # safetensors keeps no two names of one memory.
    tensors |= {name: tensors[same[name]].clone() for name in tensor_shapes(shape) if name in same}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    # The weights drawn here are not quantised, even if the config was copied from a folder whose weights are.
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    config = {**kept, "torch_dtype": str(dtype).removeprefix("torch.")}
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    aside.rename(folder)
    return HfFolder(folder, config, shape)


def _drawn(name: str, size: tuple[int, ...], shape: ModelShape, std: float, generator: torch.Generator) -> torch.Tensor:
    import torch

    if len(size) > 1:
        return torch.randn(size, generator=generator) * std
    # The norms of families with linear attention count from 1, but for the one inside that attention.
    from_one = shape.delta is not None and name.endswith(".weight") and not name.endswith("linear_attn.norm.weight")
    return torch.zeros(size) if name.endswith("bias") or from_one else torch.ones(size)


# The files of a model's folder beside its weights: config, generation config, tokenizer, chat template, code of its own.

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


# Where a conversion may write. Imports no torch, so that a command can ask before it loads anything.


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise UserError for a target that holds the source or lies in it, is a file, or exists without `force`."""
    here, there = source.resolve(), target.resolve()
    if there.is_relative_to(here) or here.is_relative_to(there):
        raise UserError(f"{target}: lies inside {source}, or the other way round; name a DST outside of it")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder")
    if target.exists() and not force:
        raise UserError(f"{target}: exists; name another DST, or replace it with --force")
