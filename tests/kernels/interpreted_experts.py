"""`mtpctl.kernels.exact_experts` under Triton's interpreter, in fp16. `test_interpreted.py` runs this file in a separate process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtpctl.kernels import exact_experts, invariant
from mtpctl.kernels.exact_experts import MANY_ROWS

HALF = torch.float16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("counts", [(5, 0, 65, 1, 2), (0, 0, 3, 0, 0), (MANY_ROWS.rows * 6, 1, 0, 129, 0)])
def test_rows_have_the_bits_of_a_product_with_their_experts_weight(counts: tuple[int, ...], reverse: bool) -> None:
    """Also next to rows of other experts that are not finite."""
    x, weights = drawn(sum(counts), 72), drawn(len(counts), 140, 72, seed=1)
    ends = torch.tensor(counts).cumsum(0).int()
    out = exact_experts.grouped_linear_triton(x, ends, weights, reverse=reverse)
    for group, (part, own) in enumerate(zip(out.split(counts), x.split(counts), strict=True)):
        weight = weights[len(counts) - 1 - group if reverse else group]
        assert torch.equal(part, invariant.linear(own, weight)), group
    spoiled = x.clone()
    spoiled[-1] = float("nan")
    again = exact_experts.grouped_linear_triton(spoiled, ends, weights, reverse=reverse)
    assert torch.equal(again[:-1], out[:-1]) and again[-1].isnan().all()


def test_weights_that_are_not_adjacent_are_copied() -> None:
    weights = drawn(3, 2, 40, 24)[:, 0]
    x, ends = drawn(7, 24, seed=1), torch.tensor([2, 2, 7]).int()
    expected = exact_experts.grouped_linear_triton(x, ends, weights.contiguous())
    assert torch.equal(exact_experts.grouped_linear_triton(x, ends, weights), expected)


@pytest.mark.parametrize("over_all", [False, True])
def test_probs_match_softmax(over_all: bool) -> None:
    logits = drawn(70, 6).float()
    routes = exact_experts.route_mask(exact_experts.top_experts(logits, 2), 6)
    probs = exact_experts.chosen_probs_triton(logits, routes, over_all=over_all)
    assert torch.equal(probs != 0, routes)
    assert (probs - exact_experts.chosen_probs_torch(logits, routes, over_all=over_all)).abs().max() < 1e-6
    for count in (1, 3, 33):
        assert torch.equal(exact_experts.chosen_probs_triton(logits[:count], routes[:count], over_all=over_all), probs[:count])
