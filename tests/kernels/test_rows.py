"""The order of rows by expert, and gathering distinct rows."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from mtpctl.kernels.rows import count_destinations, distinct_rows, expert_order, expert_order_torch, row_sums
from tests.fakes.kernel_routes import assert_same_order, drawn_routes, uneven_routes


@pytest.mark.parametrize(("ranks", "target"), [(1, [5, 4, 3, 2, 1, 0]), (2, [2, 1, 0, 5, 4, 3]), (3, [1, 0, 3, 2, 5, 4])])
def test_rows_are_sorted_by_rank_and_descending_expert(ranks: int, target: list[int]) -> None:
    routes = drawn_routes(23, 6, 2)
    actual = expert_order(routes, 2, ranks)
    visited = [divmod(pair, 6) for pair in actual.pair_of.tolist()]
    assert actual.token_of.tolist() == [token for token, _ in visited]
    assert sorted(visited) == [tuple(pair) for pair in routes.nonzero().tolist()]
    assert visited == sorted(visited, key=lambda pair: (target.index(pair[1]), pair[0]))
    assert all(actual.token_of[row] == token for token in range(23) for row in actual.row_of[token])
    assert sorted(actual.row_of.flatten().tolist()) == list(range(46))
    assert actual.ends.tolist() == list(accumulate(int(routes[:, expert].sum()) for expert in target))


def test_zero_tokens_have_no_rows() -> None:
    actual = expert_order(torch.zeros(0, 4, dtype=torch.bool), 2, 1)
    assert actual.row_of.shape == (0, 2) and actual.token_of.shape == actual.pair_of.shape == (0,)
    assert actual.ends.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_with_fewer_experts_have_fewer_rows(device: str) -> None:
    routes = uneven_routes(23, 6, 3).to(device)
    order = expert_order(routes, 3, 1, int(routes.sum()))
    for token in range(23):
        rows = [row for row in order.row_of[token].tolist() if row >= 0]
        assert [order.token_of[row].item() for row in rows] == [token] * len(rows) == [token] * int(routes[token].sum())
        assert sorted(order.pair_of[rows].tolist()) == (routes[token].nonzero().flatten() + 6 * token).tolist()
    values = torch.randn(len(order.token_of), 4, dtype=torch.float64).to(device)
    expected = torch.zeros(23, 4, dtype=torch.float64, device=device).index_add_(0, order.token_of.long(), values)
    torch.testing.assert_close(row_sums(values.float(), order.row_of).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "ranks"), [(8192, 128, 8, 1), (5000, 512, 10, 4), (131, 6, 2, 3), (1, 96, 96, 2), (0, 8, 2, 1)]
)
def test_cuda_order_matches_the_portable_version(tokens: int, experts: int, k: int, ranks: int) -> None:
    routes = drawn_routes(tokens, experts, k)
    assert_same_order(expert_order(routes.cuda(), k, ranks), expert_order_torch(routes, k, ranks))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("tokens", "experts", "k", "ranks"), [(300, 12, 2, 3), (1, 8, 1, 2), (0, 8, 2, 4)])
def test_destinations_are_the_ranks_of_the_experts(device: str, tokens: int, experts: int, k: int, ranks: int) -> None:
    routes = drawn_routes(tokens, experts, k)
    destinations = count_destinations(routes.to(device), ranks)
    pairs = [(token, expert * ranks // experts) for token, expert in routes.nonzero().tolist()]
    copies = sorted(set(pairs), key=lambda pair: (pair[1], pair[0]))
    counts = [[[rank for _, rank in of].count(rank) for rank in range(ranks)] for of in (copies, pairs)]
    assert destinations.counts.tolist() == counts
    order = destinations.order(min(k, ranks))
    assert [divmod(pair, ranks) for pair in order.pair_of[: len(copies)].tolist()] == copies
    assert order.token_of[: len(copies)].tolist() == [token for token, _ in copies]
    assert order.ends.tolist() == list(accumulate(counts[0]))
    for token, rows in enumerate(order.row_of.tolist()):
        expected = [row for row, copy in enumerate(copies) if copy[0] == token]
        assert rows == expected + [-1] * (min(k, ranks) - len(expected))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(9,), (9, 3), (9, 2, 3)])
@pytest.mark.parametrize("places", [[4, 0, 8, 3], [], list(range(9))])
def test_distinct_rows_scatter_their_gradients(device: str, shape: tuple[int, ...], places: list[int]) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(device).requires_grad_()
    at = torch.tensor(places, dtype=torch.int64, device=device)
    rows = distinct_rows(x, at)
    upstream = torch.randn(rows.shape, generator=g).to(device)
    assert rows.equal(x[at])
    (actual,) = torch.autograd.grad(rows, x, upstream)
    (expected,) = torch.autograd.grad(x[at], x, upstream)
    assert actual.equal(expected)
