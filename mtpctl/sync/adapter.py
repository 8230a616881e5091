"""Transfer of a LoRA adapter into an engine.

An engine loads an adapter as a whole. Its tensors are therefore collected from the buckets and then written in PEFT's format to a folder
in shared memory, from which the engine loads it.
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
from mtpctl.sync.delta import apply
from mtpctl.sync.parameters import Renamer, ShapeMismatch, TpRank, find_shard, resolve
from mtpctl.sync.protocol import PlanMismatch, SectionPlan, VersionConflict
from mtpctl.sync.receiver import BucketReceiver, pieces

_MATRIX = re.compile(rf"^{re.escape(ADAPTER_PREFIX)}(?P<layer>.+)\.lora_(?P<which>[AB])\.weight$")


@dataclass(frozen=True, slots=True)
class Layer:
    """Wire names of A `[rank, columns]` and B `[rows, rank]` of one layer, and the shape of the adapted weight."""

    a: str
    b: str
    shape: tuple[int, int]


def rank_of(plan: SectionPlan) -> int:
    """The rank in an adapter's config, 0 if there is none."""
    rank = plan.config.get("r")
    return rank if isinstance(rank, int) else 0


def layers_of(plan: SectionPlan) -> dict[str, Layer]:
    """The layers of an adapter by the Hugging Face names of their weights.

    Raises PlanMismatch with the reasons if the plan is not a LoRA adapter of its config's rank.
    """
    rank = rank_of(plan)
    pairs: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    errors: list[str] = []
    for name, entry in plan.tensors().items():
        if matched := _MATRIX.match(name):
            pairs.setdefault(matched["layer"], {})[matched["which"]] = (name, entry.shape)
        else:
            errors.append(name)
    layers = {}
    for layer, pair in pairs.items():
        if len(pair) < 2:
            errors.append(f"{layer} has lora_{'A' if 'A' in pair else 'B'} alone")
            continue
        (a, down), (b, up) = pair["A"], pair["B"]
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or (rank and down[0] != rank):
            errors.append(f"{layer} has A {down} and B {up}, which are not of rank {rank}")
            continue
        layers[f"{layer}.weight"] = Layer(a, b, (up[0], down[1]))
    if not rank:
        errors.append("its config names no rank r")
    if errors:
        raise PlanMismatch(f"this is no LoRA adapter: {'; '.join(errors[:8])}")
    return layers


def check_fits(plan: SectionPlan, model: nn.Module, *, rename: Renamer | None, tp: TpRank, max_rank: int | None) -> None:
    """Check an adapter against a live model with adapters of up to rank `max_rank` (None: no adapters).

    Raises PlanMismatch that lists the layers that are missing in the model, take no adapter, or have another shape.
    """
    if max_rank is None:
        raise PlanMismatch("this engine was started without room for adapters (enable_lora, max_lora_rank)")
    rank = rank_of(plan)
    if rank > max_rank:
        raise PlanMismatch(f"the adapter has rank {rank}, this engine was started with max_lora_rank {max_rank}")
    live = dict(model.named_parameters(remove_duplicate=False))
    errors = []
    for name, layer in layers_of(plan).items():
        slot = resolve(name, live, rename)
        if slot is None:
            errors.append(f"{name} resolves to nothing")
        elif ".base_layer." not in slot.parameter:
            errors.append(f"{name} lies in {slot.parameter}, which takes no adapter")
        else:
            try:
                find_shard(model, live[slot.parameter], slot, layer.shape, tp)
            except ShapeMismatch as error:
                errors.append(f"the adapter of {name} {error}")
    if errors:
        raise PlanMismatch("the adapter does not fit the live model: " + "; ".join(errors[:8]))


class AdapterReceiver(BucketReceiver):
    """Receives section `adapter`, and stores its tensors on `device`. A delta changes a copy of the `previous` adapter's tensors.

    Raises PlanMismatch if the plan is not an adapter, and VersionConflict if a delta has no previous adapter.
    """

    def __init__(self, plan: SectionPlan, device: torch.device | str = "cpu", *, previous: AdapterReceiver | None = None) -> None:
        self.layers = layers_of(plan)
        super().__init__(plan)
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        if plan.delta is not None:
            if previous is None:
                raise VersionConflict("the changes of an adapter arrived before the adapter")
            self.tensors = {name: tensor.clone() for name, tensor in previous.tensors.items()}

    def _use(self, bucket: Bucket, data: torch.Tensor) -> None:
        if self.plan.delta is not None:
            for name, blob in self.blobs.read(bucket, data):
                apply(self.plan.delta.changes[name], blob, self.tensors[name])
            return
        for entry, piece in pieces(bucket, data):
            whole = self.tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=piece.dtype, device=self.device))
            whole.view(-1)[entry.part_start : entry.part_stop].copy_(piece)

    def sums(self) -> dict[str, list[Part]]:
        return {name: [summed(t.reshape(1, -1), t.numel(), t.numel(), 0)] for name, t in self.tensors.items()}

    def write(self, folder: Path) -> None:
        """Write the adapter in PEFT's format, atomically."""
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
    """The folder for the adapters of an engine: in `store`, or without a store in shared memory or the temporary folder."""
    if store:
        return Path(store) / "adapters" / name
    return (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"{PREFIX}adapter-{name}"
