"""Bugs of kernels in vLLM's CPU backend exist without the patches and are fixed by them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform

from mtpctl.rollout.vllm.patches.cpu_kernels import convolve, install_experts
from mtpctl.rollout.vllm.plugin import install

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="a fault of vLLM's CPU build")
TOKENS, HEADS, OTHER, WIDTH, BASE = 5, 3, 24, 64, 10000.0
CHANNELS, TAPS = 5, 4
POSITIONS = torch.tensor([7, 0, 1, 2, 90])


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Neighbors `(a, b)` of `x [tokens, heads, width]` as the complex number a + ib, rotated by its token's position."""
    rates = BASE ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    turn = torch.polar(torch.ones(TOKENS, WIDTH // 2, dtype=torch.float64), POSITIONS[:, None] * rates)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def case(request: pytest.FixtureRequest) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A rotary embedding, and the rows whose last columns are the queries and keys of latent attention."""
    install()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(WIDTH, WIDTH, 128, BASE, is_neox_style=False, dtype=request.param)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS, HEADS, OTHER + WIDTH, generator=draw), torch.randn(TOKENS, OTHER + WIDTH, generator=draw)
    return rotary, rows[0].to(request.param), rows[1].to(request.param)


def test_queries_with_a_heads_dimension_are_rotated_in_place(case: tuple[Any, torch.Tensor, torch.Tensor]) -> None:
    rotary, queries, keys = case
    before = queries.clone(), keys.clone()
    query, key = queries[..., OTHER:], keys[:, None, OTHER:]
    expected, expected_key = rotated(query), rotated(key)
    answer, answer_key = rotary.forward_cpu(POSITIONS, query, key)
    error = 1e-5 if queries.dtype == torch.float32 else 0.05
    for result in (answer, query):
        assert torch.allclose(result.double(), expected, atol=error)
    for result in (answer_key, key):
        assert torch.allclose(result.double(), expected_key, atol=error)
    assert torch.equal(queries[..., :OTHER], before[0][..., :OTHER])
    assert torch.equal(keys[:, :OTHER], before[1][:, :OTHER])


def test_flat_queries_use_the_kernel(case: tuple[Any, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, queries, keys = case
    query, key = queries[..., OTHER:].flatten(1), keys[:, OTHER:].contiguous()
    expected = rotated(query.unflatten(1, (HEADS, WIDTH))).flatten(1)
    monkeypatch.setattr(rotary, "forward_native", None)
    rotary.forward_cpu(POSITIONS, query, key)
    assert torch.allclose(query.double(), expected, atol=1e-5 if queries.dtype == torch.float32 else 0.05)


class ContextNorms:
    """The attributes of a drafter with two layers that the norm of its context's keys reads."""

    _rms_norm_eps = 1e-6
    _k_norm_weights = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))


def test_keys_of_each_layer_are_normed_with_its_weight() -> None:
    install()
    drafter, keys = ContextNorms(), torch.randn(2, 5, 3, 32, generator=torch.Generator().manual_seed(1))
    exact = keys.double() * (keys.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = exact * drafter._k_norm_weights[:, None, None].double()
    assert torch.allclose(DFlashQwen3Model._normalize_context_k(drafter, keys).double(), expected, atol=1e-5)


def test_upstream_kernel_norms_all_layers_with_the_first_weight() -> None:
    drafter, keys = ContextNorms(), torch.randn(2, 5, 3, 32, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(keys)
    ops.rms_norm(out, keys, drafter._k_norm_weights, drafter._rms_norm_eps)
    first = torch.empty_like(keys)
    ops.rms_norm(first, keys, drafter._k_norm_weights[0], drafter._rms_norm_eps)
    assert torch.equal(out, first)


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_convolution_with_queries_of_any_length_equals_the_whole_sequence(drafts: int) -> None:
    """Sequences in random order of query lengths and acceptance, against one convolution over the accepted inputs (float64)."""
    generator, draw = torch.Generator().manual_seed(drafts), random.Random(drafts)
    taps = torch.randn(CHANNELS, 1, TAPS, generator=generator, dtype=torch.float64)
    bias = torch.randn(CHANNELS, generator=generator, dtype=torch.float64)
    sequences = 3
    inputs_so_far = [torch.zeros(0, CHANNELS, dtype=torch.float64) for _ in range(sequences)]
    outputs = [torch.zeros(0, CHANNELS, dtype=torch.float64) for _ in range(sequences)]
    # State after a prefill: vLLM stores the last TAPS - 1 inputs in the first columns, as if one token had been accepted.
    buffers = [torch.zeros(CHANNELS, TAPS - 1 + drafts, dtype=torch.float64) for _ in range(sequences)]
    accepted = [1] * sequences
    for _ in range(40):
        lengths = [draw.randint(1, drafts + 1) for _ in range(sequences)]
        queries = torch.randn(sum(lengths), CHANNELS, generator=generator, dtype=torch.float64)
        convolved = convolve(queries, lengths, accepted, buffers, taps, bias)
        accepted = [draw.randint(1, length) for length in lengths]
        pairs = zip(queries.split(lengths), convolved.split(lengths), accepted, strict=True)
        for index, (query, output, count) in enumerate(pairs):
            inputs_so_far[index] = torch.cat([inputs_so_far[index], query[:count]])
            outputs[index] = torch.cat([outputs[index], output[:count]])
    for inputs, output in zip(inputs_so_far, outputs, strict=True):
        padded = functional.pad(inputs.T[None], (TAPS - 1, 0))
        torch.testing.assert_close(output, functional.conv1d(padded, taps, bias, groups=CHANNELS)[0].T)


@dataclass
class Config:
    is_lora_enabled: bool


def test_expert_kernel_is_chosen_as_without_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "select_unquantized_moe_backend", lambda config: config)
    monkeypatch.setattr(install_experts, "is_applied", False)
    assert install_experts()
    assert method.select_unquantized_moe_backend(Config(True)) == Config(False)  # type: ignore[arg-type]


@pytest.mark.parametrize("renormalize", [True, False])
def test_bias_of_a_softmax_router_selects_experts_and_leaves_probs(renormalize: bool) -> None:
    """Against float64, as transformers' router of ERNIE 4.5 computes it; biases as large as those of the published model."""
    install()
    draw = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(50, 7, generator=draw), 40.0 + 0.1 * torch.randn(7, generator=draw)
    router = CPURouter(3, 7, renormalize=renormalize, e_score_correction_bias=bias, routed_scaling_factor=1.5)
    probs, experts = router._compute_routing(logits, logits, None)
    scores = logits.double().softmax(-1)
    # The sum is rounded to fp32, as in the router.
    expected = (logits.softmax(-1) + bias).topk(3, dim=-1).indices
    assert torch.equal(experts.long().sort(-1).values, expected.sort(-1).values)
    assert not torch.equal(expected.sort(-1).values, logits.topk(3, dim=-1).indices.sort(-1).values)
    chosen = scores.gather(1, experts.long())
    chosen = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    torch.testing.assert_close(probs.double(), 1.5 * chosen, atol=1e-6, rtol=0)


def test_router_without_a_bias_is_upstreams() -> None:
    install()
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    _, experts = CPURouter(2, 4)._compute_routing(logits, logits, None)
    assert torch.equal(experts.long().sort(-1).values, logits.topk(2, dim=-1).indices.sort(-1).values)
