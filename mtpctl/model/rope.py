"""Rotary position embeddings of packed tokens, with the scalings that model families use beyond their trained length.

Formulas: RoPE, arXiv 2104.09864; linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071; Llama 3.1's scaling by
wavelength, as in its reference code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.families.shape import ModelShape, RopeScaling


class Rotary(NamedTuple):
    """Cosines and sines of packed tokens, fp32 [t, rotated dimensions / 2], as `mtpctl.kernels.rotary` takes them."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rope:
    """inverse_frequencies: fp32 [rotated dimensions / 2]; scaling: what cosine and sine are multiplied by."""

    inverse_frequencies: Tensor
    scaling: float = 1.0

    def on(self, device: torch.device) -> Rope:
        """The same on a device. Copying the frequencies at each pass would have the host wait for all that the device has to do before."""
        return replace(self, inverse_frequencies=self.inverse_frequencies.to(device))

    def rotary(self, position_ids: Tensor) -> Rotary:
        """Cosines and sines of tokens at these positions [t]."""
        angles = self._angles(position_ids)
        return Rotary(angles.cos() * self.scaling, angles.sin() * self.scaling)

    def angles(self, position_ids: Tensor) -> Tensor:
        """position_ids [t] → [t, 1, rotated dimensions], the two halves alike, as megatron-core's latent attention rotates by them."""
        half = self._angles(position_ids)
        return torch.cat([half, half], dim=-1)[:, None]

    def _angles(self, position_ids: Tensor) -> Tensor:
        return position_ids[:, None].float() * self.inverse_frequencies


def rope_of(shape: ModelShape) -> Rope:
    """The rotary embedding of a model, scaled as its config says."""
    dims = shape.latent.rope_dim if shape.latent else int(shape.head_dim * shape.rotary_fraction)
    plain = 1.0 / shape.rope_theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    scaling = shape.rope_scaling
    if scaling is None:
        return Rope(plain)
    kind = scaling["rope_type"]
    if kind == "linear":
        return Rope(plain / scaling["factor"])
    if kind == "llama3":
        return Rope(_by_wavelength(plain, scaling))
    assert kind == "yarn", f"RoPE scaling {kind!r} is not computed here"
    return _yarn(plain, shape, scaling)


def _by_wavelength(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high, trained = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
    turns = trained * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling["factor"])


def _yarn(plain: Tensor, shape: ModelShape, scaling: RopeScaling) -> Rope:
    """Waves that turn more than `beta_fast` times over the trained length are kept, fewer than `beta_slow` slowed, between a ramp."""
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    dims = 2 * len(plain)

    def dimension(turns: float) -> float:
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    slowed = ((torch.arange(len(plain)) - low) / ((high - low) or 0.001)).clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        ours, whole = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = _magnitude(factor, ours) / _magnitude(factor, whole) if ours and whole else _magnitude(factor, 1.0)
    return Rope(plain * (1 - slowed + slowed / factor), float(attention))


def _magnitude(factor: float, strength: float) -> float:
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0
