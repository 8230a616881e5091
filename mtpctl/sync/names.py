"""From the Hugging Face names on the wire to the parameters of an engine's live model.

A live model packs tensors that travel apart (`q_proj`, `k_proj` and `v_proj` in `qkv_proj`, the experts of a layer in two tensors),
wraps a layer that has an adapter (`.base_layer`), and renames by rules of its own. `resolve` finds the `Slot` of a name among the
live names, once for each plan. A tensor has its wire name until it is copied, so no name can be mapped twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

Renamer = Callable[[str], str | None]

PACKED: dict[str, tuple[str, tuple[int, ...]]] = {
    "q_proj": ("qkv_proj", (0,)),
    "k_proj": ("qkv_proj", (1,)),
    "v_proj": ("qkv_proj", (2,)),
    "gate_proj": ("gate_up_proj", (0,)),
    "up_proj": ("gate_up_proj", (1,)),
    "in_proj_qkv": ("in_proj_qkvz", (0, 1, 2)),
    "in_proj_z": ("in_proj_qkvz", (3,)),
    "in_proj_b": ("in_proj_ba", (0,)),
    "in_proj_a": ("in_proj_ba", (1,)),
    "q_a_proj": ("fused_qkv_a_proj", (0,)),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", (1,)),
}
"""Layer name on the wire: the layer that packs it, and which of the packed parts it is."""

EXPERTS: dict[str, tuple[str, tuple[int, ...]]] = {"gate_proj": ("w13", (0,)), "up_proj": ("w13", (1,)), "down_proj": ("w2", (0,))}
"""Layer of one expert on the wire: the tensor that holds it for all experts, and which part of an expert's it is."""

_EXPERT = re.compile(r"^(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<proj>gate_proj|up_proj|down_proj)\.(?P<leaf>weight|bias)$")
_EXPERT_HOMES = ("", ".routed_experts", ".base_layer", ".base_layer.routed_experts")
_WRAPPED = "base_layer"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a wire tensor belongs: a live parameter, which of its packed parts (None: all of it), and which expert's."""

    parameter: str
    parts: tuple[int, ...] | None = None
    expert: int | None = None


def resolve(name: str, live: Collection[str], rename: Renamer | None = None) -> Slot | None:
    """The place of wire name `name` among `live` parameter names, or None where there is none.

    `rename` is the live model's own rule; it is tried first, since the same wire name may mean another layer without it.
    """
    for candidate in _candidates(name, rename):
        for spelled in _wrappings(candidate.parameter):
            if spelled in live:
                return Slot(spelled, candidate.parts, candidate.expert)
    return None


def _candidates(name: str, rename: Renamer | None) -> Iterator[Slot]:
    renamed = rename(name) if rename else None
    # A drafter is a model of its own, whose layers lie under `model.` where the folder says `mtp.`.
    own = f"model.{name.removeprefix('mtp.')}" if name.startswith("mtp.") else name
    for spelled in dict.fromkeys([renamed or name, name, own]):
        yield Slot(spelled)
        yield from _packings(spelled)
        yield from _experts(spelled)


def _packings(name: str) -> Iterator[Slot]:
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part in PACKED:
            owner, place = PACKED[part]
            yield Slot(".".join([*parts[:at], owner, *parts[at + 1 :]]), place)


def _experts(name: str) -> Iterator[Slot]:
    if found := _EXPERT.match(name):
        tensor, part = EXPERTS[found["proj"]]
        for home in _EXPERT_HOMES:
            yield Slot(f"{found['layer']}{home}.{tensor}_{found['leaf']}", part, int(found["expert"]))


def _wrappings(name: str) -> Iterator[str]:
    """The name, and the name with `.base_layer` before its last part taken out or put in."""
    yield name
    layer, _, leaf = name.rpartition(".")
    if layer.endswith(f".{_WRAPPED}"):
        yield f"{layer.removesuffix(f'.{_WRAPPED}')}.{leaf}"
    elif layer:
        yield f"{layer}.{_WRAPPED}.{leaf}"
