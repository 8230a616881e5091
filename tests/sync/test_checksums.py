"""The checksum sees every bit and every place, whatever the dtype and the layout."""

from __future__ import annotations

import pytest
import torch

from mtpctl.sync.checksums import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_changes_with_one_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 100).to(dtype)
    before = checksum(tensor)
    tensor.view(torch.uint8)[17] ^= 1
    assert checksum(tensor) != before


def test_changes_when_elements_swap() -> None:
    assert checksum(torch.tensor([1.0, 2.0, 3.0])) != checksum(torch.tensor([2.0, 1.0, 3.0]))


def test_changes_with_trailing_zeros() -> None:
    assert checksum(torch.tensor([1.0])) != checksum(torch.tensor([1.0, 0.0]))


def test_is_the_same_for_equal_bytes_in_another_layout() -> None:
    tensor = torch.randn(6, 8)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)


def test_spans_chunks() -> None:
    tensor = torch.zeros((1 << 20) + 3)
    before = checksum(tensor)
    tensor[-1] = 1
    assert checksum(tensor) != before
