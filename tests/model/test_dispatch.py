"""The way of tokens to their rows and back."""

from __future__ import annotations

import torch

from mtpctl.kernels.order import expert_order
from mtpctl.model.dispatch import Order, shares_of_rows
from tests.kernels.routes import drawn_routes

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
