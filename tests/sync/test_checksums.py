"""The checksum depends on every bit and every position, for any dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtpctl.sync.checksums import checksum, combine_sums, partial_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_the_checksum_changes_with_one_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 100).to(dtype)
    before = checksum(tensor)
    tensor.view(torch.uint8)[17] ^= 1
    assert checksum(tensor) != before


def test_the_checksum_changes_if_elements_are_swapped() -> None:
    assert checksum(torch.tensor([1.0, 2.0, 3.0])) != checksum(torch.tensor([2.0, 1.0, 3.0]))


def test_the_checksum_changes_with_trailing_zeros() -> None:
    assert checksum(torch.tensor([1.0])) != checksum(torch.tensor([1.0, 0.0]))


def test_the_checksum_does_not_depend_on_strides() -> None:
    tensor = torch.randn(6, 8)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)


def test_the_checksum_spans_chunks() -> None:
    tensor = torch.zeros((1 << 20) + 3)
    before = checksum(tensor)
    tensor[-1] = 1
    assert checksum(tensor) != before


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (7, 30), (3, (1 << 20) + 9)])
def test_sums_equal_their_formula(dtype: torch.dtype, rows: int, columns: int) -> None:
    """Also of a part `[rows, columns - 5]` that starts in column 2, and without a change to it."""
    matrix = (100 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))).to(dtype)
    part, before = matrix[:, 2 : columns - 3], matrix.clone()
    words = part.contiguous().view({1: torch.int8, 4: torch.int32, 8: torch.int64}[part.element_size()]).numpy().astype("uint64")
    places = np.arange(matrix.numel(), dtype="uint64").reshape(rows, columns)[:, 2 : columns - 3] + np.uint64(1)
    result = partial_sums(part, matrix.numel(), columns, 2)
    assert (result.plain, result.weighted) == (int(words.sum()), int((words * places).sum()))
    assert torch.equal(matrix, before)


def test_parts_that_overlap_have_no_checksum() -> None:
    tensor = torch.arange(6.0)[None]
    parts = [partial_sums(tensor[:, start:stop], 6, 6, start) for start, stop in ((0, 4), (2, 6))]
    assert combine_sums(parts) == "columns 2 to 4 of 6 are in several parts"
