"""LoRA adapters on their way into an engine: gathered over buckets, handed over whole.

An adapter is taken in at once or not at all, so its tensors are copied out of the transport's buffers until the last one is
there, and written as PEFT writes them to a folder in memory, which the engine loads.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from mtpctl.plan import Bucket
from mtpctl.sync.checksums import Part, summed
from mtpctl.sync.manifest import SectionPlan
from mtpctl.sync.protocol import PlanMismatch
from mtpctl.sync.receiver import BucketsInOrder, pieces
from mtpctl.sync.store import SHARED_MEMORY


class AdapterReceiver(BucketsInOrder):
    """Takes in the buckets of section `adapter`. Raises PlanMismatch where the plan is no adapter."""

    def __init__(self, plan: SectionPlan) -> None:
        strange = [name for name in plan.tensors() if ".lora_A." not in name and ".lora_B." not in name]
        if strange or not plan.config.get("r"):
            raise PlanMismatch(f"this is no LoRA adapter: {', '.join(strange[:4]) or 'its config names no rank r'}")
        super().__init__(plan)
        self._tensors: dict[str, torch.Tensor] = {}

    def receive(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Copy a bucket's tensors out of `data`. Raises SyncError for a bucket out of order."""
        self.check_due(bucket)
        for entry, piece in pieces(bucket, data):
            whole = self._tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=piece.dtype))
            whole.view(-1)[entry.part_start : entry.part_stop].copy_(piece)
        self.taken += 1

    def sums(self) -> dict[str, list[Part]]:
        """Of every tensor, as `SectionReceiver.sums`."""
        return {name: [summed(t.reshape(1, -1), t.numel(), t.numel(), 0)] for name, t in self._tensors.items()}

    def write(self, folder: Path) -> None:
        """Write the adapter as PEFT does, whole or not at all."""
        root = folder.parent
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        save_file(self._tensors, draft / "adapter_model.safetensors")
        (draft / "adapter_config.json").write_text(json.dumps(self.plan.config))
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)


def adapter_root(name: str) -> Path:
    """Where an engine of this name keeps its adapters: in memory where there is some."""
    return (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"mtpctl-adapter-{name}"
