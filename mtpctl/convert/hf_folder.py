"""Hugging Face model folders: reading, creation with random weights, and copying. Importing this module does not import torch."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpctl.checkpoint.listing import LISTING
from mtpctl.convert.tensor_files import INDEX_FILES, FolderWeights
from mtpctl.errors import UserError
from mtpctl.families.reading import DRAFTER, MTP_COUNTS, family_of, has_mtp_layers_field, shape_of, stated_positions
from mtpctl.families.registry import FAMILIES
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, tensor_shapes
from mtpctl.recipe.model import read_config

if TYPE_CHECKING:
    import torch

DECODER_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
"""Prefixes of the decoder's tensor names, including those of multimodal wrappers."""

HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
"""Names of a stored LM head."""

_LOG = logging.getLogger(__name__)

type HfConfig = dict[str, Any]
"""The contents of a `config.json`."""


@dataclass(frozen=True)
class HfFolder:
    """A folder with `config.json` and weights.

    config: the file's contents. After `completed`, also the number of MTP layers and whether the head is tied, according to the weights.
    """

    path: Path
    config: HfConfig
    shape: ModelShape

    @classmethod
    def open(cls, path: str | Path, *, weights: bool = True, field: str = "model.path") -> HfFolder:
        """Read the config, and complete it from the weights. With `weights=False`, only read the config.

        field: the name of the path in error messages. Raises UserError if the folder, its config or its weights are missing or unreadable.
        """
        folder = Path(path)
        config = read_config(folder, field)
        result = cls(folder, config, shape_of(config))
        return result.completed(FolderWeights(folder)) if weights else result

    def completed(self, weights: FolderWeights) -> HfFolder:
        """This folder with a config completed from the weights: the number of MTP layers, and whether the head is tied."""
        config = dict(self.config)
        family = next(family for family in FAMILIES if family.name == self.shape.family)
        if family.mtp is not None and not (self.shape.mtp_layers and has_mtp_layers_field(config)):
            mtp_layers = 0
            template = family.mtp.layer + ("norm.weight" if family.layer_pattern else "input_layernorm.weight")
            while family.mtp.name(template, mtp_layers, self.shape.layers) in weights and (mtp_layers == 0 or "{" in template):
                mtp_layers += 1
            if mtp_layers != self.shape.mtp_layers:
                # Qwen3.5 has its own key for the count.
                config[MTP_COUNTS[family.name.startswith("qwen3.5")]] = mtp_layers
        text_config = config.get("text_config") or {}
        is_explicit = "tie_word_embeddings" in config or "tie_word_embeddings" in text_config
        if not is_explicit and not self.shape.tied and not any(name.endswith("lm_head.weight") for name in weights.entries):
            config["tie_word_embeddings"] = True
        if self.shape.tied and (head := _find_untied_head(weights, self.shape)) is not None:
            _warn_untied_head(self.path, head)
            config["tie_word_embeddings"] = False
        return self if config == self.config else HfFolder(self.path, config, shape_of(config))


def _find_untied_head(weights: FolderWeights, shape: ModelShape) -> str | None:
    """The name of a stored head that differs from the embedding; None if there is none. transformers and vLLM do not tie such a head."""
    head = next((name for name in HEAD_NAMES if name in weights), None)
    prefixes = (shape.prefix, *DECODER_PREFIXES)
    embedding = next((name for prefix in prefixes if (name := f"{prefix}{shape.embedding}.weight") in weights), None)
    if head is None or embedding is None:
        return None
    cache_key = tuple(
        (entry.file, entry.start, entry.file.stat().st_mtime_ns) for entry in (weights.entries[head], weights.entries[embedding])
    )
    if cache_key not in _HEAD_COMPARISONS:
        _HEAD_COMPARISONS[cache_key] = _equal_in_narrower_dtype(weights.tensor(head), weights.tensor(embedding))
    return None if _HEAD_COMPARISONS[cache_key] else head


_HEAD_COMPARISONS: dict[object, bool] = {}
"""Cache of comparisons of head and embedding, by file, offset and modification time, because a process opens a folder several times."""


