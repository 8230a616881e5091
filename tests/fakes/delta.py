"""Inputs of gated DeltaNet, and its outputs for packed sequences and for the steps of an engine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.kernels import exact_delta
from mtpctl.kernels.exact_delta import DeltaCache, DeltaWeights

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 12, 20, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


class Inputs(NamedTuple):
    mixed: Tensor
    alpha: Tensor
    beta: Tensor
    weights: DeltaWeights


def drawn_inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Inputs:
    """Random inputs of a sequence; all seeds have the same weights."""

    def draw(*shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    taps, decay, bias = draw(CHANNELS, WIDTH, seed=90), draw(VALUE_HEADS, seed=91), draw(VALUE_HEADS, seed=92)
    weights = DeltaWeights(taps, decay.float(), bias, KEY_HEADS, KEY_DIM)
    sequence = draw(tokens, CHANNELS + 2 * VALUE_HEADS, seed=seed)
    mixed, alpha, beta = sequence.split([CHANNELS, VALUE_HEADS, VALUE_HEADS], dim=1)
    return Inputs(mixed, alpha, beta, weights)


def packed(samples: list[Inputs]) -> list[Tensor]:
    """Outputs of samples in one row, as in a trainer."""
    lengths = [len(sample.mixed) for sample in samples]
    mixed, alpha, beta = (torch.cat([sample[index] for sample in samples]) for index in range(3))
    starts = torch.tensor([0, *lengths], device=mixed.device).cumsum(0)
    cache = DeltaCache.empty(samples[0].weights, len(samples), mixed)
    return list(exact_delta.run(mixed, alpha, beta, samples[0].weights, starts, cache).split(lengths))


def in_steps(sample: Inputs, steps: list[int], drafts: int = 0, accepted: list[int] | None = None) -> Tensor:
    """Outputs of a sample whose first tokens take steps of these sizes, as in an engine, next to another sequence.

    accepted: numbers of tokens that further steps with `drafts` drafts accept, until the sample ends. Its other tokens are random.
    """
    device, weights = sample.mixed.device, sample.weights
    other = drawn_inputs(4, seed=7, dtype=sample.mixed.dtype, device=str(device))
    slots, first = 2 + 2 * drafts + 2, torch.tensor([[1], [2]], device=device)
    windows = torch.full((slots, CHANNELS, WIDTH - 1 + drafts), float("nan"), device=device, dtype=sample.mixed.dtype)
    states = torch.full((slots, VALUE_HEADS, KEY_DIM, VALUE_DIM), float("nan"), device=device)
    outputs, done, valid = [], 0, 1

    def run(tokens: Inputs, slots: Tensor, accepted: int, other_tokens: int) -> Tensor:
        rows = [torch.cat([tokens[index], other[index][:other_tokens]]) for index in range(3)]
        starts = torch.tensor([0, len(tokens.mixed), len(rows[0])], device=device)
        cache = DeltaCache(windows, states, slots, torch.tensor([accepted, 0], device=device))
        return exact_delta.run(rows[0], rows[1], rows[2], weights, starts, cache)[: len(tokens.mixed)]

    for index, count in enumerate(steps):
        part = Inputs(*(x[done : done + count] for x in sample[:3]), weights=weights)
        outputs.append(run(part, first, int(index > 0), index % 4))
        done += count
    table = torch.cat([first, torch.arange(3, 3 + 2 * drafts, device=device).view(2, drafts)], dim=1)
    for step, count in enumerate(accepted or ()):
        if done == len(sample.mixed):
            break
        right = min(count, len(sample.mixed) - done)
        wrong = drawn_inputs(1 + drafts - right, seed=1000 + step, dtype=sample.mixed.dtype, device=str(device))
        part = Inputs(*(torch.cat([x[done : done + right], y]) for x, y in zip(sample[:3], wrong[:3], strict=True)), weights=weights)
        outputs.append(run(part, table, valid, 1 + drafts)[:right])
        done, valid = done + right, right
    assert done == len(sample.mixed)
    return torch.cat(outputs)
