"""The layers of a bitwise engine on CUDA, in Triton's interpreter. `test_invariant.py` runs this file in a separate process.

The patches are applied directly, because `install_invariant` applies them on CUDA only.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.kernels import invariant
from mtpctl.kernels.qkv import rotate_pairs
from mtpctl.model.rope import rope_of
from mtpctl.rollout.vllm.patches import NUMERICS
from mtpctl.rollout.vllm.patches.invariant import replace_operations
from tests.fakes.tiny import MIMO

HALF = torch.float16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    replace_operations()


@pytest.fixture
def bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUMERICS, "bitwise")


def test_layers_of_other_engines_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUMERICS, "default")
    with set_current_vllm_config(VllmConfig()):
        norm, activation, method = RMSNorm(40, eps=1e-6), SiluAndMul(), UnquantizedLinearMethod()
    assert norm._forward_method.__func__ is RMSNorm.forward_cpu  # type: ignore[attr-defined]
    assert "silu_and_mul" not in activation._forward_method.__name__
    assert FlashAttentionBackend.get_impl_cls() is FlashAttentionImpl
    config = SimpleNamespace(model_config=SimpleNamespace(head_dtype=HALF))
    assert DraftModelSpeculator.draft_logits_spec(None, config) == (HALF, 0.0)
    layer = SimpleNamespace(weight=drawn(6, 40), cpu_linear=lambda x, weight, bias: "upstream")
    assert method.apply(layer, drawn(3, 40)) == "upstream"


@pytest.mark.usefixtures("bitwise")
def test_norm_activation_and_products_round_as_the_trainer() -> None:
    with set_current_vllm_config(VllmConfig()):
        norm, activation, method = RMSNorm(40, eps=1e-6, dtype=HALF), SiluAndMul(), UnquantizedLinearMethod()
    norm.weight.data.copy_(drawn(40, seed=5))
    x, residual, weight, bias = drawn(7, 40), drawn(7, 40, seed=1), drawn(6, 40, seed=2), drawn(6, seed=3)
    out, stream = norm(x, residual)
    assert torch.equal(stream, x + residual)
    assert torch.equal(out, invariant.rms_norm(stream, norm.weight.data, 1e-6))
    assert torch.equal(norm(x), invariant.rms_norm(x, norm.weight.data, 1e-6))
    assert torch.equal(activation(x), invariant.swiglu(x))
    layer = SimpleNamespace(weight=weight)
    assert torch.equal(method.apply(layer, x), invariant.linear(x, weight))
    assert torch.equal(method.apply(layer, x, bias), invariant.linear(x, weight) + bias)
    logits = UnquantizedEmbeddingMethod().apply(layer, x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, invariant.logits(x, weight))
    config = SimpleNamespace(model_config=SimpleNamespace(head_dtype=HALF))
    assert DraftModelSpeculator.draft_logits_spec(None, config)[0] == logits.dtype
    tokens = torch.tensor([[index % 6] for index in range(7)])
    assert torch.equal(logprob.compute_token_logprobs(logits, tokens), invariant.log_softmax(logits).gather(1, tokens))


@pytest.mark.usefixtures("bitwise")
def test_ranks_add_rounded_products_and_then_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, other = drawn(7, 40), drawn(6, 40, seed=1), drawn(6, seed=2), drawn(7, 6, seed=3)
    monkeypatch.setattr("vllm.distributed.tensor_model_parallel_all_reduce", lambda own: (own.float() + other.float()).to(HALF))
    sizes = {"tp_size": 2, "tp_rank": 0, "input_is_parallel": True, "reduce_results": True, "return_bias": False}
    layer = SimpleNamespace(get_parameter=lambda name: {"weight": weight}[name], bias=bias, skip_bias_add=False, **sizes)
    assert torch.equal(RowParallelLinear.forward(layer, x), (invariant.linear(x, weight) + other) + bias)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.usefixtures("bitwise")
@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, LLAMA3])
def test_rotation_has_the_trainers_angles(scaling: dict[str, object]) -> None:
    rope = scaling | {"rope_theta": 640000.0}
    sizes = {"head_dim": 32, "num_attention_heads": 2, "hidden_size": 64, "num_key_value_heads": 1}
    shape = shape_of({name: value for name, value in MIMO.items() if name != "rope_theta"} | sizes | {"rope_parameters": rope})
    with set_current_vllm_config(VllmConfig()):
        layer = get_rope(32, 128, rope_parameters=rope, dtype=HALF)
    assert isinstance(layer, Llama3RotaryEmbedding) == ("factor" in scaling)
    positions, query, key = torch.tensor([0, 1, 127, 5]), drawn(4, 64), drawn(4, 96)[:, 64:]
    trainers = rope_of(shape)
    rotary = type(trainers)(trainers.inverse_frequencies, exact=True).rotary(positions)
    for rotated, x in zip(layer(positions, query, key), (query, key), strict=True):
        table = invariant.rotate(x.unflatten(1, (-1, 32)), torch.arange(4), *rotary).flatten(1)
        assert torch.equal(rotated, table)
        expected = rotate_pairs(x.unflatten(1, (-1, 32)).float(), *rotary).flatten(1)
        assert (rotated.float() - expected).abs().max() < 4e-3


@pytest.mark.usefixtures("bitwise")
def test_positions_beyond_those_of_the_model_are_rotated() -> None:
    """vLLM accepts longer requests with VLLM_ALLOW_LONG_MAX_MODEL_LEN."""
    limits = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100), speculative_config=SimpleNamespace(num_speculative_tokens=3))
    config = VllmConfig()
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        for name, value in vars(limits).items():
            patch.setattr(config, name, value)
        layer = get_rope(32, 64, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, dtype=HALF)
    query, last = drawn(1, 64), torch.tensor([102])
    rotated, _ = layer(last, query)
    angles = 102.0 * 500.0 ** -(torch.arange(16, dtype=torch.float64) / 16)
    expected = rotate_pairs(query.unflatten(1, (-1, 32)).double(), angles.cos()[None], angles.sin()[None]).flatten(1)
    assert (rotated.double() - expected).abs().max() < 4e-3


@pytest.mark.usefixtures("bitwise")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 8),
        ("sinks", torch.zeros(4)),
        ("logits_soft_cap", 30.0),
        ("alibi_slopes", [0.5] * 4),
        ("attn_type", AttentionType.ENCODER_ONLY),
    ],
)
def test_attention_with_an_unsupported_option_is_rejected(name: str, value: object) -> None:
    options = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": 0.0, name: value}
    with pytest.raises(UserError, match=rf"bitwise does not support attention with {name}; use another model, or set numerics: default$"):
        FlashAttentionBackend.get_impl_cls()(4, 32, 0.2, 2, **options)


@pytest.mark.usefixtures("bitwise")
def test_attention_with_default_options_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(FlashAttentionImpl, "__init__", lambda self, *args, **kwargs: built.append(args))
    FlashAttentionBackend.get_impl_cls()(4, 32, 0.2, 2, None, None, "auto", None, AttentionType.DECODER)
    FlashAttentionBackend.get_impl_cls()(4, 32, 0.2, 2, None, None, "auto", logits_soft_cap=0.0)
    assert len(built) == 2


@pytest.mark.usefixtures("bitwise")
def test_attention_reads_the_kv_cache() -> None:
    heads, groups, width, size, length = 4, 2, 32, 16, 37
    whole = drawn(length, heads + 2 * groups, width)
    query, key, value = (part.contiguous() for part in whole.split([heads, groups, groups], 1))
    cache, table = torch.full((5, groups, size, 2 * width), float("nan"), dtype=HALF), torch.tensor([[3, 1, 4]], dtype=torch.int32)
    for token in range(length):
        cache[table[0, token // size], :, token % size] = torch.cat([key[token], value[token]], -1)
    layer = object.__new__(FlashAttentionBackend.get_impl_cls())
    layer.head_size, layer.scale = width, 0.2
    metadata = SimpleNamespace(
        causal=True,
        num_actual_tokens=3,
        block_table=table,
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        max_query_len=3,
    )
    padded = torch.cat([query[-3:], drawn(2, heads, width)])
    output = torch.full_like(padded, 7.0)
    layer.forward(None, padded, key, value, cache, metadata, output)
    expected, _ = invariant.attention(query, key, value, torch.tensor([0, length], dtype=torch.int32), length, 0.2)
    assert torch.equal(output[:3], expected[-3:])
    assert (output[3:] == 7.0).all()
    assert (layer.forward(None, padded, key, value, cache, None, output) == 0.0).all()
