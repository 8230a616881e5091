"""Cost of `numerics: bitwise` on a CPU: tokens per CPU second of engine and trainer, compared with the default numerics.

    python benchmarks/numerics.py
    python benchmarks/numerics.py --drafts 3 --requests 64 --rounds 5

The model is the one of `tiny_mtp` with random weights. Engine and trainer run in this process on one thread, one after the other, and the
figure is CPU time, so other processes on the machine hardly affect it. The differences are those of the engine's log-probs from the
trainer's.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}  # before torch is imported, as in an engine's actor

import torch

from harness import parser, print_environment, print_spread
from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.model import hf_config
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import build_engine_settings
from mtpctl.samples import GenerationRequest, Sample, ids_of
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken

NUMERICS: tuple[Numerics, ...] = ("default", "bitwise")
PROMPT, RESPONSE = 12, 48


async def sampled(folder: Path, numerics: Numerics, drafts: int, requests: int, rounds: int) -> tuple[list[Sample], list[float]]:
    """The last round's responses, and each round's tokens per CPU second, after a warm-up round."""
    rollout = VllmConfig(max_in_flight=requests, threads=1, kv_cache_bytes=64 << 20, speculation=SpeculationConfig(num_tokens=drafts))
    engine = await VllmEngine.start(build_engine_settings(rollout, model=str(folder), precision="fp32", device="cpu", numerics=numerics))
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(PROMPT)] for _ in range(requests)]
    rates: list[float] = []
    samples: list[Sample] = []
    try:
        for _ in range(rounds + 1):
            began = time.process_time()
            answers = (
                engine.generate(GenerationRequest(Sample("p", "g", ids_of(prompt)), RESPONSE, temperature=1.0)) for prompt in prompts
            )
            samples = await asyncio.gather(*answers)
            rates.append(sum(len(sample.response_ids) for sample in samples) / (time.process_time() - began))
    finally:
        await engine.shutdown()
    return samples, rates[1:]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--drafts", type=int, default=1, help="draft tokens per step")
    arguments.add_argument("--requests", type=int, default=64, help="requests in flight")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    print_environment()
    torch.set_num_threads(1)
    config = hf_config(load_recipe("tiny_mtp").recipe.model)
    assert config is not None
    with tempfile.TemporaryDirectory() as scratch:
        folder = create_hf_folder(config, Path(scratch) / "model", seed=0)
        for numerics in NUMERICS:
            samples, rates = asyncio.run(sampled(folder.path, numerics, options.drafts, options.requests, options.rounds))
            print_spread(
                f"{numerics:8} engine, {options.drafts} drafts, {options.requests} in flight", rates, "tokens per CPU second", ".0f"
            )
            measure_trainer(folder, numerics, samples, options.rounds)


def measure_trainer(folder: HfFolder, numerics: Numerics, samples: list[Sample], rounds: int) -> None:
    """Print the tokens per CPU second of scoring and of updates, and the differences of log-probs."""
    inputs = [Sequence(list(sample.token_ids), len(sample.prompt_ids), list(sample.loss_mask)) for sample in samples]
    tokens = sum(len(sequence.token_ids) for sequence in inputs)
    trainer = MegatronEngine(folder, EngineConfig(ParallelConfig(), numerics=numerics, tokens_per_microbatch=4096))
    try:
        scores = trainer.score(inputs)
        pairs = zip(scores, samples, strict=True)
        errors = torch.cat([(torch.tensor(score.logprobs) - torch.tensor(sample.behaviour_logprobs)).abs() for score, sample in pairs])
        trainer.set_optimizer(OptimizerConfig())
        for name, run in (("score", lambda: trainer.score(inputs)), ("update", lambda: trainer.update(inputs, NextToken()))):
            rates = []
            for _ in range(rounds + 1):
                began = time.process_time()
                run()
                rates.append(tokens / (time.process_time() - began))
            print_spread(f"{numerics:8} trainer, {name}", rates[1:], "tokens per CPU second", ".0f")
        differ = int((errors != 0).sum())
        print(f"{numerics:8} {differ} of {len(errors)} log-probs differ, by {float(errors.mean()):.1e} nats on average")
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