def _equal_in_narrower_dtype(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two matrices are equal in the narrower of their dtypes. Compares a few rows first: if any rows differ, these usually do."""
    import torch

    if first.shape != second.shape:
        return False
    dtype = min(first.dtype, second.dtype, key=lambda each: each.itemsize)
    return torch.equal(first[:8].to(dtype), second[:8].to(dtype)) and torch.equal(first.to(dtype), second.to(dtype))


@cache
def _warn_untied_head(path: Path, head: str) -> None:
    """Log once that the head is not tied."""
    _LOG.warning(
        f"{path / 'config.json'}: tie_word_embeddings is true, but the folder stores a different {head}; "
        "it is used, as in transformers and vLLM. Set tie_word_embeddings: false."
    )


def create_hf_folder(config: HfConfig, path: str | Path, seed: int, *, dtype: torch.dtype | None = None) -> HfFolder:
    """Atomically create a folder with random weights: norms are the identity, biases 0, others normal(0, initializer_range).

    dtype: of the weights (default: fp32). The result is deterministic for a config and a seed.
    """
    import torch
    from safetensors.torch import save_file

    dtype = dtype or torch.float32
    shape = shape_of(config)
    if "vision_config" in config:
        raise UserError(
            f"model.config: {shape.architecture} has a vision tower, which is copied from a folder and cannot be created; "
            f"name one in model.path, or use {shape.architecture.replace('ForConditionalGeneration', 'ForCausalLM')}"
        )
    folder = Path(path)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    generator = torch.Generator().manual_seed(seed)
    std = config.get("initializer_range")
    std = 0.02 if std is None else std
    if isinstance(std, bool) or not isinstance(std, int | float) or not 0 <= std < math.inf:
        raise UserError(f"model config: initializer_range must be a number, 0 or above, got {std!r}")
    partial.mkdir(parents=True)
    alias_sources = aliases(shape)
    tensors = {}
    for name, size in tensor_shapes(shape).items():
        if name not in alias_sources:
            tensors[name] = _random_tensor(name, size, shape, std, generator).to(dtype)
    # safetensors rejects tensors that share memory.
    tensors |= {name: tensors[alias_sources[name]].clone() for name in tensor_shapes(shape) if name in alias_sources}
    target, drafter = split_drafter(tensors)
    save_file(target, partial / "model.safetensors", metadata={"format": "pt"})
    if drafter:
        (partial / DRAFTER).mkdir()
        save_file(drafter, partial / DRAFTER / "model.safetensors", metadata={"format": "pt"})
    # These weights are not quantized, even if the config was copied from a folder with quantized weights.
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    write_config(config, partial)
    partial.rename(folder)
    return HfFolder(folder, config, shape)


def _random_tensor(name: str, size: tuple[int, ...], shape: ModelShape, std: float, generator: torch.Generator) -> torch.Tensor:
    import torch

    if len(size) > 1 and not name.endswith("bias"):
        return torch.randn(size, generator=generator) * std
    # Families with linear attention store norm weights minus 1, except those of the output norm of linear attention.
    is_offset_from_one = shape.delta is not None and name.endswith(".weight") and not name.endswith("linear_attn.norm.weight")
    return torch.zeros(size) if name.endswith("bias") or is_offset_from_one else torch.ones(size)


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".distcp")
"""Suffixes of weight files; `copy_files` does not copy them."""


def files_to_copy(folder: Path) -> Iterator[Path]:
    """Files that a conversion copies unchanged (tokenizer, chat template, code), relative to `folder`. Hidden files are skipped."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if (
            path.is_file()
            and not is_hidden
            and path.suffix not in WEIGHT_SUFFIXES
            and relative.name not in (*INDEX_FILES, LISTING, "config.json")
        ):
            yield relative


def copy_files(source: Path, target: Path) -> None:
    for name in files_to_copy(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def config_to_write(config: HfConfig, dtype: torch.dtype, *, mtp_layers: int) -> HfConfig:
    """Adapt a config to a folder with weights of `dtype` and `mtp_layers` MTP layers.

    If mtp_layers is 0, a drafter in a subfolder is also removed. max_position_embeddings is corrected for models whose published config is
    known to be wrong. quantization_config is removed, because the weights are dequantized.
    """
    new_config = {name: value for name, value in config.items() if name != "quantization_config"}
    section = _section_for_writing(new_config, "max_position_embeddings")
    if section.get("max_position_embeddings") is not None:
        section["max_position_embeddings"] = stated_positions(config)
    count_key = next((key for key in MTP_COUNTS if key in _section_for_writing(new_config, key)), None)
    if family_of(config).mtp_layers:
        count_key = count_key or MTP_COUNTS[0]  # without the field, the family's default would apply
    if count_key is not None and not config.get(DRAFTER):
        _section_for_writing(new_config, count_key)[count_key] = mtp_layers
    if mtp_layers and DRAFTER in new_config:
        new_config[DRAFTER] = dict(new_config[DRAFTER])
    else:
        new_config.pop(DRAFTER, None)
    for fields in (new_config, new_config[DRAFTER]) if DRAFTER in new_config else (new_config,):
        for key in [key for key in ("dtype", "torch_dtype") if key in fields] or ["torch_dtype"]:
            fields[key] = str(dtype).removeprefix("torch.")
    if "text_config" in new_config and "dtype" in new_config["text_config"]:
        new_config["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    return new_config


def _section_for_writing(config: HfConfig, key: str) -> HfConfig:
    """The section that contains `key`: the config itself, or a copy of its `text_config` that replaces it and may be modified."""
    if key not in config and key in (config.get("text_config") or {}):
        config["text_config"] = dict(config["text_config"])
        return config["text_config"]
    return config


def write_config(config: HfConfig, folder: Path) -> None:
    """Write config.json, and that of an EAGLE-3 or DFlash drafter to its subfolder."""
    config = dict(config)
    drafter = config.pop(DRAFTER, None)
    for target, fields in ((folder, config), (folder / DRAFTER, drafter)):
        if fields:
            target.mkdir(exist_ok=True)
            (target / "config.json").unlink(missing_ok=True)  # It may be a link into the folder of another model.
            (target / "config.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def split_drafter[T](tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Divide the tensors of a model into those of its folder and those of its drafter's subfolder, under their stored names."""
    prefix = f"{DRAFTER}."
    target = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    return target, {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise UserError if the target contains the source, is inside it, is a file, or already exists and `force` is false."""
    source_path, target_path = source.resolve(), target.resolve()
    if target_path.is_relative_to(source_path) or source_path.is_relative_to(target_path):
        raise UserError(f"{target}: contains {source}, or is inside it; name a DST outside of SRC")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder")
    if target.exists() and not force:
        raise UserError(f"{target}: exists; name another DST, or replace it with --force")
