"""Exact layers of vLLM: only an engine with `numerics: bitwise` gets them, and its attention reads a request's own slots only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.sample.sampler import Sampler

from mtpctl.kernels import exact, exact_delta
from mtpctl.rollout.vllm.patches import NUMERICS
from mtpctl.rollout.vllm.patches.exact import exact_attention_class, paged_attention
from mtpctl.rollout.vllm.plugin import install

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU backend's layers")


@pytest.mark.parametrize("numerics", ["default", "bitwise"])
def test_only_layers_of_a_bitwise_engine_are_exact(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUMERICS, numerics)
    install()  # with the numerics of the engine, as at its start
    with set_current_vllm_config(VllmConfig()):
        norm, activation, sampler = RMSNorm(190, eps=1e-6), SiluAndMul(), Sampler("processed_logprobs")
        centered, gated = GemmaRMSNorm(190, eps=1e-6), RMSNormGated(190, eps=1e-6, norm_before_gate=True, activation="silu")
        attention = CPUAttentionBackend.get_impl_cls()
    x = 3 * torch.randn(40, 190, generator=torch.Generator().manual_seed(0))
    is_exact = numerics == "bitwise"
    assert attention is (exact_attention_class() if is_exact else CPUAttentionBackendImpl)
    assert torch.equal(norm(x.clone()), exact.rms_norm(x, norm.weight.data, 1e-6)) == is_exact
    normed, residual = norm(x.clone(), 2 * x)
    assert torch.equal(residual, 3 * x) and torch.equal(normed, exact.rms_norm(3 * x, norm.weight.data, 1e-6)) == is_exact
    assert torch.equal(activation(x), exact.swiglu(x)) == is_exact
    assert torch.equal(centered(x.clone()), exact.rms_norm(x, centered.weight.data, 1e-6, 1.0)) == is_exact
    assert torch.equal(gated(x, 2 * x), exact_delta.gated_rms_norm(x, 2 * x, gated.weight.data, 1e-6)) == is_exact
    assert torch.equal(sampler.compute_logprobs(x), exact.log_softmax(x)) == is_exact


@pytest.mark.parametrize("numerics", ["default", "bitwise"])
def test_bias_of_a_row_parallel_layer_is_added_to_the_sum_of_the_ranks(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv(NUMERICS, numerics)
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: SimpleNamespace(cpu_group=None))  # exact sums of one rank
    monkeypatch.setattr("vllm.model_executor.layers.linear.tensor_model_parallel_all_reduce", lambda x: x)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 24), (7, 24), (7,)))
    method = SimpleNamespace(apply=lambda layer, x, bias: x @ weight.T if bias is None else x @ weight.T + bias)
    options = {"tp_size": 2, "tp_rank": 1, "input_is_parallel": True, "reduce_results": True, "return_bias": True}
    layer = SimpleNamespace(bias=bias, quant_method=method, get_parameter=lambda name: {"weight": weight}[name], **options)
    for skips in (False, True):
        layer.skip_bias_add = skips
        out, left = RowParallelLinear.forward(layer, x)
        assert (left is bias) == skips
        exact_sum = exact.linear(x, weight) if skips else exact.linear(x, weight) + bias
        # The first rank has vLLM's bias.
        assert torch.equal(out, exact_sum if numerics == "bitwise" else x @ weight.T)


@pytest.mark.parametrize("block_bytes", [exact.BLOCK_BYTES, 1])
def test_paged_attention_equals_attention_to_a_requests_own_tokens(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of several lengths and query counts, with blocks in any order; free slots hold NaN, as unused memory may."""
    monkeypatch.setattr(exact, "BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(0)
    lengths, counts, heads, groups, width, size = [5, 9, 1, 7], [2, 9, 1, 2], 4, 2, 32, 4
    tables = torch.tensor([[7, 2, 0], [5, 1, 4], [6, 0, 0], [3, 8, 0]])
    whole = [torch.randn(2, groups, length, width, generator=generator) for length in lengths]
    queries = [torch.randn(count, heads, width, generator=generator) for count in counts]
    cache = torch.full((9, groups, size, 2 * width), float("nan"))
    layer = object.__new__(exact_attention_class())
    for table, (keys, values) in zip(tables.tolist(), whole, strict=True):
        slots = torch.tensor([table[i // size] * size + i % size for i in range(keys.shape[1])] + [-1])
        key_rows, value_rows = (torch.cat([x.transpose(0, 1), torch.zeros(1, groups, width)]) for x in (keys, values))
        layer.do_kv_cache_update(None, key_rows, value_rows, cache, slots)
    starts = torch.tensor([0, *counts]).cumsum(0)
    metadata = SimpleNamespace(causal=True, query_start_loc=starts, seq_lens=torch.tensor(lengths), block_table=tables)
    output = torch.empty(int(starts[-1]), heads, width)
    key_cache, value_cache = cache.chunk(2, dim=-1)
    paged_attention(torch.cat(queries), key_cache, value_cache, metadata, 0.2, output)  # type: ignore[arg-type]
    for part, query, (keys, values), length, count in zip(output.split(counts), queries, whole, lengths, counts, strict=True):
        visible = torch.ones(length, length, dtype=torch.bool).tril()[length - count :]
        expected = exact.attention(query.transpose(0, 1)[None], keys[None], values[None], visible, 0.2)
        assert torch.equal(part.transpose(0, 1), expected[0])
