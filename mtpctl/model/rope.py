"""Rotary position embeddings (RoPE, arXiv 2104.09864) of packed tokens, with context-extension scalings.

Linear interpolation: arXiv 2306.15595. YaRN: arXiv 2309.00071. Llama 3.1's scaling by wavelength: as in its reference code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.families.shape import ModelShape, RopeScaling
from mtpctl.kernels import exact


class Rotary(NamedTuple):
    """Cosines and sines of packed tokens, fp32 [t, rotated dimensions / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rope:
    """A rotary embedding.

    inverse_frequencies: fp32 [rotated dimensions / 2]. scaling: factor of cosine and sine. exact: use `exact.cos_sin`, without scaling.
    """

    inverse_frequencies: Tensor
    scaling: float = 1.0
    exact: bool = False

    def to_device(self, device: torch.device) -> Rope:
        """Move to a device. Call it once: a copy in each pass would synchronize the host with the device."""
        return replace(self, inverse_frequencies=self.inverse_frequencies.to(device))

    def rotary(self, position_ids: Tensor) -> Rotary:
        """Cosines and sines of tokens at these positions [t]."""
        angles = self._angles(position_ids)
        if self.exact:
            return Rotary(*exact.cos_sin(angles))
        return Rotary(angles.cos() * self.scaling, angles.sin() * self.scaling)

    def angles(self, position_ids: Tensor) -> Tensor:
        """position_ids [t] → [t, 1, rotated dimensions], both halves equal, the format of megatron-core's latent attention."""
        half = self._angles(position_ids)
        return torch.cat([half, half], dim=-1)[:, None]

    def _angles(self, position_ids: Tensor) -> Tensor:
        return position_ids[:, None].float() * self.inverse_frequencies


def window_rope_of(shape: ModelShape) -> Rope | None:
    """The rotary embedding of a model's window layers, None if it has none."""
    return None if shape.window is None else rope_of(replace(shape, rope_theta=shape.window.rope_theta))


def rope_of(shape: ModelShape) -> Rope:
    """The rotary embedding of a model, with the scaling of its config."""
    dims = shape.latent.rope_dim if shape.latent else int(shape.head_dim * shape.rotary_fraction)
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    scaling = shape.rope_scaling
    if scaling is None:
        return Rope(frequencies)
    kind = scaling["rope_type"]
    if kind == "linear":
        return Rope(frequencies / scaling["factor"])
    if kind == "llama3":
        low, high, trained = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
        return Rope(scale_by_wavelength(frequencies, scaling["factor"], low, high, trained))
    assert kind == "yarn", f"RoPE scaling {kind!r} is not supported"
    return _yarn(frequencies, shape, scaling)


def scale_by_wavelength(frequencies: Tensor, factor: float, low: float, high: float, trained: float) -> Tensor:
    """Llama 3.1: divide frequencies of at most `low` turns in the trained length by `factor`, keep those of at least `high` turns.

    Between the two, interpolate.
    """
    turns = trained * frequencies / (2 * math.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def _yarn(frequencies: Tensor, shape: ModelShape, scaling: RopeScaling) -> Rope:
    """Keep frequencies of over `beta_fast` turns in the trained length, divide those of under `beta_slow` turns by the factor.

    Between the two, interpolate.
    """
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    dims = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = ((torch.arange(len(frequencies)) - low) / ((high - low) or 0.001)).clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = _magnitude(factor, mscale) / _magnitude(factor, mscale_all) if mscale and mscale_all else _magnitude(factor, 1.0)
    return Rope(frequencies * (1 - ramp + ramp / factor), float(attention))


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
