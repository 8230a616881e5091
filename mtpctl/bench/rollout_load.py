"""The two ways in which `mtpctl bench rollout` sends requests: vLLM's offline generation, and mtpctl's pool of actors."""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from mtpctl.bench.cycle_model import answer
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import SpecStats
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send, with at most `batch` in flight: prompts, and the number of tokens of each answer."""

    name: str
    batch: int
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        """Response tokens in all."""
        return sum(self.lengths)


def make_load(name: str, batch: int, count: int, *, prompt: int, tokens: int, spread: float, vocab: int, hopeless: bool = False) -> Load:
    """`count` random prompts of `prompt` tokens, and answers of `tokens` tokens, or of 1 ± `spread` times as many.

    A `hopeless` load stays in the upper half of the vocabulary, where a cycle model drafts nothing right; others in the lower half.
    """
    draw = random.Random(f"{name} {batch} {count} {hopeless}")
    half, room = vocab // 2, vocab // 2 - 2 * tokens
    assert room > 0, "answers do not leave their half of the vocabulary"
    prompts = [[draw.randrange(half) for _ in range(prompt - 1)] + [draw.randrange(room) + half * hopeless] for _ in range(count)]
    lengths = [max(1, round(tokens * draw.uniform(1 - spread, 1 + spread))) for _ in range(count)]
    return Load(name, batch, prompts, lengths)


@dataclass(slots=True)
class Run:
    """One load sent once: `seconds` from the first request to the last answer.

    `idle`: share of the engine's slots that were empty while more requests waited, None where all were sent at once. `wrong`: answers
    that are not the model's.
    """

    seconds: float
    tokens: int
    wrong: int
    idle: float | None = None
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens a second."""
        return self.tokens / self.seconds


class OfflineEngine:
    """vLLM's `LLM` in a process of its own, which `start_offline` starts as a Ray actor."""

    def __init__(self, settings: VllmSettings) -> None:
        os.environ.update(settings.environment)
        import torch
        from vllm import LLM

        if settings.threads:
            torch.set_num_threads(settings.threads)
        ours = ("weight_transfer_config", "worker_extension_cls", "per_request_spec_decode_metrics")
        self._llm = LLM(**{name: value for name, value in settings.args.items() if name not in ours})

    def send(self, load: Load, vocab: int, logprobs: bool) -> Run:
        """Send one load and wait for its answers."""
        from vllm import SamplingParams, TokensPrompt

        settings = [
            SamplingParams(
                temperature=1.0,
                seed=number,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if logprobs else None,
                flat_logprobs=logprobs,
            )
            for number, length in enumerate(load.lengths)
        ]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in load.prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - began
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return Run(seconds, sum(map(len, answers)), _wrong(load, answers, vocab))


def start_offline(settings: VllmSettings, *, cpus: float, gpus: float) -> Any:
    """Start `OfflineEngine` as a Ray actor, and return its handle."""
    import ray

    environment = {"env_vars": settings.environment}
    return ray.remote(OfflineEngine).options(num_cpus=cpus, num_gpus=gpus, runtime_env=environment).remote(settings)


async def send(pool: ReplicaPool, load: Load, vocab: int, replicas: int = 1) -> Run:
    """Send one load through the pool and wait for its answers."""
    clock = time.perf_counter
    full: list[tuple[float, float]] = []

    async def served() -> float:
        return sum(health.occupied_s for health in await pool.health())

    async def requests() -> AsyncIterator[GenerationRequest]:
        for number, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
            if number == 2 * load.batch:
                full.append((clock(), await served()))
            yield GenerationRequest(Sample(str(number), str(number), prompt), length, seed=number)
        if full:
            full.append((clock(), await served()))

    samples: dict[int, Sample] = {}
    began = clock()
    async with aclosing(pool.generate(requests())) as answered:
        async for sample in answered:
            samples[int(sample.prompt_id)] = sample
    seconds = clock() - began
    stats = SpecStats()
    for sample in samples.values():
        stats.add(sample.speculation, len(sample.response_ids))
    answers = [samples[number].response_ids.tolist() for number in range(len(load.prompts))]
    idle = None
    if len(full) == 2:
        (first, before), (last, after) = full
        idle = 1 - (after - before) / (load.batch * replicas * (last - first))
    return Run(seconds, sum(map(len, answers)), _wrong(load, answers, vocab), idle, stats)


def _wrong(load: Load, answers: list[list[int]], vocab: int) -> int:
    """How many answers are not those of the cycle model."""
    wanted = (answer(prompt[-1], length, vocab) for prompt, length in zip(load.prompts, load.lengths, strict=True))
    return sum(found != right for found, right in zip(answers, wanted, strict=True))
