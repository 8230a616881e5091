"""vLLM's CPU backend packs linear weights and drops the parameters. With the patch they stay, on any CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils
from vllm.platforms import CpuArchEnum, current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from mtpctl.rollout.vllm.patches.weights import PackedWeight, find_layers_with_copies, find_packed_fp8, plain_weight, repack_weights
from mtpctl.rollout.vllm.plugin import install
from tests.fakes.cpus import linear_amx

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="what vLLM's CPU build does")


@pytest.fixture(params=["amx", "zen", "onednn"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A CPU on which vLLM takes this kernel. The packed products themselves are not run."""
    install()
    linear_amx(monkeypatch, request.param == "amx")
    monkeypatch.setattr(ops, "_supports_onednn", request.param == "onednn")
    if request.param == "zen":
        monkeypatch.setattr(type(current_platform), "is_zen_cpu", lambda _: True)
        monkeypatch.setattr(torch.ops, "zentorch", SimpleNamespace(zentorch_linear_unary=None), raising=False)
    if request.param == "onednn":
        monkeypatch.setattr(ops, "create_onednn_mm", lambda *_: None)
    yield request.param


def layer(rows: int = 32, columns: int = 64) -> Any:
    """A linear layer of vLLM after loading, as far as the dispatch reads it."""
    linear = nn.Module()
    linear.register_parameter("weight", nn.Parameter(torch.randn(rows, columns).bfloat16(), requires_grad=False))
    return linear


def test_upstream_drops_the_weight(packing: str) -> None:
    linear = layer()
    inspect.unwrap(utils.dispatch_cpu_unquantized_gemm)(linear, True)
    assert linear.weight.numel() == 0, packing


@pytest.mark.parametrize("remove", [True, False])
def test_patched_layer_keeps_and_uses_its_weight(packing: str, remove: bool) -> None:
    """`remove` is False for an output head, whose parameter upstream keeps in addition to a packed copy."""
    linear, x = layer(), torch.randn(3, 64).bfloat16()
    utils.dispatch_cpu_unquantized_gemm(linear, remove)
    assert linear.weight.shape == (32, 64), packing
    linear.weight.data.copy_(torch.randn(32, 64))
    result = utils.cpu_unquantized_gemm(linear, x, linear.weight, None)
    assert torch.equal(result, torch.nn.functional.linear(x, linear.weight))


@pytest.mark.parametrize("cpu", ["arm", "x86", "plain"])
def test_convolutions_keep_the_loaded_layout(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed on Arm and on x86 with AVX-512 BF16, and then the loaded layout is kept too."""
    install()
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", lambda *_: CpuArchEnum.ARM if cpu == "arm" else CpuArchEnum.X86)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu == "x86")
    monkeypatch.setattr(ops, "causal_conv1d_weight_pack", lambda weight: weight.flip(0)[:, None])
    loaded, changed = torch.randn(2, 64, 1, 4).bfloat16()
    linear = nn.Module()
    linear.register_parameter("weight", nn.Parameter(loaded.clone(), requires_grad=False))
    utils.dispatch_cpu_unquantized_gemm(linear, True)
    packed = cpu != "plain"
    assert torch.equal(linear.get_parameter("weight"), loaded.flip(0) if packed else loaded)
    assert torch.equal(plain_weight(linear, "weight"), loaded)
    plain_weight(linear, "weight").copy_(changed)
    repack_weights(find_layers_with_copies(linear))
    assert torch.equal(linear.get_parameter("weight"), changed.flip(0) if packed else changed)


def test_layer_with_only_a_packed_weight_is_rejected() -> None:
    linear = nn.Module()
    linear.register_parameter("weight", nn.Parameter(torch.empty(0), requires_grad=False))
    with pytest.raises(PackedWeight, match=r"take attention_backend out of rollout\.engine_args"):
        plain_weight(linear, "weight")


@pytest.mark.parametrize(
    ("latent", "named", "chosen"),
    [(True, None, "CPU_MLA"), (True, "AMX_MLA", "AMX_MLA"), (False, None, None)],
)
def test_latent_attention_keeps_its_weights(latent: bool, named: str | None, chosen: str | None) -> None:
    """Before upstream reads it: the size of a block follows from the backend."""
    install()
    backend = None if named is None else AttentionBackendEnum[named]
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=backend), model_config=SimpleNamespace(use_mla=latent))
    with pytest.raises(AttributeError, match="cache_config"):
        CpuPlatform.check_and_update_config(config)  # type: ignore[arg-type]
    result = config.attention_config.backend
    assert (None if result is None else result.name) == chosen


PACKING, UPDATABLE = (type(name, (), {}) for name in ("MarlinFP8ScaledMMLinearKernel", "DeepGemmFp8BlockScaledMMKernel"))


def fp8_matrix(kernel: object, scales: torch.dtype = torch.float32) -> nn.Module:
    result = layer()
    result.register_parameter("weight_scale_inv", nn.Parameter(torch.ones(1, 1).to(scales), requires_grad=False))
    result.quant_method = SimpleNamespace(fp8_linear=kernel)
    return result


def fp8_experts(backend: str, scales: torch.dtype = torch.float32) -> nn.Module:
    result = nn.Module()
    result.register_parameter("w13_weight_scale_inv", nn.Parameter(torch.ones(1, 1).to(scales), requires_grad=False))
    result.quant_method = SimpleNamespace(fp8_backend=SimpleNamespace(name=backend))
    return result


def test_kernels_that_pack_fp8_weights_are_reported_in_one_line() -> None:
    assert find_packed_fp8(nn.ModuleList([fp8_matrix(UPDATABLE()), fp8_experts("TRITON"), layer()])) is None
    packing = [fp8_matrix(PACKING()) for _ in range(3)]
    assert find_packed_fp8(nn.ModuleList([*packing, fp8_matrix(UPDATABLE()), fp8_experts("MARLIN")])) == (
        "vLLM packs 3 matrices for MarlinFP8ScaledMMLinearKernel, 1 layers with experts for MARLIN; a sync cannot update packed weights; "
        "set rollout.engine_args: {linear_backend: triton, moe_backend: triton}"
    )
    assert find_packed_fp8(nn.ModuleList([fp8_matrix(UPDATABLE(), torch.int32), fp8_experts("DEEPGEMM", torch.int32)])) == (
        "vLLM packs 1 matrices for DeepGemmFp8BlockScaledMMKernel (scales in int32), 1 layers with experts for DEEPGEMM (scales in int32); "
        "a sync cannot update packed weights; set rollout.engine_args: {linear_backend: triton, moe_backend: triton}"
    )
