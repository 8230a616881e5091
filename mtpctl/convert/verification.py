"""Compares a converted folder, checkpoint or adapter with its source: every tensor, and the logits of a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mtpctl.checkpoint import sharded
from mtpctl.checkpoint.sharded import AdapterRecord
from mtpctl.convert.adapters import MergedReader, adapter_model, export_adapter, fill_adapter
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.parts import ConversionModel, PartReader
from mtpctl.convert.source import has_mtp
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.errors import ThresholdMissed
from mtpctl.families.quantization import SCALE_SUFFIX
from mtpctl.kernels.block_fp8 import dequantize, quantize
from mtpctl.model.packing import Packing
from mtpctl.plan.buckets import ADAPTER_PREFIX
from mtpctl.recipe.train import LoraConfig

PROMPT_TOKENS = 32
"""Length of the fixed prompt, in tokens."""
MAX_LOGIT_DIFFERENCE = 1e-5
"""Maximum difference between two logits, in fp32."""


@dataclass(frozen=True)
class VerificationResult:
    """The number of tensors that are bitwise equal, and the largest differences of logits and MTP logits on the fixed prompt.

    relative_error: the largest relative error of a quantized matrix, in the Frobenius norm; None if no matrix is quantized.
    """

    num_tensors: int
    max_logit_diff: float
    max_mtp_logit_diff: float | None
    relative_error: float | None = None


def verify_conversion(
    weights: ModelWeights,
    checkpoint: Path,
    folder: HfFolder,
    *,
    extra_weights: FolderWeights | None = None,
    fp8_names: frozenset[str] = frozenset(),
) -> VerificationResult:
    """Compare a folder's weights with the checkpoint at `checkpoint`. Raises ThresholdMissed if they differ.

    Matrices in `fp8_names` are compared with a new quantization of the checkpoint's, and tensors that the folder stores in a narrower dtype
    with the rounded ones. If there are any, differences of logits have no bound.

    folder: provides the config of both. extra_weights: the checkpoint's tensors outside the language model.
    """
    mtp = has_mtp(checkpoint)
    num_tensors, relative_error, narrowed = require_equal_extras(weights, extra_weights), 0.0, False
    with ConversionModel(folder, mtp=mtp) as conversion:
        reader = PartReader(checkpoint, conversion)
        for index in range(len(reader.parts)):
            for name, value in reader.read(index).items():
                for hf_name, tensor in conversion.to_hf(name, value).items():
                    if hf_name in fp8_names:
                        relative_error = max(relative_error, require_equal_quantized(hf_name, weights, tensor))
                    elif fp8_names or weights.dtype(hf_name).itemsize < tensor.dtype.itemsize:
                        narrowed = narrowed or weights.dtype(hf_name) != tensor.dtype
                        require_equal(hf_name, weights[hf_name], tensor.to(weights.dtype(hf_name)))
                    else:
                        require_equal(hf_name, weights[hf_name].to(tensor.dtype), tensor)
                    num_tensors += 1
        all_fp32 = all(dtype is torch.float32 for dtype in reader.dtypes.values())
    precision, max_difference = "fp32" if all_fp32 else "bf16", math.inf if fp8_names or narrowed else MAX_LOGIT_DIFFERENCE
    return VerificationResult(
        num_tensors,
        *_compare_restored_logits(weights, checkpoint, folder, mtp=mtp, precision=precision, bound=max_difference),
        relative_error if fp8_names else None,
    )


def require_equal_quantized(name: str, weights: ModelWeights, tensor: Tensor) -> float:
    """Compare a folder's FP8 matrix with a new quantization of `tensor`. Raises ThresholdMissed if they differ.

    Returns the relative error of the quantization.
    """
    stored = weights.quantized(name)
    if stored is None:
        raise ThresholdMissed(f"verify: {name} is not stored in FP8")
    for part, written, expected in zip((name, name + SCALE_SUFFIX), stored, quantize(tensor, name), strict=True):
        require_equal(part, written, expected)
    exact = tensor.float()
    norm = float(exact.norm())
    return float((dequantize(*stored, torch.float32) - exact).norm()) / norm if norm else 0.0


def require_equal_extras(weights: ModelWeights, extra_weights: FolderWeights | None) -> int:
    """Compare a folder's tensors outside the language model with `extra_weights`. Returns their number.

    Raises ThresholdMissed if a tensor differs or is missing in `extra_weights`.
    """
    for name in weights.extras:
        if extra_weights is None or name not in extra_weights:
            raise ThresholdMissed(f"verify: {name}, a tensor outside the language model, is in the folder, but missing on the other side")
        require_equal(name, weights.raw.tensor(name), extra_weights.tensor(name))
    return len(weights.extras)


def require_equal(name: str, first: Tensor, second: Tensor) -> None:
    """Raise ThresholdMissed unless two tensors have the same shape, dtype and bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        description = " and ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (first, second))
        raise ThresholdMissed(f"verify: {name} differs in dtype or shape: {description}")
    if first.numel() and not torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second))):
        index = int((first.flatten() != second.flatten()).nonzero()[:1].sum())
        raise ThresholdMissed(f"verify: {name} differs, first at element {index}")


