"""Rows at distinct places, and their gradients."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.rows import distinct_rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(9,), (9, 3), (9, 2, 3)])
@pytest.mark.parametrize("places", [[4, 0, 8, 3], [], list(range(9))])
def test_gradients_go_where_the_rows_came_from(device: str, shape: tuple[int, ...], places: list[int]) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(device).requires_grad_()
    at = torch.tensor(places, dtype=torch.int64, device=device)
    rows = distinct_rows(x, at)
    upstream = torch.randn(rows.shape, generator=g).to(device)
    assert rows.equal(x[at])
    (found,) = torch.autograd.grad(rows, x, upstream)
    (right,) = torch.autograd.grad(x[at], x, upstream)
    assert found.equal(right)
