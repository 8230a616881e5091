"""One response of an engine with the n-gram speculator, as JSON: `python -m tests.fakes.ngram FOLDER`.

In a separate process: the speculator imports numba. vLLM 0.32 starts no second engine in a process that has imported numba, and its
threads make ranks hang that are forked later.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from mtpctl.recipe.rollout import SpeculationConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engines import cpu_settings

NGRAM = SpeculationConfig(method="ngram", num_tokens=2)


async def main(folder: str) -> None:
    engine = await VllmEngine.start(cpu_settings(Path(folder), speculation=NGRAM))
    sample = await engine.generate(GenerationRequest(Sample("p", "g", [1, 5]), 60, temperature=1.0, seed=0))
    print(json.dumps(sample.to_dict()))
    await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
