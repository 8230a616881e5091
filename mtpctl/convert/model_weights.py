"""A folder's weights under the names of `families.tensors`, independent of how the folder stores them.

Published folders differ. Names may have the prefix of a multimodal wrapper, experts may be packed into one tensor per layer, and weights
may be FP8 with a scale per block. Some folders store a tied head, or copies of embedding and head for the MTP layers. `ModelWeights` hides
these differences, and its `layout` records them for the conversion back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.convert.hf_folder import DECODER_PREFIXES, HfConfig, HfFolder
from mtpctl.convert.tensor_files import ELEMENT_BYTES, FolderWeights, code_of, dtype_of
from mtpctl.errors import UserError
from mtpctl.families.quantization import SCALE_SUFFIX
from mtpctl.families.reading import DRAFTER
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FP8 = ("F8_E4M3", "F8_E5M2")
"""Dtype codes of FP8 tensors, which have separate scales."""

_EXPERT_NAME = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a model's tensor in a folder: the stored tensor `name`, or `rows` of matrix `expert` in it if experts are packed."""

    name: str
    expert: int | None = None
    rows: slice = slice(None)


class ModelWeights(Mapping[str, "Tensor"]):
    """The tensors of the model by name, without aliases. A value is a view of the file, or a dequantized copy of an FP8 tensor.

    folder: the folder, with a config completed from the weights. mtp: if False, the MTP layers are neither included nor checked.
    Raises UserError if config and weights contradict each other.
    """

    def __init__(self, path: Path, *, mtp: bool = True) -> None:
        self.raw = FolderWeights(path)
        self.folder = HfFolder.open(path, weights=False).completed(self.raw)
        self.shape = self.folder.shape
        _check_quantization(self.folder)
        self._prefix = _find_prefix(self.raw, self.shape)
        self._aliases = aliases(self.shape)
        shapes = {name: size for name, size in tensor_shapes(self.shape).items() if name not in self._aliases}
        self._sizes = {name: size for name, size in shapes.items() if mtp or not self._is_draft(name)}
        locations = {name: location for name in shapes if (location := self._locate(name)) is not None}
        self._locations = {name: location for name, location in locations.items() if name in self._sizes}
        self._skipped_mtp = {location.name for name, location in locations.items() if name not in self._sizes}
        self._check_names()
        self._check_sizes()
        self._check_unexpected()

    def __getitem__(self, name: str) -> Tensor:
        location = self._locations[name]
        tensor = self.raw.tensor(location.name)
        if self.raw.entries[location.name].code in FP8:
            tensor = self._dequantize(location, tensor)
        elif location.expert is not None:
            tensor = tensor[location.expert]
        return tensor[location.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def size(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor that `__getitem__` returns."""
        return self._sizes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensor that `__getitem__` returns."""
        entry = self.raw.entries[self._locations[name].name]
        return self.plain_dtype if entry.code in FP8 else entry.dtype

    def quantized(self, name: str) -> tuple[Tensor, Tensor] | None:
        """The values and scales of a tensor that the folder stores in FP8; None if it is not FP8, or packed with other experts."""
        location = self._locations[name]
        if location.expert is not None or self.raw.entries[location.name].code not in FP8:
            return None
        return self.raw.tensor(location.name), self.raw.tensor(location.name + SCALE_SUFFIX)

    @cached_property
    def plain_dtype(self) -> torch.dtype:
        """The config's dtype, to which FP8 weights are dequantized."""
        import torch

        name = str(self.folder.config.get("dtype") or self.folder.config.get("torch_dtype") or "bfloat16")
        dtype = getattr(torch, name, None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.itemsize > 1 else torch.bfloat16

    @cached_property
    def layout(self) -> list[Stored]:
        """All tensors in the folder's order, without scales. FP8 weights have the dtype to which they are dequantized."""
        pieces: dict[str, list[str]] = {}
        for name in self._sizes:
            pieces.setdefault(self._locations[name].name, []).append(name)
        for alias, original in self._aliases.items():
            if (name := self._stored_name(alias)) in self.raw:
                pieces[name] = [original]
        layout = []
        for name, entry in self.raw.entries.items():
            if name in self._scales:
                continue
            code = code_of(self.plain_dtype) if entry.code in FP8 and name in pieces else entry.code
            layout.append(Stored(name, code, entry.shape, tuple(pieces.get(name, ()))))
        return layout

    @property
    def extras(self) -> list[str]:
        """Stored names of the tensors outside the language model, such as those of a vision tower."""
        return [stored.name for stored in self.layout if not stored.pieces]

    def check_extras(self) -> None:
        """Raise UserError if a tensor outside the language model is FP8: it would be copied without its scales."""
        for name in self.extras:
            if self.raw.entries[name].code in FP8:
                raise UserError(
                    f"{self.folder.path}: {name} is FP8 and not part of the language model; store it in the dtype of the config"
                )

    def check_aliases(self) -> None:
        """Raise UserError if a stored alias differs from its original. Reads both tensors."""
        import torch

        for alias, original in self._aliases.items():
            name = self._stored_name(alias)
            if name in self.raw and not torch.equal(self.raw.tensor(name).view(torch.uint8), self[original].contiguous().view(torch.uint8)):
                raise UserError(
                    f"{self.folder.path}: {name} must be equal to {self._locations[original].name}, but differs from it; "
                    "such a model cannot be converted"
                )

    def _stored_name(self, name: str) -> str:
        """The stored name of a tensor that is not packed."""
        if name.startswith(self.shape.prefix):
            return self._prefix + name.removeprefix(self.shape.prefix)
        outer = f"language_model.{name}"
        return outer if name not in self.raw and outer in self.raw else name

    def _locate(self, name: str) -> Location | None:
        stored_name = self._stored_name(name)
        if stored_name in self.raw:
            return Location(stored_name)
        expert = _EXPERT_NAME.fullmatch(stored_name)
        if expert is None:
            return None
        assert self.shape.moe is not None
        part, ffn = expert["part"], self.shape.moe.ffn
        packed = expert["prefix"] + ("down_proj" if part == "down" else "gate_up_proj")
        packed = packed if packed in self.raw else f"{packed}.weight"
        if packed not in self.raw:
            return None
        rows = {"gate": slice(0, ffn), "up": slice(ffn, 2 * ffn), "down": slice(None)}[part]
        return Location(packed, int(expert["expert"]), rows)

    @cached_property
    def _scales(self) -> set[str]:
        return {name for name in self.raw.entries if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self.raw}

    def _expected_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the config requires of the stored tensor of `name`."""
        size = self._sizes[name]
        if self._locations[name].expert is None:
            return size
        assert self.shape.moe is not None
        packed = size if name.endswith("down_proj.weight") else (2 * size[0], size[1])
        return (self.shape.moe.experts, *packed)

    def _is_draft(self, name: str) -> bool:
        return section_of(name, self.shape) == "draft"

    def _check_names(self) -> None:
        missing = [name for name in self._sizes if name not in self._locations]
        if not missing:
            return
        listing = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        if all(map(self._is_draft, missing)):
            fix = "add them, train with mtp.mode: off, or remove the layers from config.json"
            raise UserError(f"{self.folder.path}: config.json names MTP layers, but the weights lack {listing}; {fix}")
        raise UserError(f"{self.folder.path}: the config requires {listing}, which the weights lack")

    def _check_sizes(self) -> None:
        for name in self._sizes:
            location = self._locations[name]
            shape, expected = self.raw.entries[location.name].shape, self._expected_shape(name)
            if shape != expected:
                raise UserError(f"{self.folder.path}: config.json requires {location.name} as {list(expected)}, it is {list(shape)}")
            if self.raw.entries[location.name].code in FP8:
                self._check_scales(location)

    def _check_scales(self, location: Location) -> None:
        scale_name = location.name + SCALE_SUFFIX
        if scale_name not in self.raw:
            raise UserError(f"{self.folder.path}: {location.name} is FP8 without the scales {scale_name}; fetch the folder again")
        shape = self.raw.entries[scale_name].shape
        shape = shape if location.expert is None else shape[1:]
        weight_shape, block_size = self.raw.entries[location.name].shape[-2:], _scale_block_size(self.folder.config)
        expected = tuple(-(-size // block_width) for size, block_width in zip(weight_shape, block_size, strict=True))
        if prod(shape) != 1 and shape != expected:
            raise UserError(
                f"{self.folder.path}: {scale_name} is {list(shape)}, but blocks of {list(block_size)} in {list(weight_shape)} "
                f"require {list(expected)}"
            )

    def _check_unexpected(self) -> None:
        """Raise UserError for decoder tensors that the config does not include. Tensors outside the decoder are extras."""
        layer_prefix = f"{self._prefix}layers."
        known = {location.name for location in self._locations.values()} | self._skipped_mtp | self._scales
        known |= {self._stored_name(alias) for alias in self._aliases}
        if (mask_file := self.folder.path / DRAFTER / "mask_embedding.pt").exists():
            raise UserError(f"{mask_file}: separate mask embeddings are not supported; use a drafter of mtpctl add-drafter")
        for name in self.raw.entries:
            if name not in known and name.startswith(f"{DRAFTER}."):
                raise UserError(
                    f"{self.folder.path / DRAFTER}: {name.removeprefix(f'{DRAFTER}.')} is not supported: the drafter shares the model's "
                    "embedding, head and vocabulary; use a drafter of mtpctl add-drafter"
                )
            if name not in known and name.startswith(layer_prefix) and not name.endswith("rotary_emb.inv_freq"):
                layer = name.removeprefix(layer_prefix).split(".")[0]
                if layer.isdigit() and int(layer) >= self.shape.layers:
                    stated_count = f"config.json says num_hidden_layers {self.shape.layers}"
                    raise UserError(f"{self.folder.path}: {stated_count}, but the weights have a layer {layer} ({name})")
                raise UserError(f"{self.folder.path}: the weights have {name}, which config.json does not include")

    def _dequantize(self, location: Location, weight: Tensor) -> Tensor:
        """Multiply an FP8 weight by its block scales (DeepSeek-V3, arXiv 2412.19437, section 3.3). Returns `plain_dtype`."""
        from mtpctl.kernels.block_fp8 import dequantize

        scale = self.raw.tensor(location.name + SCALE_SUFFIX)
        if location.expert is not None:
            weight, scale = weight[location.expert], scale[location.expert]
        return dequantize(weight, scale, self.plain_dtype, _scale_block_size(self.folder.config))


def _scale_block_size(config: HfConfig) -> tuple[int, int]:
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _check_quantization(folder: HfFolder) -> None:
    method = (folder.config.get("quantization_config") or {}).get("quant_method", "fp8")
    if method != "fp8":
        raise UserError(f"{folder.path / 'config.json'}: quantization_config.quant_method {method!r} is not supported; only fp8 is")


def _find_prefix(raw: FolderWeights, shape: ModelShape) -> str:
    for prefix in (shape.prefix, *DECODER_PREFIXES):
        if f"{prefix}{shape.embedding}.weight" in raw:
            return prefix
    return shape.prefix


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a folder stores it.

    code: its dtype code. pieces: names of the model's tensors in it: several for packed experts, none for a tensor outside the language
    model, which is copied unchanged.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    pieces: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.code)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.code]


def plain_layout(shape: ModelShape, dtypes: Mapping[str, torch.dtype]) -> list[Stored]:
    """The layout of a folder without packed tensors, including the aliases that folders of the family store."""
    alias_sources = aliases(shape)
    tensors = ((name, alias_sources.get(name, name), size) for name, size in tensor_shapes(shape).items())
    return [Stored(name, code_of(dtypes[original]), size, (original,)) for name, original, size in tensors]


def with_dtypes(layout: list[Stored], dtypes: Mapping[str, torch.dtype]) -> list[Stored]:
    """Change the dtypes of the model's tensors in a layout. Other tensors are unchanged."""
    return [replace(stored, code=code_of(dtypes[stored.pieces[0]])) if stored.pieces else stored for stored in layout]


def save_layout(layout: list[Stored], file: Path) -> None:
    file.write_text(json.dumps([[stored.name, stored.code, stored.shape, stored.pieces] for stored in layout]))


def load_layout(file: Path) -> list[Stored]:
    return [Stored(name, code, tuple(shape), tuple(pieces)) for name, code, shape, pieces in json.loads(file.read_text())]
