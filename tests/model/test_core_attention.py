"""The operator below PyTorch's variable-length attention accepts our arguments and is differentiable, tested on meta tensors."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from mtpctl.model.core_attention import FlashPrefixAttention, PackedAttention, combined_attention, flash_arguments, flash_attention
from mtpctl.model.packing import EarlierDepths, Packing

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
    out, lse = flash_attention(q, k, v, flash_arguments(packed()), 0.1, window)
    assert out.shape == q.shape and out.requires_grad
    assert set(lse.shape) == {TOKENS, HEADS} and lse.dtype == torch.float32 and not lse.requires_grad
    grads = torch.autograd.grad(out, [q, k, v], torch.empty_like(out))
    assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]


def test_flash_prefix_converts_the_log_sum_exp_layout() -> None:
    q, k, v = (x.detach() for x in leaves())
    prefix = FlashPrefixAttention(flash_arguments(packed()), 0.1)
    out, lse = prefix.forward(q, k, v)
    assert lse.shape == (TOKENS, HEADS)
    assert [each.shape for each in prefix.backward(torch.empty_like(out), q, k, v, out, lse)] == [q.shape, k.shape, v.shape]


def test_sinks_get_a_gradient_with_the_flash_operator() -> None:
    q, k, v = leaves()
    sinks = torch.empty(HEADS, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = combined_attention(q, k, v, None, FlashPrefixAttention(flash_arguments(packed()), 0.1, 8), 0.1, sinks)
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert torch.autograd.grad(out, sinks, torch.empty_like(out))[0].shape == sinks.shape


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_pass_of_three_depths_is_freed_with_its_output(bitwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third depth's keys depend on the output of the second. If its node in the graph also kept the keys, nothing would free the pass:
    Python's collector does not see edges of the graph."""
    monkeypatch.setattr(PackedAttention, "_attend_by_group", PackedAttention._flash)
    monkeypatch.setattr("mtpctl.kernels.invariant.attention", lambda q, *_, **__: (torch.empty_like(q), q.new_empty(HEADS, TOKENS)))
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1))  # type: ignore[arg-type]
    attention.bitwise = bitwise
    packing, q = packed(), leaves()[0]
    earlier = EarlierDepths()
    for _ in range(3):
        k = q[:, :KV_HEADS]
        depth = packing.at_depth(packing.position_ids, None, earlier)
        q = attention(q, k, k, None, packed_seq_params=depth).view(q.shape)
    assert len(earlier.keys) == 3
    keys = weakref.ref(earlier)
    del earlier, depth, q, k
    gc.collect()
    assert keys() is None


@pytest.mark.parametrize(("window", "left"), [(None, -1), (128, 127)])
def test_window_includes_the_query_itself(window: int | None, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's window counts the keys before the query's own."""
    passed: list[int] = []
    monkeypatch.setattr(
        "torch.ops.aten._flash_attention_forward",
        SimpleNamespace(default=lambda q, *_, window_size_left, **__: (passed.append(window_size_left) or q, q)),
    )
    q, k, v = (x.detach() for x in leaves())
    flash_attention(q, k, v, flash_arguments(packed()), 0.1, window)
    assert passed == [left]
