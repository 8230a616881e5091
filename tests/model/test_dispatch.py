"""Token dispatch: from tokens to rows and back, and the overlapped all-to-all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtpctl.kernels.rows import expert_order
from mtpctl.model.dispatch import AsyncAllToAll, gather, probs_of_rows, sum_rows
from tests.fakes.kernel_routes import drawn_routes

TOKENS, EXPERTS, K = 23, 6, 2


def test_gather_and_sum_of_rows_match_dense_products_with_gradients() -> None:
    routes = drawn_routes(TOKENS, EXPERTS, K)
    order = expert_order(routes, K, 1)
    tokens = torch.randn(TOKENS, 4, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
    rows = gather(tokens, order) * probs_of_rows(probs, order)[:, None]
    expected = tokens * (probs * routes).sum(1, keepdim=True)
    torch.testing.assert_close(sum_rows(rows, order), expected)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(sum_rows(rows, order), [tokens, probs], upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, [tokens, probs], upstream))


class Probe(torch.autograd.Function):
    """Logs its forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        ctx.events = events
        events.append("computed")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.events.append("gradient computed")
        return grads[0] * 2, None


def test_async_all_to_all_overlaps_with_computation_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Work:
        def wait(self) -> None:
            events.append("waited")

    def all_to_all(out: torch.Tensor, rows: torch.Tensor, to: list[int], of: list[int], *, group: Any, async_op: bool) -> Work:
        assert async_op and out.shape[0] == sum(to) and rows.shape[0] == sum(of)
        out.zero_()[: len(rows)] = rows[: len(out)] + 1
        events.append("sent")
        return Work()

    monkeypatch.setattr("torch.distributed.all_to_all_single", all_to_all)
    rows, other = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
    exchange = AsyncAllToAll(rows, [2, 3], [1, 2], group=None)  # type: ignore[arg-type]
    other_out = Probe.apply(other, events)
    received = exchange.wait()
    assert received.equal(rows[:3] + 1) and events == ["sent", "computed", "waited"]
    events.clear()
    upstream = torch.randn(3, 3)
    rows_grad, other_grad = torch.autograd.grad((received * upstream).sum() + other_out.sum(), [rows, other])
    assert events == ["sent", "gradient computed", "waited"]
    assert rows_grad.equal(torch.cat([upstream + 1, torch.zeros(2, 3)])) and other_grad.equal(torch.full((5, 3), 2.0))
