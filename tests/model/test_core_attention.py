"""The operator below PyTorch's variable-length attention accepts our arguments and is differentiable, tested on meta tensors."""

from __future__ import annotations

import torch

from mtpctl.model.core_attention import FlashPrefix, flash_attention
from mtpctl.model.packing import Packing

TOKENS, HEADS, KV_HEADS, WIDTH = 40, 8, 2, 64


def leaves() -> list[torch.Tensor]:
    return [
        torch.empty(TOKENS, heads, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def packed() -> Packing:
    return Packing.of([30, 10], "meta")


def test_flash_operator_is_differentiable() -> None:
    q, k, v = leaves()
    out, lse = flash_attention(q, k, v, packed(), 0.1)
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
