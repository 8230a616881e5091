"""A folder's weights under the names that `families.tensors` gives a model, whatever they are called in the folder.

In published folders a wrapper may put its own prefix before the language model's names, experts may be packed into one tensor per layer,
weights may be FP8 with a scale for each block, and a tied head or the MTP layers' copies of embedding and head may be stored or not. The
rest of this package sees none of that. `layout` records how the folder stores its tensors, for the conversion back.
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
from mtpctl.convert.tensor_files import SIZES, FolderWeights
from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, section_of, tensor_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor
if TYPE_CHECKING:
    import torch

SCALE = "_scale_inv"
FP8 = ("F8_E4M3", "F8_E5M2")
"""safetensors' names of the types that need scales."""

_EXPERT = re.compile(r"(?P<at>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Location:
    """Where the folder stores a tensor: whole under `name`, or for an expert packed with others, these rows of its matrix."""

    name: str
    expert: int | None = None
    rows: slice = slice(None)


class ModelWeights(Mapping[str, "Tensor"]):
    """The tensors of the model, each a view of its file (a copy where it was FP8), without those that alias another.

    `folder` has the config completed from the weights. With `mtp=False` only the trunk's tensors are there, and the folder's MTP layers
    are not checked. Raises UserError where config and weights contradict each other.
    """

    def __init__(self, path: Path, *, mtp: bool = True) -> None:
        given = HfFolder.open(path, weights=False)
        self.raw = FolderWeights(path)
        self.folder = given.completed(self.raw)
        self.shape = self.folder.shape
        _check_quantization(self.folder)
        self._prefix = _prefix_in(self.raw, self.shape)
        self._aliases = aliases(self.shape)
        stored = {name: size for name, size in tensor_shapes(self.shape).items() if name not in self._aliases}
        self._sizes = {name: size for name, size in stored.items() if mtp or not self._drafts(name)}
        places = {name: place for name in stored if (place := self._find(name)) is not None}
        self._places = {name: place for name, place in places.items() if name in self._sizes}
        self._unread = {place.name for name, place in places.items() if name not in self._sizes}
        self._check_names()
        self._check_sizes()
        self._check_rest()

    # ----------------------------------------------------------------------------------------------------- as a mapping

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = self.raw.tensor(place.name)
        if self.raw.entries[place.name].code in FP8:
            tensor = self._dequantized(place, tensor)
        elif place.expert is not None:
            tensor = tensor[place.expert]
        return tensor[place.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def size(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor that `__getitem__` returns."""
        return self._sizes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor that `__getitem__` returns."""
        entry = self.raw.entries[self._places[name].name]
        return self.plain_dtype if entry.code in FP8 else entry.dtype

    @cached_property
    def plain_dtype(self) -> torch.dtype:
        """The config's dtype, to which FP8 weights are dequantised."""
        import torch

        said = str(self.folder.config.get("dtype") or self.folder.config.get("torch_dtype") or "bfloat16")
        dtype = getattr(torch, said, None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.itemsize > 1 else torch.bfloat16

    # ----------------------------------------------------------------------------------------------------- what else is there

    @cached_property
    def layout(self) -> list[Stored]:
        """Every tensor of the folder in its order, FP8 weights in the dtype that they are dequantised to."""
        from mtpctl.convert.dtypes import CODES

        pieces: dict[str, list[str]] = {}
        for name in self._sizes:
            pieces.setdefault(self._places[name].name, []).append(name)
        for alias, original in self._aliases.items():
            if (name := self._name_of(alias)) in self.raw:
                pieces[name] = [original]
        found = []
        for name, entry in self.raw.entries.items():
            if name in self._scales:
                continue
            code = CODES[self.plain_dtype] if entry.code in FP8 and name in pieces else entry.code
            found.append(Stored(name, code, entry.shape, tuple(pieces.get(name, ()))))
        return found

    @property
    def extras(self) -> list[str]:
        """Names in the folder of what the language model does not hold, such as a vision tower."""
        return [stored.name for stored in self.layout if not stored.pieces]

    def check_extras(self) -> None:
        """Raise UserError for FP8 tensors outside the language model: they would be copied without their scales."""
        for name in self.extras:
            if self.raw.entries[name].code in FP8:
                raise UserError(f"{self.folder.path}: {name} is FP8 and no part of the language model; store it in the dtype of the config")

    def check_aliases(self) -> None:
        """Raise UserError where a tensor that should repeat another one does not. Reads both."""
        import torch

        for alias, original in self._aliases.items():
            name = self._name_of(alias)
            if name in self.raw and not torch.equal(self.raw.tensor(name).view(torch.uint8), self[original].contiguous().view(torch.uint8)):
                raise UserError(
                    f"{self.folder.path}: {name} should repeat {self._places[original].name} and differs from it; "
                    "such a head cannot be converted"
                )

    # ----------------------------------------------------------------------------------------------------- finding

    def _name_of(self, name: str) -> str:
        """The folder's name for a tensor that it stores whole."""
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
        packed = expert["at"] + ("down_proj" if part == "down" else "gate_up_proj")
        packed = packed if packed in self.raw else f"{packed}.weight"
        if packed not in self.raw:
            return None
        rows = {"gate": slice(0, width), "up": slice(width, 2 * width), "down": slice(None)}[part]
        return Location(packed, int(expert["expert"]), rows)

    @cached_property
    def _scales(self) -> set[str]:
        return {name for name in self.raw.entries if name.endswith(SCALE) and name.removesuffix(SCALE) in self.raw}

    def _expected(self, name: str) -> tuple[int, ...]:
        """The shape that the folder's tensor behind `name` must have."""
        size, place = self._sizes[name], self._places[name]
        if place.expert is None:
            return size
        assert self.shape.moe is not None
        packed = size if name.endswith("down_proj.weight") else (2 * size[0], size[1])
        return (self.shape.moe.experts, *packed)

    def _drafts(self, name: str) -> bool:
        return section_of(name, self.shape) == "draft"

    def _check_names(self) -> None:
        lacks = [name for name in self._sizes if name not in self._places]
        if not lacks:
            return
        listed = ", ".join(lacks[:4]) + (f" and {len(lacks) - 4} more" if len(lacks) > 4 else "")
        if all(map(self._drafts, lacks)):
            mend = "add them, train with mtp.mode: off, or take the layers out of config.json"
            raise UserError(f"{self.folder.path}: config.json names MTP layers, and the weights lack {listed}; {mend}")
        raise UserError(f"{self.folder.path}: the config asks for {listed}, which the weights lack")

    def _check_sizes(self) -> None:
        for name in self._sizes:
            place = self._places[name]
            held, wanted = self.raw.entries[place.name].shape, self._expected(name)
            if held != wanted:
                raise UserError(f"{self.folder.path}: config.json makes {place.name} {list(wanted)}, the weights hold {list(held)}")
            if self.raw.entries[place.name].code in FP8:
                self._check_scales(place)

    def _check_scales(self, place: Location) -> None:
        scales = place.name + SCALE
        if scales not in self.raw:
            raise UserError(f"{self.folder.path}: {place.name} is FP8 without the scales {scales}; fetch the folder again")
        held = self.raw.entries[scales].shape[place.expert is not None :]
        sizes, block = self.raw.entries[place.name].shape[-2:], _block(self.folder.config)
        wanted = tuple(-(-size // width) for size, width in zip(sizes, block, strict=True))
        if prod(held) != 1 and held != wanted:
            raise UserError(
                f"{self.folder.path}: {scales} holds {list(held)}, blocks of {list(block)} in {list(sizes)} make {list(wanted)}"
            )

    def _check_rest(self) -> None:
        """Raise UserError for tensors of the decoder that the config has no place for; others are carried along."""
        decoder = f"{self._prefix}layers."
        known = {place.name for place in self._places.values()} | self._unread | self._scales
        known |= {self._name_of(alias) for alias in self._aliases}
        for name in self.raw.entries:
            if name not in known and name.startswith(decoder) and not name.endswith("rotary_emb.inv_freq"):
                layer = name.removeprefix(decoder).split(".")[0]
                if layer.isdigit() and int(layer) >= self.shape.layers:
                    said = f"config.json says num_hidden_layers {self.shape.layers}"
                    raise UserError(f"{self.folder.path}: {said}, the weights hold a layer {layer} ({name})")
                raise UserError(f"{self.folder.path}: the weights hold {name}, for which config.json has no place")

    def _dequantized(self, place: Location, weight: Tensor) -> Tensor:
        """FP8 times the scale of each block (DeepSeek-V3 report, arXiv 2412.19437, section 3.3), in the config's dtype."""
        import torch

        scale = self.raw.tensor(place.name + SCALE)
        if place.expert is not None:
            weight, scale = weight[place.expert], scale[place.expert]
        if scale.numel() == 1:
            return (weight.float() * scale.float()).to(self.plain_dtype)
        rows, columns = _block(self.folder.config)
        wide = scale.float().repeat_interleave(columns, 1)[:, : weight.shape[1]]
        made = torch.empty(weight.shape, dtype=self.plain_dtype)
        # A row of blocks at a time: the whole in fp32 would take four times the weight, twice.
        for to, part, by in zip(made.split(rows), weight.split(rows), wide, strict=True):
            to.copy_(part.float() * by)
        return made


def _block(config: HfConfig) -> tuple[int, int]:
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _check_quantization(folder: HfFolder) -> None:
    method = (folder.config.get("quantization_config") or {}).get("quant_method", "fp8")
    if method != "fp8":
        raise UserError(f"{folder.path / 'config.json'}: quantization_config.quant_method {method!r} cannot be undone; only fp8 can")


def _prefix_in(raw: FolderWeights, shape: ModelShape) -> str:
    for prefix in (shape.prefix, *PREFIXES):
        if f"{prefix}embed_tokens.weight" in raw:
            return prefix
    return shape.prefix


# How a folder stores its tensors: names, order, types, and which of the model's tensors each is made of.


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a folder.

    code: safetensors' name of its type. pieces: the model's tensors in it, one after another: several where experts are packed, none where
    it is no part of the language model and is copied as it is.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    pieces: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        from mtpctl.convert.dtypes import DTYPES

        return DTYPES[self.code]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.code]


def plain_layout(shape: ModelShape, dtypes: Mapping[str, torch.dtype]) -> list[Stored]:
    """A folder that keeps every tensor whole, aliases included where the family's folders have them."""
    from mtpctl.convert.dtypes import CODES

    same = aliases(shape)
    return [Stored(name, CODES[dtypes[same.get(name, name)]], size, (same.get(name, name),)) for name, size in tensor_shapes(shape).items()]


def recast(layout: list[Stored], dtypes: Mapping[str, torch.dtype]) -> list[Stored]:
    """The layout with each of the model's tensors in the given type; what is carried along stays as it is."""
    from mtpctl.convert.dtypes import CODES

    return [replace(stored, code=CODES[dtypes[stored.pieces[0]]]) if stored.pieces else stored for stored in layout]


def save_layout(layout: list[Stored], file: Path) -> None:
    file.write_text(json.dumps([[s.name, s.code, s.shape, s.pieces] for s in layout]))


def load_layout(file: Path) -> list[Stored]:
    return [Stored(name, code, tuple(shape), tuple(pieces)) for name, code, shape, pieces in json.loads(file.read_text())]
