"""Logits of a router in fp32, from operands in half precision, and their gradients."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.routing import router_logits


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(700, 128, 256), (9, 5, 96)])
def test_logits_are_fp32_and_gradients_rounded_once(device: str, dtype: torch.dtype, tokens: int, experts: int, hidden: int) -> None:
    torch.manual_seed(0)
    states, weight = (torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in ((tokens, 1, hidden), (experts, hidden)))
    upstream = torch.randn(tokens, 1, experts, device=device)
    logits = router_logits(states, weight)
    assert logits.dtype == torch.float32 and logits.shape == (tokens, 1, experts)
    exact = [each.detach().double().requires_grad_() for each in (states, weight)]
    right = exact[0] @ exact[1].t()
    assert (logits.double() - right).norm() <= 1e-6 * right.norm()
    found, wanted = torch.autograd.grad(logits, [states, weight], upstream), torch.autograd.grad(right, exact, upstream.double())
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() <= 1.05 * (theirs.to(dtype).double() - theirs).norm() + 1e-6 * theirs.norm()
