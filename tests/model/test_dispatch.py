"""The order of rows by expert, in which every token finds its own again."""

from __future__ import annotations

import pytest
import torch

from mtpctl.model.dispatch import by_expert, shares_of_rows

TOKENS, EXPERTS, K = 23, 6, 2


def chosen() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    experts = torch.rand(TOKENS, EXPERTS - 1).topk(K, dim=1).indices  # nobody visits the last one
    return experts, torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, experts, True)


@pytest.mark.parametrize(("ranks", "wanted"), [(1, [5, 4, 3, 2, 1, 0]), (2, [2, 1, 0, 5, 4, 3]), (3, [1, 0, 3, 2, 5, 4])])
def test_rows_are_sorted_by_rank_and_within_a_rank_from_the_last_expert_to_the_first(ranks: int, wanted: list[int]) -> None:
    right, routes = chosen()
    order, experts, counts = by_expert(routes, K, ranks)
    assert [set(row) for row in experts.tolist()] == [set(row) for row in right.tolist()]
    assert sorted(order.row_of.flatten().tolist()) == list(range(TOKENS * K))
    assert all(order.token_of[row] == token for token in range(TOKENS) for row in order.row_of[token])
    of_row = torch.empty(TOKENS * K, dtype=torch.long).scatter_(0, order.row_of.flatten().long(), experts.flatten())
    assert of_row.tolist() == sorted(of_row.tolist(), key=wanted.index)
    assert counts.tolist() == [int((of_row == expert).sum()) for expert in wanted]


def test_a_token_becomes_its_rows_and_the_sum_of_its_rows_a_token_with_their_gradients() -> None:
    _, routes = chosen()
    order, experts, _ = by_expert(routes, K, 1)
    tokens = torch.randn(TOKENS, 4, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
    rows = order.gather(tokens) * shares_of_rows(shares, experts, order)[:, None]
    right = tokens * (shares * routes).sum(1, keepdim=True)
    torch.testing.assert_close(order.sum(rows), right)
    upstream = torch.randn_like(right)
    found = torch.autograd.grad(order.sum(rows), [tokens, shares], upstream)
    torch.testing.assert_close(found, torch.autograd.grad(right, [tokens, shares], upstream))
