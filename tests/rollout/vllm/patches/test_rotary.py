"""vLLM's CPU kernel misreads heads in a dimension of their own without the mend, and rotates them rightly with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import rotary as vllm_rotary
from mtpctl.rollout.vllm.patches import version
from mtpctl.rollout.vllm.plugin import install

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="a fault of vLLM's CPU build")
TOKENS, HEADS, OTHER, WIDTH, BASE = 5, 3, 24, 64, 10000.0
POSITIONS = torch.tensor([7, 0, 1, 2, 90])


def turned(x: torch.Tensor) -> torch.Tensor:
    """Neighbours `(a, b)` of `x [tokens, heads, width]` as the complex number a + ib, turned by its token's position."""
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


def test_heads_of_latent_attention_are_turned_in_place(case: tuple[Any, torch.Tensor, torch.Tensor]) -> None:
    rotary, queries, keys = case
    before = queries.clone(), keys.clone()
    query, key = queries[..., OTHER:], keys[:, None, OTHER:]
    expected, expected_key = turned(query), turned(key)
    answer, answer_key = rotary.forward_cpu(POSITIONS, query, key)
    error = 1e-5 if queries.dtype == torch.float32 else 0.05
    for found in (answer, query):
        assert torch.allclose(found.double(), expected, atol=error)
    for found in (answer_key, key):
        assert torch.allclose(found.double(), expected_key, atol=error)
    assert torch.equal(queries[..., :OTHER], before[0][..., :OTHER])
    assert torch.equal(keys[:, :OTHER], before[1][:, :OTHER])


def test_flat_heads_are_left_to_the_kernel(case: tuple[Any, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, queries, keys = case
    query, key = queries[..., OTHER:].flatten(1), keys[:, OTHER:].contiguous()
    expected = turned(query.unflatten(1, (HEADS, WIDTH))).flatten(1)
    monkeypatch.setattr(rotary, "forward_native", None)
    rotary.forward_cpu(POSITIONS, query, key)
    assert torch.allclose(query.double(), expected, atol=1e-5 if queries.dtype == torch.float32 else 0.05)


@pytest.fixture
def unmended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `install` had not been called in this process."""
    install()
    monkeypatch.setattr(RotaryEmbedding, vllm_rotary._MENDED, False)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)


@pytest.mark.usefixtures("unmended")
def test_a_kernel_without_the_fault_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm._custom_ops.rotary_embedding", lambda *_: None)
    with pytest.raises(UpstreamMoved, match="no longer shows the fault"):
        vllm_rotary.install()


@pytest.mark.usefixtures("unmended")
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "PINNED", "0.1.0")
    with pytest.raises(UpstreamMoved, match=r"patches\.rotary"):
        vllm_rotary.install()
