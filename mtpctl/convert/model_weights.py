"""A folder's weights under the names that `families.tensors` gives a model, whatever they are called in the folder.

In the wild a wrapper may put its own prefix before the language model's names, experts may be packed into one tensor per
layer, weights may be FP8 with a scale for each block, and a tied head or the MTP layers' copies of embedding and head may
be stored or not. The rest of this package sees none of that; `layout` keeps how the folder had it, for the way back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpctl import families
from mtpctl.convert.folder_weights import FolderWeights
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.layout import Stored
from mtpctl.convert.tensor_files import CODES
from mtpctl.families import FAMILIES, ModelShape
from mtpctl.recipe import UserError

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
"""What wrappers put before the names of a language model's decoder."""

SCALE = "_scale_inv"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPERT = re.compile(r"(?P<at>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Found:
    """Where the folder keeps a tensor: whole under `name`, or for an expert packed with others, these rows of its matrix."""

    name: str
    expert: int | None = None
    rows: slice = slice(None)


class ModelWeights(Mapping[str, Tensor]):
    """The tensors of the model, each a view of its file (a copy where it was FP8), without those that alias another.

    `folder` has the config completed by what the weights tell: MTP layers that it does not name, a head that is tied
    without its saying so. Raises UserError where config and weights contradict each other.
    """

    def __init__(self, path: Path) -> None:
        given = HfFolder.open(path, weights=False)
        self.raw = FolderWeights(path)
        self.folder = _completed(given, self.raw)
        self.shape = self.folder.shape
        _check_quantization(self.folder)
        self._prefix = _prefix_in(self.raw, self.shape)
        self._aliases = families.aliases(self.shape)
        self._sizes = {name: size for name, size in families.tensors(self.shape).items() if name not in self._aliases}
        self._places = {name: place for name in self._sizes if (place := self._find(name)) is not None}
        lacks = [name for name in self._sizes if name not in self._places]
        if lacks:
            more = f" and {len(lacks) - 4} more" if len(lacks) > 4 else ""
            raise UserError(f"{path}: the config asks for {', '.join(lacks[:4])}{more}, which the weights lack")
        self._check_sizes()
        self._check_rest()

    # ----------------------------------------------------------------------------------------------------- as a mapping

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = self.raw.tensor(place.name)
        if tensor.dtype in FP8:
            tensor = self._dequantized(place, tensor)
        elif place.expert is not None:
            tensor = tensor[place.expert]
        return tensor[place.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor as `__getitem__` gives it."""
        dtype = self.raw.entries[self._places[name].name].dtype
        return self.plain_dtype if dtype in FP8 else dtype

    @property
    def quantized(self) -> bool:
        """Whether some weights are FP8 in the folder."""
        return any(entry.dtype in FP8 for entry in self.raw.entries.values())

    @cached_property
    def plain_dtype(self) -> torch.dtype:
        """What FP8 weights are dequantised to: the dtype that the config names."""
        said = str(self.folder.config.get("dtype") or self.folder.config.get("torch_dtype") or "bfloat16")
        dtype = getattr(torch, said, None)
        return dtype if isinstance(dtype, torch.dtype) and dtype not in FP8 else torch.bfloat16

    # ----------------------------------------------------------------------------------------------------- what else is there

    @cached_property
    def layout(self) -> list[Stored]:
        """Every tensor that a folder like this one holds, in its order; FP8 weights as what they are dequantised to."""
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
            dtype = self.plain_dtype if entry.dtype in FP8 and name in pieces else entry.dtype
            found.append(Stored(name, CODES[dtype], entry.shape, tuple(pieces.get(name, ()))))
        return found

    @property
    def extras(self) -> list[str]:
        """Names in the folder of what the language model does not hold, such as a vision tower."""
        return [stored.name for stored in self.layout if not stored.pieces]

    def check_aliases(self) -> None:
        """Raise UserError where a tensor that should repeat another one does not. Reads both."""
        for alias, original in self._aliases.items():
            name = self._name_of(alias)
            if name in self.raw and not torch.equal(self.raw.tensor(name).view(torch.uint8), self[original].contiguous().view(torch.uint8)):
                raise UserError(
                    f"{self.folder.path}: {name} should repeat {self._places[original].name} and differs from it; "
                    + ("set tie_word_embeddings: false in config.json" if alias == "lm_head.weight" else "such a head cannot be converted")
                )

    # ----------------------------------------------------------------------------------------------------- finding

    def _name_of(self, name: str) -> str:
        """The folder's name for a tensor that it stores whole."""
        if name.startswith(self.shape.prefix):
            return self._prefix + name.removeprefix(self.shape.prefix)
        outer = f"language_model.{name}"
        return outer if name not in self.raw and outer in self.raw else name

    def _find(self, name: str) -> Found | None:
        plain = self._name_of(name)
        if plain in self.raw:
            return Found(plain)
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
        return Found(packed, int(expert["expert"]), rows)

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

    def _check_sizes(self) -> None:
        for name in self._sizes:
            place = self._places[name]
            held, wanted = self.raw.entries[place.name].shape, self._expected(name)
            if held != wanted:
                raise UserError(f"{self.folder.path}: config.json makes {place.name} {list(wanted)}, the weights hold {list(held)}")
            if self.raw.entries[place.name].dtype in FP8 and place.name + SCALE not in self.raw:
                raise UserError(f"{self.folder.path}: {place.name} is FP8 without the scales {place.name}{SCALE}")

    def _check_rest(self) -> None:
        """Raise UserError for tensors of the decoder that the config has no place for; others are carried along."""
        decoder = f"{self._prefix}layers."
        for name in self.extras:
            if name.startswith(decoder) and not name.endswith("rotary_emb.inv_freq"):
                layer = name.removeprefix(decoder).split(".")[0]
                if layer.isdigit() and int(layer) >= self.shape.layers:
                    said = f"config.json says num_hidden_layers {self.shape.layers}"
                    raise UserError(f"{self.folder.path}: {said}, the weights hold a layer {layer} ({name})")
                raise UserError(f"{self.folder.path}: the weights hold {name}, for which config.json has no place")

    def _dequantized(self, place: Found, weight: Tensor) -> Tensor:
        """FP8 times the scale of each block (DeepSeek-V3 report, arXiv 2412.19437, section 3.3), in the config's dtype."""
        scale = self.raw.tensor(place.name + SCALE)
        if place.expert is not None:
            weight, scale = weight[place.expert], scale[place.expert]
        if scale.numel() > 1:
            rows, columns = _block(self.folder.config)
            scale = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
        return (weight.float() * scale.float()).to(self.plain_dtype)


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _check_quantization(folder: HfFolder) -> None:
    method = (folder.config.get("quantization_config") or {}).get("quant_method", "fp8")
    if method != "fp8":
        raise UserError(f"{folder.path / 'config.json'}: quantization_config.quant_method {method!r} cannot be undone; only fp8 can")


def _completed(given: HfFolder, raw: FolderWeights) -> HfFolder:
    """The folder with what its weights tell and its config does not."""
    config = dict(given.config)
    family = next(family for family in FAMILIES if family.name == given.shape.family)
    if not given.shape.mtp_layers and family.mtp is not None:
        depth = 0
        names = family.mtp.layer + "input_layernorm.weight"
        while family.mtp.name(names, depth, given.shape.layers) in raw:
            depth += 1
        if depth:
            # Qwen3.5 has a word of its own for it.
            config[families.MTP_COUNTS[family.name.startswith("qwen3.5")]] = depth
    text = config.get("text_config") or {}
    said = "tie_word_embeddings" in config or "tie_word_embeddings" in text
    if not said and not given.shape.tied and not any(name.endswith("lm_head.weight") for name in raw.entries):
        config["tie_word_embeddings"] = True
    return given if config == given.config else HfFolder(given.path, config, families.shape_of(config))


def _prefix_in(raw: FolderWeights, shape: ModelShape) -> str:
    for prefix in (shape.prefix, *PREFIXES):
        if f"{prefix}embed_tokens.weight" in raw:
            return prefix
    return shape.prefix
