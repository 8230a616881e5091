"""The engine's n-gram speculator, which a recipe sets by `rollout.speculation.method`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtpctl.recipe.rollout import SpeculationConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engine_checkpoints import cycle_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import START_S, Loop, cpu_settings

CONFIG = tiny_config(vocab_size=32, num_hidden_layers=1, intermediate_size=64)


@pytest.fixture
def engine(run: Loop, tmp_path: Path) -> Iterator[VllmEngine]:
    speculation = SpeculationConfig(method="ngram", num_tokens=2)
    folder = write_checkpoint(tmp_path, CONFIG, cycle_tensors(CONFIG, 4, 4))
    created = run(VllmEngine.start(cpu_settings(folder, speculation=speculation)), START_S)
    yield created
    run(created.shutdown())
    # Of numba, which the speculator imports. vLLM 0.32 searches all modules for kernels when an engine starts, and fails at this one.
    del sys.modules["llvmlite.binding.ffi"]


@pytest.mark.filterwarnings(r"ignore:[\s\S]*type 'reflected list' found for argument")  # vLLM's use of what numba deprecates
def test_ngram_drafts_are_counted_and_leave_the_logprobs_of_the_policy(engine: VllmEngine, run: Loop) -> None:
    sample = run(engine.generate(GenerationRequest(Sample("p", "g", [1, 5]), 60, temperature=1.0, seed=0)))
    # The toy counts in steps of 4 modulo 32, so its ninth token repeats the first one, and every draft is right from then on.
    assert sample.response_ids.tolist() == [(5 + 4 * place) % 32 for place in range(1, 61)]
    counts = sample.speculation
    assert counts.drafted == counts.accepted > 20 and counts.steps < 45
    wanted = reference_logprobs(CONFIG, cycle_tensors(CONFIG, 4, 4), [*sample.prompt_ids, *sample.response_ids])[1:]
    torch.testing.assert_close(torch.tensor(sample.behaviour_logprobs, dtype=torch.float64), wanted, atol=1e-5, rtol=0)
