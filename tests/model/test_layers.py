"""Norms of families whose weights are stored around 0."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mtpctl.kernels.norm import gated_rms_norm
from mtpctl.model.layers import RMSNorm


def test_a_gated_norm_multiplies_with_the_weight_that_a_folder_holds() -> None:
    """Folders hold 1 + weight in half precision: the trainer's log-probs are those of an engine that reads them."""
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=True, use_cpu_initialization=True, params_dtype=torch.bfloat16, sequence_parallel=False
    )
    norm = RMSNorm(config, 16)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 40, 16, generator=generator).bfloat16()
    torch.nn.init.normal_(norm.weight, std=0.01, generator=generator)
    stored = 1 + norm.weight.detach()
    assert stored.dtype == torch.bfloat16
    assert torch.equal(norm.gated(x, gate), gated_rms_norm(x, gate, stored, norm.eps))
