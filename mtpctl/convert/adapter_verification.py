"""Compares a converted adapter with its checkpoint: every tensor, and the logits of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mtpctl.checkpoint.sharded import AdapterRecord
from mtpctl.convert.adapter_checkpoints import MergedReader, adapted, fill_adapter
from mtpctl.convert.adapters import export_adapter
from mtpctl.convert.folder_weights import FolderWeights
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.skeleton import Skeleton
from mtpctl.convert.verification import BOUND, Verified, compare, compare_extras, compare_logits, prompt_logits
from mtpctl.errors import ThresholdMissed
from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.recipe.train import LoraConfig

APPLIED_BOUND = 1e-4
"""Maximum difference of logits, in fp32, between a merged adapter and one that is applied separately."""


def verify_merged(
    written: ModelWeights, checkpoint: Path, base: ModelWeights, adapter: AdapterRecord, *, carried: FolderWeights | None = None
) -> Verified:
    """Compare a folder with merged weights with the base weights and the adapter. Raises ThresholdMissed that names the difference."""
    tensors = compare_extras(written, carried)
    merged: dict[str, Tensor] = {}
    with adapted(checkpoint, base.folder, adapter) as skeleton:
        reader = MergedReader(checkpoint, skeleton, base, adapter)
        for number in range(len(reader.parts)):
            for name, value in reader.read(number).items():
                for hf_name, tensor in skeleton.to_hf(name, value).items():
                    compare(hf_name, written[hf_name], tensor.to(written.dtype(hf_name)))
                    merged[hf_name] = tensor
                    tensors += 1
        wide = all(dtype is torch.float32 for dtype in reader.dtypes.values())
    return Verified(tensors, *_logits(written, merged, wide=wide))


def _logits(written: ModelWeights, merged: Mapping[str, Tensor], *, wide: bool) -> tuple[float, float | None]:
    """Fill the same modules from both sides in turn."""
    with Skeleton(written.folder, mtp=True, precision="fp32" if wide else "bf16") as skeleton:
        skeleton.bridge.fill([skeleton.model], written)
        here = prompt_logits(skeleton)
        with torch.no_grad():
            for parameter in skeleton.parameters.values():
                parameter.task.param_weight.copy_(skeleton.map.to_megatron(parameter, merged))
        return compare_logits(here, prompt_logits(skeleton), BOUND)


def verify_adapter(written: Path, checkpoint: Path, base: ModelWeights, adapter: AdapterRecord) -> Verified:
    """Compare PEFT's files in `written` with the checkpoint. Raises ThresholdMissed that names the difference.

    The logits are those of the base weights with PEFT's matrices added, and of the checkpoint's adapters in their layers.
    """
    stored = load_file(written / "adapter_model.safetensors")
    lora = LoraConfig(rank=adapter["rank"], alpha=adapter["alpha"], targets=adapter["targets"])
    with adapted(checkpoint, base.folder, adapter, precision="fp32") as skeleton:
        fill_adapter(checkpoint, skeleton, base.folder.path, adapter)
        exported = {name: value.clone() for name, value in export_adapter(skeleton.bridge, [skeleton.model], lora)}
        if exported.keys() != stored.keys():
            name = min(exported.keys() ^ stored.keys())
            raise ThresholdMissed(f"verify: only one side has {name}")
        for name, value in exported.items():
            compare(name, stored[name], value.to(stored[name].dtype))
        _fill_base(skeleton, base)
        there = prompt_logits(skeleton)[:1]
    with Skeleton(base.folder, mtp=False, precision="fp32") as skeleton:
        merged = _Merged(base, stored, lora.alpha / lora.rank)
        with torch.no_grad():
            for parameter in skeleton.parameters.values():
                parameter.task.param_weight.copy_(skeleton.map.to_megatron(parameter, merged))
        logits, _ = compare_logits(prompt_logits(skeleton), there, APPLIED_BOUND)
    return Verified(len(stored), logits, None)


def _fill_base(skeleton: Skeleton, base: ModelWeights) -> None:
    """Load all weights except the adapters. MTP layers keep arbitrary values, because they are not compared."""
    with torch.no_grad():
        for parameter in skeleton.parameters.values():
            parameter.task.param_weight.copy_(skeleton.map.to_megatron(parameter, base))


class _Merged(Mapping[str, Tensor]):
    """Base weights in fp32, each with PEFT's matrices added."""

    def __init__(self, base: ModelWeights, stored: Mapping[str, Tensor], scale: float) -> None:
        self.base, self.stored, self.scale = base, stored, scale

    def __getitem__(self, name: str) -> Tensor:
        weight, layer = self.base[name].float(), ADAPTER_PREFIX + name.removesuffix(".weight")
        a, b = (self.stored.get(f"{layer}.{part}.weight") for part in ("lora_A", "lora_B"))
        return weight if a is None or b is None else weight + self.scale * (b.float() @ a.float())

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)
