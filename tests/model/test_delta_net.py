"""The chunked gated delta rule against its definition, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mtpctl.model import delta_net


def by_definition(q, k, v, g, beta):
    state = torch.zeros(*q.shape[:1], q.shape[2], k.shape[-1], v.shape[-1], dtype=q.dtype)
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        actual = (k[:, t, :, None] @ state)[:, :, 0]
        state = state + k[:, t, ..., None] * ((v[:, t] - actual) * beta[:, t, :, None])[:, :, None]
        out.append((q[:, t, :, None] @ state)[:, :, 0] * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("length", [1, 7, 8, 21])
def test_chunked_rule_matches_the_recurrence(monkeypatch, length):
    monkeypatch.setattr(delta_net, "CHUNK", 8)
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(2, length, 3, 4), dim=-1) for _ in range(2))
    v = torch.randn(2, length, 3, 5)
    g, beta = -torch.rand(2, length, 3), torch.rand(2, length, 3)
    inputs = [x.requires_grad_() for x in (q.detach(), k.detach(), v, g, beta)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    actual, expected = delta_net.gated_delta_rule(*inputs), by_definition(*exact)
    torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=0)
    weights = torch.randn_like(v)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-5, rtol=0)
