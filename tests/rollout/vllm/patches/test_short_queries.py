"""The convolution state of linear attention if a sequence is queried for fewer tokens than the engine may draft, on a CPU."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional
from vllm.platforms import current_platform

from mtpctl.rollout.vllm.patches.short_queries import convolve

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU path")

CHANNELS, WIDTH = 5, 4


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_convolution_with_queries_of_any_length_equals_the_whole_sequence(drafts: int) -> None:
    """Sequences in random order of query lengths and acceptance, against one convolution over the accepted inputs (float64)."""
    generator, draw = torch.Generator().manual_seed(drafts), random.Random(drafts)
    taps = torch.randn(CHANNELS, 1, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(CHANNELS, generator=generator, dtype=torch.float64)
    sequences = 3
    kept = [torch.zeros(0, CHANNELS, dtype=torch.float64) for _ in range(sequences)]
    outputs = [torch.zeros(0, CHANNELS, dtype=torch.float64) for _ in range(sequences)]
    # State after a prefill: vLLM stores the last WIDTH - 1 inputs in the first columns, as if one token had been accepted.
    buffers = [torch.zeros(CHANNELS, WIDTH - 1 + drafts, dtype=torch.float64) for _ in range(sequences)]
    accepted = [1] * sequences
    for _ in range(40):
        lengths = [draw.randint(1, drafts + 1) for _ in range(sequences)]
        queries = torch.randn(sum(lengths), CHANNELS, generator=generator, dtype=torch.float64)
        convolved = convolve(queries, lengths, accepted, buffers, taps, bias)
        accepted = [draw.randint(1, length) for length in lengths]
        pairs = zip(queries.split(lengths), convolved.split(lengths), accepted, strict=True)
        for index, (query, output, count) in enumerate(pairs):
            kept[index] = torch.cat([kept[index], query[:count]])
            outputs[index] = torch.cat([outputs[index], output[:count]])
    for inputs, output in zip(kept, outputs, strict=True):
        padded = functional.pad(inputs.T[None], (WIDTH - 1, 0))
        torch.testing.assert_close(output, functional.conv1d(padded, taps, bias, groups=CHANNELS)[0].T)
