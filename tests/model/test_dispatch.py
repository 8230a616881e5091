"""The way of tokens to their rows and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtpctl.kernels.order import expert_order
from mtpctl.model.dispatch import Order, Travel, shares_of_rows
from tests.fakes.kernel_routes import drawn_routes

TOKENS, EXPERTS, K = 23, 6, 2


def test_a_token_becomes_its_rows_and_the_sum_of_its_rows_a_token_with_their_gradients() -> None:
    routes = drawn_routes(TOKENS, EXPERTS, K)
    found = expert_order(routes, K, 1)
    order = Order(found.row_of, found.token_of)
    tokens = torch.randn(TOKENS, 4, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
    rows = order.gather(tokens) * shares_of_rows(shares, found)[:, None]
    right = tokens * (shares * routes).sum(1, keepdim=True)
    torch.testing.assert_close(order.sum(rows), right)
    upstream = torch.randn_like(right)
    grads = torch.autograd.grad(order.sum(rows), [tokens, shares], upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(right, [tokens, shares], upstream))


class Probe(torch.autograd.Function):
    """Tells when it runs, and when its backward pass does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, said: list[str]) -> torch.Tensor:
        ctx.said = said
        said.append("computed")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.said.append("gradient computed")
        return grads[0] * 2, None


def test_what_is_computed_while_rows_travel_is_so_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Work:
        def wait(self) -> None:
            said.append("waited")

    def exchange(out: torch.Tensor, rows: torch.Tensor, to: list[int], of: list[int], *, group: Any, async_op: bool) -> Work:
        assert async_op and out.shape[0] == sum(to) and rows.shape[0] == sum(of)
        out.zero_()[: len(rows)] = rows[: len(out)] + 1
        said.append("left")
        return Work()

    monkeypatch.setattr("torch.distributed.all_to_all_single", exchange)
    rows, beside = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
    travel = Travel(rows, [2, 3], [1, 2], group=None)  # type: ignore[arg-type]
    other = Probe.apply(beside, said)
    arrived = travel.arrived()
    assert arrived.equal(rows[:3] + 1) and said == ["left", "computed", "waited"]
    said.clear()
    upstream = torch.randn(3, 3)
    found = torch.autograd.grad((arrived * upstream).sum() + other.sum(), [rows, beside])
    assert said == ["left", "gradient computed", "waited"]
    assert found[0].equal(torch.cat([upstream + 1, torch.zeros(2, 3)])) and found[1].equal(torch.full((5, 3), 2.0))
