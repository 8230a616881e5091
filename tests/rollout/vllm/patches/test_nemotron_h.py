"""Nemotron-H in vLLM's CPU backend: experts without a gate, and Mamba-2 layers that verify drafts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.rollout.vllm.patches.cpu_kernels import sum_experts
from mtpctl.rollout.vllm.patches.nemotron_h import _ignores_accepted, run_ungated, scan_drafts

HEADS, GROUPS, WIDTH, STATE = 4, 2, 3, 5


def test_experts_equal_their_definition() -> None:
    torch.manual_seed(0)
    states, up, down = torch.randn(7, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    weights, experts = torch.rand(7, 2), torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    experts[2, 0] = -1
    out = sum_experts(states, weights, experts, lambda rows, expert: run_ungated(rows, up[expert], down[expert]))
    for token in range(7):
        expected = sum(
            weight * (down[expert] @ F.relu(up[expert] @ states[token]) ** 2)
            for weight, expert in zip(weights[token], experts[token], strict=True)
            if expert >= 0
        )
        torch.testing.assert_close(out[token], expected, atol=1e-4, rtol=1e-5)


def token_by_token(
    state: Tensor, x: Tensor, steps: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The states after, and the outputs at, each token of one sequence."""
    states, outputs = [], []
    for t in range(len(x)):
        head_outputs, head_states = [], []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            after = state[head] * torch.exp(steps[t, head] * decay[head]) + steps[t, head] * torch.outer(x[t, head], b[t, group])
            head_outputs.append(after @ c[t, group] + skip[head] * x[t, head])
            head_states.append(after)
        state = torch.stack(head_states)
        states.append(state)
        outputs.append(torch.stack(head_outputs))
    return states, outputs


@pytest.mark.parametrize(
    ("lengths", "accepted"), [([1], [1]), ([3], [1]), ([3], [3]), ([3, 1, 2], [2, 3, 1]), ([2, 0, 1, 0], [1, 0, 2, 0])]
)
def test_a_step_continues_from_the_last_accepted_token(lengths: list[int], accepted: list[int]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    tokens, slots = sum(lengths), torch.arange(1, 1 + 3 * len(lengths)).view(-1, 3)
    states, x, b, c = (
        drawn(1 + slots.numel(), HEADS, WIDTH, STATE),
        drawn(tokens, HEADS, WIDTH),
        drawn(tokens, GROUPS, STATE),
        drawn(tokens, GROUPS, STATE),
    )
    steps, decay, skip = F.softplus(drawn(tokens, HEADS)), -drawn(HEADS).exp(), drawn(HEADS)
    before, out = states.clone(), torch.empty_like(x)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    scan_drafts(states, x, steps, decay, b, c, skip, slots, torch.tensor(accepted), bounds, out)
    for sequence, (length, count) in enumerate(zip(lengths, accepted, strict=True)):
        if not length:  # padding
            assert torch.equal(states[slots[sequence]], before[slots[sequence]])
            continue
        rows = slice(int(bounds[sequence]), int(bounds[sequence + 1]))
        after, outputs = token_by_token(before[slots[sequence, count - 1]], x[rows], steps[rows], decay, b[rows], c[rows], skip)
        torch.testing.assert_close(out[rows], torch.stack(outputs), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[slots[sequence, :length]], torch.stack(after), atol=1e-5, rtol=1e-5)
        assert torch.equal(states[slots[sequence, length:]], before[slots[sequence, length:]])


def test_upstream_ignores_accepted_tokens() -> None:
    assert _ignores_accepted()
