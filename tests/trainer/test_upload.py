"""Arrays come to a device as they are, in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtpctl.trainer.batch import in_one_copy, to_device

ARRAYS = [
    np.arange(7),
    np.zeros(0, np.float32),
    np.array([True, False, True]),
    np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    np.array([3, 5], np.int32),
    np.arange(4, dtype=np.uint8),
]


@pytest.mark.parametrize("bring", [to_device, in_one_copy])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shapes_dtypes_and_values_are_kept(bring, device: str) -> None:
    found = bring(ARRAYS, device)
    for tensor, array in zip(found, ARRAYS, strict=True):
        assert tensor.device.type == device and tensor.cpu().equal(torch.from_numpy(array.copy()))


def test_tensors_of_one_copy_share_a_storage() -> None:
    assert len({each.untyped_storage().data_ptr() for each in in_one_copy(ARRAYS, "cpu") if each.numel()}) == 1
    assert in_one_copy([], "cpu") == []
