"""Operations that do not depend on a call's other rows: under Triton's interpreter here, and bit by bit on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels import exact_grad, invariant
from mtpctl.kernels.invariant import PagedKV


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "width"), [(6144, 4096), (4096, 11008), (1000, 520)])
def test_product_of_a_row_does_not_depend_on_other_rows_and_tiles(columns: int, width: int) -> None:
    x, weight = drawn(777, width), drawn(columns, width, seed=1)
    whole = invariant.linear(x, weight, torch.float32)
    assert (whole - x.float() @ weight.float().T).norm() <= 1e-3 * whole.norm()
    for tile in invariant.TILES:
        assert torch.equal(invariant.linear(x, weight, torch.float32, tile), whole), tile
    for count in (*range(1, 9), 63, 64, 65, 128, 129, 500):
        for start in (0, 3, 777 - count):
            assert torch.equal(invariant.linear(x[start : start + count], weight, torch.float32), whole[start : start + count])


@pytest.mark.gpu
def test_product_has_the_usual_gradients() -> None:
    x, weight, grad = drawn(100, 1, 520), drawn(72, 520, seed=1), drawn(100, 1, 72, seed=2)
    leaves = [each.float().requires_grad_() for each in (x, weight)]
    expected = torch.autograd.grad(F.linear(*leaves), leaves, grad.float())
    leaves = [each.requires_grad_() for each in (x, weight)]
    for ours, usual in zip(torch.autograd.grad(exact_grad.linear(x, weight), leaves, grad), expected, strict=True):
        assert (ours - usual).norm() <= 1e-2 * usual.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 517])
def test_decoded_and_verified_queries_equal_those_of_a_packed_sample(length: int) -> None:
    heads, groups, width, size = 32, 8, 128, 16
    query, key, value = drawn(length, heads, width), drawn(length, groups, width, seed=1), drawn(length, groups, width, seed=2)
    whole, _ = invariant.attention(query, key, value, torch.tensor([0, length], dtype=torch.int32, device="cuda"), length, 0.1, lse=True)
    pages = -(-length // size)
    cache = torch.full((pages, groups, size, 2 * width), float("nan"), dtype=torch.bfloat16, device="cuda")
    for page in range(pages):
        rows = torch.cat([key, value], -1)[page * size : (page + 1) * size]
        cache[pages - 1 - page, :, : len(rows)] = rows.transpose(0, 1)
    table = torch.arange(pages, dtype=torch.int32, device="cuda").flip(0)[None]
    keys, values = cache.split(width, -1)
    stored = PagedKV(keys, values, table, torch.tensor([length], dtype=torch.int32, device="cuda"))
    for count in {min(count, length) for count in (1, 2, 3, 4, 8, 17, length)}:
        out = torch.empty_like(query[:count])
        ends = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        invariant.paged_attention(query[length - count :], stored, ends, count, 0.1, out)
        assert torch.equal(out, whole[length - count :]), count


@pytest.mark.gpu
def test_attention_has_the_flash_kernels_gradients() -> None:
    from mtpctl.model.core_attention import flash_arguments, flash_attention, invariant_attention
    from mtpctl.model.packing import Packing

    starts = torch.tensor([0, 70, 71, 300], dtype=torch.int32, device="cuda")

    class Starts:
        cu_seqlens_q = cu_seqlens_kv = starts
        max_seqlen_q = max_seqlen_kv = 229

    packing: Packing = Starts()  # type: ignore[assignment]
    inputs = drawn(300, 8, 64), drawn(300, 2, 64, seed=1), drawn(300, 2, 64, seed=2)
    results = []
    for is_ours in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = invariant_attention(q, k, v, packing, 0.125) if is_ours else flash_attention(q, k, v, flash_arguments(packing), 0.125)[0]
        results.append([out, *torch.autograd.grad(out, (q, k, v), drawn(300, 8, 64, seed=3))])
    for ours, usual in zip(*results, strict=True):
        assert (ours - usual).norm() <= 1e-2 * usual.norm()


@pytest.mark.gpu
def test_log_prob_of_a_row_does_not_depend_on_other_rows_and_padding() -> None:
    logits = 4 * torch.randn(200, 50257, device="cuda")
    whole = invariant.log_softmax(logits)
    assert (whole - logits.double().log_softmax(-1)).abs().max() < 2e-5
    assert torch.equal(invariant.log_softmax(F.pad(logits, (0, 47))[:, :50257]), whole)
    for count in (1, 2, 7, 64):
        assert torch.equal(invariant.log_softmax(logits[5 : 5 + count]), whole[5 : 5 + count])
