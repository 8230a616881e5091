"""Norms of families whose weights are stored around 0."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mtpctl.kernels.norm import gated_rms_norm
from mtpctl.model.layers import GatedRMSNorm


def test_gated_norm_multiplies_with_the_weight_that_a_folder_holds() -> None:
    """Folders hold the weight around 1 in half precision: the trainer's log-probs are those of an engine that reads them."""
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=True, use_cpu_initialization=True, params_dtype=torch.bfloat16, sequence_parallel=False
    )
    norm = GatedRMSNorm(config, 16)  # type: ignore[arg-type]
    assert torch.all(norm.weight == 1)
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 40, 16, generator=generator).bfloat16()
    torch.nn.init.normal_(norm.weight, mean=0.05, std=0.01, generator=generator)
    assert torch.equal(norm.gated(x, gate), gated_rms_norm(x, gate, norm.weight, norm.eps))
