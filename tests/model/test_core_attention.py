"""The operator below PyTorch's variable-length attention accepts our arguments and is differentiable, tested on meta tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mtpctl.model.core_attention import FlashPrefix, flash_attention, joined_attention
from mtpctl.model.packing import Packing

TOKENS, HEADS, KV_HEADS, WIDTH = 40, 8, 2, 64


def leaves() -> list[torch.Tensor]:
    return [
        torch.empty(TOKENS, heads, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def packed() -> Packing:
    return Packing.of([30, 10], "meta")


@pytest.mark.parametrize("window", [None, 8])
def test_flash_operator_is_differentiable(window: int | None) -> None:
    q, k, v = leaves()
    out, lse = flash_attention(q, k, v, packed(), 0.1, window)
    assert out.shape == q.shape and out.requires_grad
    assert set(lse.shape) == {TOKENS, HEADS} and lse.dtype == torch.float32 and not lse.requires_grad
    grads = torch.autograd.grad(out, [q, k, v], torch.empty_like(out))
    assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]


def test_flash_prefix_converts_the_log_sum_exp_layout() -> None:
    q, k, v = (x.detach() for x in leaves())
    prefix = FlashPrefix(packed(), 0.1)
    out, lse = prefix.forward(q, k, v)
    assert lse.shape == (TOKENS, HEADS)
    assert [each.shape for each in prefix.backward(torch.empty_like(out), q, k, v, out, lse)] == [q.shape, k.shape, v.shape]


def test_sinks_get_a_gradient_with_the_flash_operator() -> None:
    q, k, v = leaves()
    sinks = torch.empty(HEADS, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = joined_attention(q, k, v, None, FlashPrefix(packed(), 0.1, 8), 0.1, sinks)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert torch.autograd.grad(out, sinks, torch.empty_like(out))[0].shape == sinks.shape


@pytest.mark.parametrize(("window", "left"), [(None, -1), (128, 127)])
def test_window_includes_the_query_itself(window: int | None, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's window counts the keys before the query's own."""
    passed: list[int] = []
    monkeypatch.setattr(
        "torch.ops.aten._flash_attention_forward",
        SimpleNamespace(default=lambda q, *_, window_size_left, **__: (passed.append(window_size_left) or q, q)),
    )
    flash_attention(*(x.detach() for x in leaves()), packed(), 0.1, window)
    assert passed == [left]
