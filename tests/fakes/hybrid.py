"""A hybrid model's responses and how far the trainer's log-probs are from them, in the rounding of bf16."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from mtpctl.rollout.protocol import ABORTED
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample


def mismatch(folder: Path, samples: list[Sample], file: Path) -> float:
    """Mean difference between the engine's log-probs and the trainer's in bf16, in nats; under the engine's routes if there are any."""
    file.write_text(json.dumps([sample.to_dict() for sample in samples]))
    command = [sys.executable, "-m", "tests.fakes.scored", str(folder), str(file)]
    scored = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(json.loads(scored.stdout.splitlines()[-1])["replayed"]["mean"])


async def answers(engine: VllmEngine, prompts: list[list[int]], tokens: int) -> list[Sample]:
    """One response to each prompt, all at once. A response that is aborted goes on, as in a pool."""

    async def answer(index: int, prompt: list[int]) -> Sample:
        sample = Sample(f"p{index}", "g", prompt)
        while True:
            sample = await engine.generate(GenerationRequest(sample, tokens, seed=index, temperature=1.0))
            if sample.finish_reason != ABORTED:
                return sample
            await asyncio.sleep(0.01)

    return await asyncio.gather(*(answer(index, prompt) for index, prompt in enumerate(prompts)))
