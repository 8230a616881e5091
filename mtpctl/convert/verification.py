"""Compare a Hugging Face folder with a Megatron checkpoint: every tensor, and the logits of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtpctl.checkpoint import sharded
from mtpctl.convert.folder_weights import FolderWeights
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.parts import PartReader
from mtpctl.convert.skeleton import Skeleton
from mtpctl.convert.source import has_mtp
from mtpctl.errors import ThresholdMissed
from mtpctl.model.packing import Packing

PROMPT = 32
"""Tokens of the fixed prompt."""

BOUND = 1e-5
"""The largest difference of two logits that is allowed, in fp32."""


@dataclass(frozen=True)
class Verified:
    """Tensors that were compared bit for bit, and the largest difference of logits and of MTP logits on the fixed prompt."""

    tensors: int
    logits: float
    mtp_logits: float | None


def verify_conversion(
    weights: ModelWeights,
    saved: Path,
    folder: HfFolder,
    *,
    carried: FolderWeights | None = None,
) -> Verified:
    """Compare both sides. `folder`: the config of both; `carried`: what the checkpoint's side stores beside the language model.

    Raises ThresholdMissed naming what differs.
    """
    mtp = has_mtp(saved)
    tensors = compare_extras(weights, carried)
    with Skeleton(folder, mtp=mtp) as skeleton:
        reader = PartReader(saved, skeleton)
        for number in range(len(reader.parts)):
            for name, value in reader.read(number).items():
                for hf_name, tensor in skeleton.to_hf(name, value).items():
                    compare(hf_name, weights[hf_name].to(tensor.dtype), tensor)
                    tensors += 1
        wide = all(dtype is torch.float32 for dtype in reader.dtypes.values())
    return Verified(tensors, *_logits(weights, saved, folder, mtp=mtp, precision="fp32" if wide else "bf16"))


def compare_extras(weights: ModelWeights, beside: FolderWeights | None) -> int:
    """Compare the tensors of a folder that do not belong to the language model. Returns their number."""
    for name in weights.extras:
        if beside is None or name not in beside:
            raise ThresholdMissed(f"verify: {name} is missing on one side")
        compare(name, weights.raw.tensor(name), beside.tensor(name))
    return len(weights.extras)


def compare(name: str, here: Tensor, there: Tensor) -> None:
    """Raise ThresholdMissed if two tensors differ in shape, type or a bit."""
    if here.shape != there.shape or here.dtype != there.dtype:
        raise ThresholdMissed(f"verify: {name} is {here.dtype} {list(here.shape)} here and {there.dtype} {list(there.shape)} there")
    if here.numel() and not torch.equal(here.contiguous().view(torch.uint8), there.contiguous().view(torch.uint8)):
        first = int((here.flatten() != there.flatten()).nonzero()[:1].sum())
        raise ThresholdMissed(f"verify: {name} differs, first at element {first}")


def _logits(weights: ModelWeights, saved: Path, folder: HfFolder, *, mtp: bool, precision: str) -> tuple[float, float | None]:
    """Fill the same modules from both sides in turn, as the trainer does: restoring the checkpoint, and loading the folder."""
    with Skeleton(folder, mtp=mtp, precision=precision) as skeleton:
        sharded.restore(saved, sharded.Contents(skeleton.model, None, 0, None, None))
        there = prompt_logits(skeleton)
        skeleton.bridge.fill([skeleton.model], weights)
        here = prompt_logits(skeleton)
    return compare_logits(here, there, BOUND)


def compare_logits(here: list[Tensor], there: list[Tensor], bound: float) -> tuple[float, float | None]:
    """The largest difference of the trunk's logits, and of the MTP depths'. Raises ThresholdMissed if one is beyond `bound`."""
    found = [float((a - b).abs().max()) for a, b in zip(here, there, strict=True)]
    if max(found) > bound:
        raise ThresholdMissed(f"verify: logits differ by {max(found):.2g} on the fixed prompt, at most {bound:g} is allowed")
    return found[0], max(found[1:], default=None)


@torch.no_grad()
def prompt_logits(skeleton: Skeleton) -> list[Tensor]:
    """Logits of the trunk and of each MTP depth, in fp32."""
    skeleton.model.eval()
    ids = (torch.arange(1, PROMPT + 1) * 7919) % skeleton.shape.vocab
    depths = skeleton.model.config.mtp_num_layers or 0
    hidden = skeleton.model(ids, Packing.of([PROMPT], "cpu"), depths=depths)
    return [(state.float() @ hidden.head.float().T) for state in (hidden.trunk, *hidden.mtp)]
