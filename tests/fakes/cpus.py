"""Emulates other CPUs for vLLM's selection of kernels."""

from __future__ import annotations

import pytest
import torch


def linear_amx(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Have vLLM choose kernels of linear layers as on a CPU with AMX, or as on one without.

    The answer is given to that choice alone: others lead to instructions that the CPU may lack. The packing itself runs on any CPU with
    AVX-512; for one without it, vLLM's build has none, and a copy stands in.
    """
    from vllm.model_executor.layers import utils

    upstream = utils.check_cpu_sgl_kernel

    def check(n: int, k: int, dtype: torch.dtype) -> bool:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(torch.cpu, "_is_amx_tile_supported", lambda: there)
            return upstream(n, k, dtype)

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", check)
    if there and not hasattr(torch.ops._C, "convert_weight_packed"):
        monkeypatch.setattr(torch.ops._C, "convert_weight_packed", torch.clone, raising=False)
