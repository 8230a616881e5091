"""The engine's n-gram speculator, which a recipe sets by `rollout.speculation.method`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import torch

from mtpctl.model.parallel import Rank
from mtpctl.recipe.rollout import SpeculationConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engine_checkpoints import cycle_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import cpu_settings
from tests.fakes.forked import run_ranks

CONFIG = tiny_config(vocab_size=32, num_hidden_layers=1, intermediate_size=64)
NGRAM = SpeculationConfig(method="ngram", num_tokens=2)


def test_ngram_drafts_are_counted_and_leave_the_logprobs_of_the_policy(tmp_path: Path) -> None:
    tensors = cycle_tensors(CONFIG, 4, 4)
    folder = write_checkpoint(tmp_path, CONFIG, tensors)

    async def respond() -> Sample:
        engine = await VllmEngine.start(cpu_settings(folder, speculation=NGRAM))
        sample = await engine.generate(GenerationRequest(Sample("p", "g", [1, 5]), 60, temperature=1.0, seed=0))
        await engine.shutdown()
        return sample

    def work(rank: Rank) -> Sample:
        os.environ["NUMBA_DISABLE_JIT"] = "1"  # compiling the search takes longer than the response
        return asyncio.run(respond())

    # In a separate process: the speculator imports numba. vLLM 0.32 starts no second engine in a process that has imported numba, and its
    # threads make ranks hang that are forked later.
    samples, error = run_ranks(1, work, 250)
    assert not error, error
    (sample,) = samples
    # The toy counts in steps of 4 modulo 32, so its ninth token repeats the first one, and every draft is right from then on.
    assert sample.response_ids.tolist() == [(5 + 4 * place) % 32 for place in range(1, 61)]
    counts = sample.speculation
    assert counts.drafted == counts.accepted > 20 and counts.steps < 45
    wanted = reference_logprobs(CONFIG, tensors, [*sample.prompt_ids, *sample.response_ids])[1:]
    torch.testing.assert_close(torch.tensor(sample.behaviour_logprobs, dtype=torch.float64), wanted, atol=1e-5, rtol=0)
