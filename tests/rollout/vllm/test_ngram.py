"""The engine's n-gram speculator, which a recipe sets in `rollout.engine_args`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from tests.rollout.checkpoints import cycle_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.rollout.conftest import Loop, cpu_settings

pytestmark = pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")

CONFIG = tiny_config(vocab_size=32, num_hidden_layers=1, intermediate_size=64)


def test_ngram_drafts_are_counted_and_leave_the_logprobs_of_the_policy(
    start_engine: Callable[[VllmSettings], VllmEngine], run: Loop, tmp_path: Path
) -> None:
    tensors = cycle_tensors(CONFIG, 4, 4)
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 2}}
    engine = start_engine(cpu_settings(write_checkpoint(tmp_path, CONFIG, tensors), k=0, engine_args=ngram))
    sample: Sample = run(engine.generate(GenerationRequest(Sample("p", "g", [1, 5]), 60, temperature=1.0, seed=0)))
    # The toy counts in steps of 4 modulo 32, so its ninth token repeats the first one, and every draft is right from then on.
    assert sample.response_ids.tolist() == [(5 + 4 * place) % 32 for place in range(1, 61)]
    counts = sample.speculation
    assert counts.drafted == counts.accepted > 20 and counts.steps < 45
    wanted = reference_logprobs(CONFIG, tensors, sample.prompt_ids + sample.response_ids)[1:]
    torch.testing.assert_close(torch.tensor(sample.behaviour_logprobs, dtype=torch.float64), wanted, atol=1e-5, rtol=0)
