"""Messages between ranks: states with probs, gathered and summed, against dense operations."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.messages import UNROUTED, MessageLayout
from mtpctl.kernels.rows import count_destinations, expert_order
from tests.fakes.message_cases import MESSAGE_CASES, MessageCase, assert_messages_match


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MESSAGE_CASES, ids=str)
def test_messages_match_dense_operations(case: MessageCase, dtype: torch.dtype, device: str) -> None:
    assert_messages_match(case, dtype, device)


@pytest.mark.parametrize(("width", "dtype"), [(7, torch.bfloat16), (8, torch.bfloat16), (5, torch.float32)])
def test_parts_of_a_message_are_aligned(width: int, dtype: torch.dtype) -> None:
    layout = MessageLayout(width, dtype, 3, torch.float32)
    routes = torch.tensor([[True, False, True, False, False, False], [False, True, False, False, False, True]])
    order = count_destinations(routes, 2).order(2)
    probs = torch.rand(2, 6)
    message = layout.pack(torch.randn(2, width).to(dtype), probs, routes, order)
    states, sent_probs = layout.split(message)
    for part in (states, sent_probs):
        assert (part.data_ptr() - message.data_ptr()) % 16 == part.stride(0) * part.element_size() % 16 == 0
    expected = probs.where(routes, UNROUTED).view(4, 3)[[0, 2, 3]]
    assert sent_probs.equal(expected)
    assert expert_order(sent_probs, 2, 1, 4, unrouted=UNROUTED).ends.tolist() == [2, 3, 4]
