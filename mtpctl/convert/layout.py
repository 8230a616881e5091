"""How a folder stores its tensors: names, order, types, and which of the model's tensors each is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.convert.tensor_files import SIZES
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, tensor_shapes

if TYPE_CHECKING:
    import torch


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
