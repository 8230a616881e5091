"""Messages between expert-parallel ranks, all computed in one process."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mtpctl.kernels.messages import UNROUTED, MessageLayout
from mtpctl.kernels.rows import count_destinations, expert_order
from tests.fakes.kernel_routes import drawn_routes


class MessageCase(NamedTuple):
    tokens: int
    experts: int
    k: int
    ranks: int
    width: int


MESSAGE_CASES = [
    MessageCase(23, 6, 2, 3, 7),
    MessageCase(41, 12, 5, 2, 40),
    MessageCase(5, 8, 1, 4, 1030),
    MessageCase(3, 4, 4, 2, 8),
    MessageCase(0, 8, 2, 2, 8),
]


def assert_messages_match(case: MessageCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare each rank's rows, and the gradients of states and probs, with dense operations in float64."""
    tokens, experts, k, ranks, width = case
    local = experts // ranks
    torch.manual_seed(0)
    routes = drawn_routes(tokens, experts, k).to(device)
    states, probs = torch.randn(tokens, width).to(device, dtype), torch.rand(tokens, experts, device=device)
    layout = MessageLayout(width, dtype, local, torch.float32)
    destinations = count_destinations(routes, ranks)
    order = destinations.order(min(k, ranks))
    sent, rows_by_rank = destinations.counts.tolist()
    order = type(order)(order.row_of, order.token_of[: sum(sent)], order.pair_of[: sum(sent)], order.ends)
    message = layout.pack(states, probs, routes, order)
    message_grads = []
    exact_states_grad, magnitude = torch.zeros(2, tokens, width, dtype=torch.float64)
    exact_probs_grad = torch.zeros(tokens, experts, dtype=torch.float64)
    for rank, (part, rows) in enumerate(zip(message.split(sent), rows_by_rank, strict=True)):
        received_order = expert_order(layout.split(part)[1], min(k, local), 1, rows, unrouted=UNROUTED)
        actual, row_probs = layout.unpack(part, received_order)
        experts_of_rank = reversed(range(rank * local, rank * local + local))
        pairs = [(int(token), expert) for expert in experts_of_rank for token in routes[:, expert].nonzero()]
        row_tokens, row_experts = [token for token, _ in pairs], [expert for _, expert in pairs]
        assert actual.equal(states[row_tokens]) and row_probs.equal(probs[row_tokens, row_experts])
        rows_grad, probs_grad = torch.randn(rows, width).to(device, dtype), torch.randn(rows, device=device)
        message_grads.append(layout.pack_grads(rows_grad, probs_grad, received_order))
        for total, terms in ((exact_states_grad, rows_grad), (magnitude, rows_grad.abs())):
            total.index_add_(0, torch.tensor(row_tokens, dtype=torch.long), terms.double().cpu())
        exact_probs_grad[row_tokens, row_experts] = probs_grad.double().cpu()
    states_grad, probs_grad = layout.unpack_grads(torch.cat(message_grads), order, ranks)
    assert probs_grad.double().cpu().equal(exact_probs_grad) and states_grad.dtype == dtype
    # Each rank and the sum over ranks round once to the dtype, and at most k additions round to fp32.
    assert ((states_grad.double().cpu() - exact_states_grad).abs() <= (k + 2) * torch.finfo(dtype).eps * magnitude).all()
