"""The order of rows by expert, in which every token finds its own again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.kernels.rows import ExpertOrder, expert_order, expert_order_torch
from tests.fakes.kernel_routes import drawn_routes


@pytest.mark.parametrize(("ranks", "wanted"), [(1, [5, 4, 3, 2, 1, 0]), (2, [2, 1, 0, 5, 4, 3]), (3, [1, 0, 3, 2, 5, 4])])
def test_rows_are_sorted_by_rank_and_within_a_rank_from_the_last_expert_to_the_first(ranks: int, wanted: list[int]) -> None:
    routes = drawn_routes(23, 6, 2)
    found = expert_order(routes, 2, ranks)
    visited = [divmod(pair, 6) for pair in found.pair_of.tolist()]
    assert found.token_of.tolist() == [token for token, _ in visited]
    assert sorted(visited) == [tuple(pair) for pair in routes.nonzero().tolist()]
    assert visited == sorted(visited, key=lambda pair: (wanted.index(pair[1]), pair[0]))
    assert all(found.token_of[row] == token for token in range(23) for row in found.row_of[token])
    assert sorted(found.row_of.flatten().tolist()) == list(range(46))
    assert found.counts.tolist() == [int(routes[:, expert].sum()) for expert in wanted]


def test_no_tokens_have_no_rows() -> None:
    found = expert_order(torch.zeros(0, 4, dtype=torch.bool), 2, 1)
    assert found.row_of.shape == (0, 2) and found.token_of.shape == found.pair_of.shape == (0,)
    assert found.counts.tolist() == [0, 0, 0, 0]


def assert_same(found: ExpertOrder, right: ExpertOrder) -> None:
    for name in ("row_of", "token_of", "pair_of", "counts"):
        mine: Tensor = getattr(found, name)
        assert mine.dtype == (torch.int64 if name == "pair_of" else torch.int32)
        assert torch.equal(mine.cpu(), getattr(right, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "ranks"), [(8192, 128, 8, 1), (5000, 512, 10, 4), (131, 6, 2, 3), (1, 96, 96, 2), (0, 8, 2, 1)]
)
def test_a_card_makes_the_same_order(tokens: int, experts: int, k: int, ranks: int) -> None:
    routes = drawn_routes(tokens, experts, k)
    assert_same(expert_order(routes.cuda(), k, ranks), expert_order_torch(routes, k, ranks))