def _compare_restored_logits(
    weights: ModelWeights, checkpoint: Path, folder: HfFolder, *, mtp: bool, precision: str, bound: float
) -> tuple[float, float | None]:
    """Compare the logits of one model after restoring the checkpoint and after loading the folder, both as the trainer does."""
    with ConversionModel(folder, mtp=mtp, precision=precision) as conversion:
        sharded.restore(checkpoint, sharded.Contents(conversion.model, None, 0, None, None))
        restored = compute_prompt_logits(conversion)
        conversion.bridge.fill([conversion.model], weights)
        return require_close_logits(compute_prompt_logits(conversion), restored, bound)


def require_close_logits(first: list[Tensor], second: list[Tensor], bound: float) -> tuple[float, float | None]:
    """The largest differences of the trunk's and of the MTP depths' logits. Raises ThresholdMissed if one exceeds `bound`."""
    differences = [float((first_logits - second_logits).abs().max()) for first_logits, second_logits in zip(first, second, strict=True)]
    if not all(difference <= bound for difference in differences):  # also for NaN
        raise ThresholdMissed(
            f"verify: logits differ by {max(differences, key=_nan_last):.2g} on the fixed prompt, at most {bound:g} is allowed"
        )
    return differences[0], max(differences[1:], default=None)


def _nan_last(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


@torch.no_grad()
def compute_prompt_logits(conversion: ConversionModel) -> list[Tensor]:
    """Logits [prompt, vocab] of the trunk and of each MTP depth on the fixed prompt, in fp32."""
    conversion.model.eval()
    ids = (torch.arange(1, PROMPT_TOKENS + 1) * 7919) % conversion.shape.vocab
    depths = conversion.model.config.mtp_num_layers or 0
    hidden = conversion.model(ids, Packing.of([PROMPT_TOKENS], "cpu"), depths=depths)
    return [(state.float() @ hidden.head.float().T) for state in (hidden.trunk, *hidden.mtp)]


MAX_APPLIED_LOGIT_DIFFERENCE = 1e-4
"""Maximum difference between the logits of a merged adapter and of one that is applied separately, in fp32."""


def verify_merged(
    target: ModelWeights,
    checkpoint: Path,
    base: ModelWeights,
    adapter: AdapterRecord,
    *,
    extra_weights: FolderWeights | None = None,
    fp8_names: frozenset[str] = frozenset(),
) -> VerificationResult:
    """Compare a folder of merged weights with the base weights and the adapter. Raises ThresholdMissed if they differ.

    fp8_names: see `verify_conversion`.
    """
    num_tensors, relative_error = require_equal_extras(target, extra_weights), 0.0
    merged: dict[str, Tensor] = {}
    with adapter_model(checkpoint, base.folder, adapter) as conversion:
        reader = MergedReader(checkpoint, conversion, base, adapter)
        for index in range(len(reader.parts)):
            for name, value in reader.read(index).items():
                for hf_name, tensor in conversion.to_hf(name, value).items():
                    if hf_name in fp8_names:
                        relative_error = max(relative_error, require_equal_quantized(hf_name, target, tensor))
                    else:
                        require_equal(hf_name, target[hf_name], tensor.to(target.dtype(hf_name)))
                    merged[hf_name] = tensor if hf_name in fp8_names else tensor.to(target.dtype(hf_name))
                    num_tensors += 1
        all_fp32 = all(dtype is torch.float32 for dtype in reader.dtypes.values())
    with ConversionModel(target.folder, mtp=True, precision="fp32" if all_fp32 else "bf16") as conversion:
        conversion.bridge.fill([conversion.model], target)
        from_folder = compute_prompt_logits(conversion)
        conversion.fill(merged)
        differences = require_close_logits(from_folder, compute_prompt_logits(conversion), math.inf if fp8_names else MAX_LOGIT_DIFFERENCE)
    return VerificationResult(num_tensors, *differences, relative_error if fp8_names else None)


def verify_adapter(target: Path, checkpoint: Path, base: ModelWeights, adapter: AdapterRecord) -> VerificationResult:
    """Compare the PEFT files in `target` with the checkpoint. Raises ThresholdMissed if they differ.

    Logits are compared between base weights with the PEFT matrices merged, and the checkpoint's adapters applied in their layers.
    """
    written_tensors = load_file(target / "adapter_model.safetensors")
    lora = LoraConfig(rank=adapter["rank"], alpha=adapter["alpha"], targets=adapter["targets"])
    with adapter_model(checkpoint, base.folder, adapter, precision="fp32") as conversion:
        fill_adapter(checkpoint, conversion, base.folder.path, adapter)
        exported = {name: value.clone() for name, value in export_adapter(conversion.bridge, [conversion.model], lora)}
        if exported.keys() != written_tensors.keys():
            name = min(exported.keys() ^ written_tensors.keys())
            raise ThresholdMissed(f"verify: only one side has {name}")
        for name, value in exported.items():
            require_equal(name, written_tensors[name], value.to(written_tensors[name].dtype))
        # `fill` does not change the adapters. Only the trunk's logits are compared.
        conversion.fill(base)
        applied = compute_prompt_logits(conversion)[:1]
    with ConversionModel(base.folder, mtp=False, precision="fp32") as conversion:
        conversion.fill(_MergedWeights(base, written_tensors, lora.alpha / lora.rank))
        difference, _ = require_close_logits(compute_prompt_logits(conversion), applied, MAX_APPLIED_LOGIT_DIFFERENCE)
    return VerificationResult(len(written_tensors), difference, None)


class _MergedWeights(Mapping[str, Tensor]):
    """Base weights with the PEFT matrices merged, in fp32."""

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
