"""A folder's weights under the names of `families.tensors`, independent of how the folder stores them.

Published folders differ: a wrapper may prefix the names of the language model, experts may be packed into one tensor per layer, weights
may be FP8 with a scale per block, and a tied head or the MTP layers' copies of embedding and head may or may not be stored. `ModelWeights`
hides these differences, and its `layout` records them for the conversion back.
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

from mtpctl.convert.hf_folder import PREFIXES, HfConfig, HfFolder
from mtpctl.convert.tensor_files import SIZES, FolderWeights, code_of, dtype_of
from mtpctl.errors import UserError
from mtpctl.families.quantization import SCALE
from mtpctl.families.reading import DRAFTER
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FP8 = ("F8_E4M3", "F8_E5M2")
"""The dtype codes of tensors with scales."""

_EXPERT = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a model's tensor in a folder: all of tensor `name`, or for a packed expert, `rows` of its matrix `expert`."""

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
        stored = {name: size for name, size in tensor_shapes(self.shape).items() if name not in self._aliases}
        self._sizes = {name: size for name, size in stored.items() if mtp or not self._drafts(name)}
        locations = {name: location for name in stored if (location := self._find(name)) is not None}
        self._locations = {name: location for name, location in locations.items() if name in self._sizes}
        self._skipped = {location.name for name, location in locations.items() if name not in self._sizes}
        self._check_names()
        self._check_sizes()
        self._check_unexpected()

    def __getitem__(self, name: str) -> Tensor:
        location = self._locations[name]
        tensor = self.raw.tensor(location.name)
        if self.raw.entries[location.name].code in FP8:
            tensor = self._dequantized(location, tensor)
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
        """The values and scales of a tensor that the folder stores by itself in FP8; None if it does not."""
        location = self._locations[name]
        if location.expert is not None or self.raw.entries[location.name].code not in FP8:
            return None
        return self.raw.tensor(location.name), self.raw.tensor(location.name + SCALE)

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
            if (name := self._name_of(alias)) in self.raw:
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
            name = self._name_of(alias)
            if name in self.raw and not torch.equal(self.raw.tensor(name).view(torch.uint8), self[original].contiguous().view(torch.uint8)):
                raise UserError(
                    f"{self.folder.path}: {name} should repeat {self._locations[original].name} and differs from it; "
                    "such a head cannot be converted"
                )

    def _name_of(self, name: str) -> str:
        """The stored name of a tensor that is not packed."""
        if name.startswith(self.shape.prefix):
            return self._prefix + name.removeprefix(self.shape.prefix)
        outer = f"language_model.{name}"
        return outer if name not in self.raw and outer in self.raw else name

    def _find(self, name: str) -> Location | None:
        plain = self._name_of(name)
        if plain in self.raw:
            return Location(plain)
        expert = _EXPERT.fullmatch(plain)
        if expert is None:
            return None
        assert self.shape.moe is not None
        part, width = expert["part"], self.shape.moe.ffn
        packed = expert["prefix"] + ("down_proj" if part == "down" else "gate_up_proj")
        packed = packed if packed in self.raw else f"{packed}.weight"
        if packed not in self.raw:
            return None
        rows = {"gate": slice(0, width), "up": slice(width, 2 * width), "down": slice(None)}[part]
        return Location(packed, int(expert["expert"]), rows)

    @cached_property
    def _scales(self) -> set[str]:
        return {name for name in self.raw.entries if name.endswith(SCALE) and name.removesuffix(SCALE) in self.raw}

    def _expected(self, name: str) -> tuple[int, ...]:
        """The shape that the config requires of the stored tensor of `name`."""
        size = self._sizes[name]
        if self._locations[name].expert is None:
            return size
        assert self.shape.moe is not None
        packed = size if name.endswith("down_proj.weight") else (2 * size[0], size[1])
        return (self.shape.moe.experts, *packed)

    def _drafts(self, name: str) -> bool:
        return section_of(name, self.shape) == "draft"

    def _check_names(self) -> None:
        missing = [name for name in self._sizes if name not in self._locations]
        if not missing:
            return
        listed = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        if all(map(self._drafts, missing)):
            fix = "add them, train with mtp.mode: off, or remove the layers from config.json"
            raise UserError(f"{self.folder.path}: config.json names MTP layers, and the weights lack {listed}; {fix}")
        raise UserError(f"{self.folder.path}: the config requires {listed}, which the weights lack")

    def _check_sizes(self) -> None:
        for name in self._sizes:
            location = self._locations[name]
            shape, expected = self.raw.entries[location.name].shape, self._expected(name)
            if shape != expected:
                raise UserError(f"{self.folder.path}: config.json makes {location.name} {list(expected)}, the weights hold {list(shape)}")
            if self.raw.entries[location.name].code in FP8:
                self._check_scales(location)

    def _check_scales(self, location: Location) -> None:
        scales = location.name + SCALE
        if scales not in self.raw:
            raise UserError(f"{self.folder.path}: {location.name} is FP8 without the scales {scales}; fetch the folder again")
        shape = self.raw.entries[scales].shape[location.expert is not None :]
        sizes, block = self.raw.entries[location.name].shape[-2:], _block(self.folder.config)
        expected = tuple(-(-size // width) for size, width in zip(sizes, block, strict=True))
        if prod(shape) != 1 and shape != expected:
            raise UserError(
                f"{self.folder.path}: {scales} holds {list(shape)}, blocks of {list(block)} in {list(sizes)} make {list(expected)}"
            )

    def _check_unexpected(self) -> None:
        """Raise UserError for decoder tensors that the config does not include. Tensors outside the decoder are extras."""
        decoder = f"{self._prefix}layers."
        known = {location.name for location in self._locations.values()} | self._skipped | self._scales
        known |= {self._name_of(alias) for alias in self._aliases}
        if (mask := self.folder.path / DRAFTER / "mask_embedding.pt").exists():
            raise UserError(f"{mask}: separate mask embeddings are not supported; use a drafter of mtpctl add-drafter")
        for name in self.raw.entries:
            if name not in known and name.startswith(f"{DRAFTER}."):
                raise UserError(
                    f"{self.folder.path / DRAFTER}: {name.removeprefix(f'{DRAFTER}.')} is not supported: the drafter shares the model's "
                    "embedding, head and vocabulary; use a drafter of mtpctl add-drafter"
                )
            if name not in known and name.startswith(decoder) and not name.endswith("rotary_emb.inv_freq"):
                layer = name.removeprefix(decoder).split(".")[0]
                if layer.isdigit() and int(layer) >= self.shape.layers:
                    count = f"config.json says num_hidden_layers {self.shape.layers}"
                    raise UserError(f"{self.folder.path}: {count}, the weights hold a layer {layer} ({name})")
                raise UserError(f"{self.folder.path}: the weights have {name}, which config.json does not include")

    def _dequantized(self, location: Location, weight: Tensor) -> Tensor:
        """Multiply an FP8 weight by its block scales (DeepSeek-V3, arXiv 2412.19437, section 3.3). Returns `plain_dtype`."""
        from mtpctl.kernels.block_fp8 import dequantize

        scale = self.raw.tensor(location.name + SCALE)
        if location.expert is not None:
            weight, scale = weight[location.expert], scale[location.expert]
        return dequantize(weight, scale, self.plain_dtype, _block(self.folder.config))


def _block(config: HfConfig) -> tuple[int, int]:
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _check_quantization(folder: HfFolder) -> None:
    method = (folder.config.get("quantization_config") or {}).get("quant_method", "fp8")
    if method != "fp8":
        raise UserError(f"{folder.path / 'config.json'}: quantization_config.quant_method {method!r} cannot be undone; only fp8 can")


def _find_prefix(raw: FolderWeights, shape: ModelShape) -> str:
    for prefix in (shape.prefix, *PREFIXES):
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
        return prod(self.shape) * SIZES[self.code]


def plain_layout(shape: ModelShape, dtypes: Mapping[str, torch.dtype]) -> list[Stored]:
    """The layout of a folder without packed tensors, including the aliases that folders of the family store."""
    originals = aliases(shape)
    stored = ((name, originals.get(name, name), size) for name, size in tensor_shapes(shape).items())
    return [Stored(name, code_of(dtypes[original]), size, (original,)) for name, original, size in stored]


def with_dtypes(layout: list[Stored], dtypes: Mapping[str, torch.dtype]) -> list[Stored]:
    """Change the dtypes of the model's tensors in a layout. Other tensors are unchanged."""
    return [replace(stored, code=code_of(dtypes[stored.pieces[0]])) if stored.pieces else stored for stored in layout]


def save_layout(layout: list[Stored], file: Path) -> None:
    file.write_text(json.dumps([[s.name, s.code, s.shape, s.pieces] for s in layout]))


def load_layout(file: Path) -> list[Stored]:
    return [Stored(name, code, tuple(shape), tuple(pieces)) for name, code, shape, pieces in json.loads(file.read_text())]
