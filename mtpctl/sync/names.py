"""From the Hugging Face names on the wire to what a live engine model holds.

A live model packs what travels apart (`q_proj`, `k_proj`, `v_proj` lie in `qkv_proj`), wraps a layer that has an adapter
(`.base_layer`), and renames by rules of its own. The way here is from a name and the live names to a `Slot`, once for each
update: what is taken in carries its wire name until it is copied, so no name can be mapped twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

Renamer = Callable[[str], str | None]

PACKED: dict[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "in_proj_qkv": ("in_proj_qkvz", 0),
    "in_proj_z": ("in_proj_qkvz", 1),
    "in_proj_b": ("in_proj_ba", 0),
    "in_proj_a": ("in_proj_ba", 1),
}
"""Layer name on the wire: the layer that packs it, and its place in there."""

_WRAPPED = "base_layer"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a wire tensor belongs: a live parameter, and which of its packed parts (None: all of it)."""

    parameter: str
    part: int | None = None


def resolve(name: str, live: Collection[str], rename: Renamer | None = None) -> Slot | None:
    """The place of wire name `name` among `live` parameter names, or None where there is none.

    `rename` is the live model's own rule; it is tried first, since the same wire name may mean another layer without it.
    """
    for candidate in _candidates(name, rename):
        for spelled in _wrappings(candidate.parameter):
            if spelled in live:
                return Slot(spelled, candidate.part)
    return None


def _candidates(name: str, rename: Renamer | None) -> Iterator[Slot]:
    renamed = rename(name) if rename else None
    for spelled in dict.fromkeys([renamed or name, name]):
        yield Slot(spelled)
        yield from _packings(spelled)


def _packings(name: str) -> Iterator[Slot]:
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part in PACKED:
            owner, place = PACKED[part]
            yield Slot(".".join([*parts[:at], owner, *parts[at + 1 :]]), place)


def _wrappings(name: str) -> Iterator[str]:
    """The name, and the name with `.base_layer` before its last part taken out or put in."""
    yield name
    layer, _, leaf = name.rpartition(".")
    if layer.endswith(f".{_WRAPPED}"):
        yield f"{layer.removesuffix(f'.{_WRAPPED}')}.{leaf}"
    elif layer:
        yield f"{layer}.{_WRAPPED}.{leaf}"
