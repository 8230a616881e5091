"""Gradient buffers: an update's first gradient replaces what they hold, and later ones are added."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.main_grad import accumulate_weight_grad, mark_stale, take_stale


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 1e-2),
        pytest.param("cuda", torch.float32, 1e-6, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 1e-5, marks=pytest.mark.gpu),
    ],
)
def test_the_first_product_replaces_and_the_second_is_added(device: str, dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = torch.full((16, 24), torch.nan, device=device)
    mark_stale(buffer)
    right = torch.zeros(16, 24, dtype=torch.float64)
    for _ in range(2):
        grad, x = (torch.randn(40, width, generator=generator).to(device, dtype) for width in (16, 24))
        accumulate_weight_grad(buffer, grad, x)
        right += grad.double().t().cpu() @ x.double().cpu()
        assert (buffer.cpu().double() - right).norm() <= bound * right.norm()


def test_a_buffer_that_nobody_marked_is_added_to() -> None:
    buffer = torch.ones(2)
    assert not take_stale(buffer)
    mark_stale(buffer)
    assert take_stale(buffer) and not take_stale(buffer)
