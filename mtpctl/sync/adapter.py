"""A LoRA adapter on its way into an engine: collected over the buckets, loaded whole.

An engine loads an adapter at once or not at all. So its tensors are copied out of the transport's buffers until the last one is there,
and then written to a folder in memory as PEFT writes them, which the engine loads.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import PREFIX, SHARED_MEMORY
from mtpctl.plan.buckets import ADAPTER_PREFIX, Bucket
from mtpctl.sync.checksums import Part, summed
from mtpctl.sync.parameters import Misfit, Ranks, Renamer, find_place, resolve
from mtpctl.sync.protocol import PlanMismatch, SectionPlan
from mtpctl.sync.receiver import BucketReceiver, pieces

_MATRIX = re.compile(rf"^{re.escape(ADAPTER_PREFIX)}(?P<layer>.+)\.lora_(?P<which>[AB])\.weight$")


@dataclass(frozen=True, slots=True)
class Layer:
    """Wire names of A `[rank, columns]` and B `[rows, rank]` of one layer, and the shape of the weight that they change."""

    a: str
    b: str
    shape: tuple[int, int]


def rank_of(plan: SectionPlan) -> int:
    """The rank that an adapter's config names, 0 where it names none."""
    rank = plan.config.get("r")
    return rank if isinstance(rank, int) else 0


def layers_of(plan: SectionPlan) -> dict[str, Layer]:
    """The layers of an adapter by the Hugging Face names of their weights.

    Raises PlanMismatch with every reason why the plan is not a LoRA adapter of the rank that its config names.
    """
    rank = rank_of(plan)
    pairs: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    wrong: list[str] = []
    for name, entry in plan.tensors().items():
        if found := _MATRIX.match(name):
            pairs.setdefault(found["layer"], {})[found["which"]] = (name, entry.shape)
        else:
            wrong.append(name)
    layers = {}
    for layer, pair in pairs.items():
        if len(pair) < 2:
            wrong.append(f"{layer} has lora_{'A' if 'A' in pair else 'B'} alone")
            continue
        (a, down), (b, up) = pair["A"], pair["B"]
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or (rank and down[0] != rank):
            wrong.append(f"{layer} has A {down} and B {up}, which are not of rank {rank}")
            continue
        layers[f"{layer}.weight"] = Layer(a, b, (up[0], down[1]))
    if not rank:
        wrong.append("its config names no rank r")
    if wrong:
        raise PlanMismatch(f"this is no LoRA adapter: {'; '.join(wrong[:8])}")
    return layers


def check_fits(plan: SectionPlan, model: nn.Module, *, rename: Renamer | None, ranks: Ranks, room: int | None) -> None:
    """Compare an adapter with a live model that keeps `room` for adapters, a rank (None: it takes none).

    Raises PlanMismatch with every layer that the model does not have, takes no adapter for, or has in another shape.
    """
    if room is None:
        raise PlanMismatch("this engine was started without room for adapters (enable_lora, max_lora_rank)")
    rank = rank_of(plan)
    if rank > room:
        raise PlanMismatch(f"the adapter has rank {rank}, this engine was started with max_lora_rank {room}")
    live = dict(model.named_parameters(remove_duplicate=False))
    wrong = []
    for name, layer in layers_of(plan).items():
        slot = resolve(name, live, rename)
        if slot is None:
            wrong.append(f"{name} resolves to nothing")
        elif ".base_layer." not in slot.parameter:
            wrong.append(f"{name} lies in {slot.parameter}, which takes no adapter")
        else:
            try:
                find_place(model, live[slot.parameter], slot, layer.shape, ranks)
            except Misfit as error:
                wrong.append(f"the adapter of {name} {error}")
    if wrong:
        raise PlanMismatch("the adapter does not fit the live model: " + "; ".join(wrong[:8]))


class AdapterReceiver(BucketReceiver):
    """Receives section `adapter`, and keeps its tensors on `device`. Raises PlanMismatch where the plan is no adapter."""

    def __init__(self, plan: SectionPlan, device: torch.device | str = "cpu") -> None:
        self.layers = layers_of(plan)
        super().__init__(plan)
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}

    def _use(self, bucket: Bucket, data: torch.Tensor) -> None:
        for entry, piece in pieces(bucket, data):
            whole = self.tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=piece.dtype, device=self.device))
            whole.view(-1)[entry.part_start : entry.part_stop].copy_(piece)

    def sums(self) -> dict[str, list[Part]]:
        return {name: [summed(t.reshape(1, -1), t.numel(), t.numel(), 0)] for name, t in self.tensors.items()}

    def write(self, folder: Path) -> None:
        """Write the adapter as PEFT does, whole or not at all."""
        root = folder.parent
        root.mkdir(parents=True, exist_ok=True)
        leftovers.mark(root)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        save_file(self.tensors, draft / "adapter_model.safetensors")
        (draft / "adapter_config.json").write_text(json.dumps(self.plan.config))
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)


def adapter_root(store: str, name: str) -> Path:
    """Where an engine of this name keeps its adapters: beside the versions in `store`; without a store in shared memory if there is any."""
    if store:
        return Path(store) / "adapters" / name
    return (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"{PREFIX}adapter-{name}"
