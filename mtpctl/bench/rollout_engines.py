"""Loads and engines of `mtpctl bench rollout`: vLLM's offline generation and mtpctl's pool, with the same model.

Throughput varies with other load on the host by more than the bounds on the ratios. Therefore all engines are resident, and each load is
sent to them in turn.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtpctl.bench.cycle_model import TINY, answer, write_cycle_model
from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster
from mtpctl.errors import UserError
from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe.schema import ClusterConfig, Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import SpecStats
from mtpctl.rollout.start import start_pool
from mtpctl.rollout.vllm.settings import VllmSettings, engine_settings
from mtpctl.samples import GenerationRequest, Sample

START_S = 420.0
GPU_MEMORY_FRACTION = 0.9
"""Share of GPU memory for all engines together."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send, at most `batch` at a time. lengths: number of tokens of each answer."""

    name: str
    batch: int
    prompts: list[list[int]]
    lengths: list[int]


def make_load(name: str, batch: int, count: int, *, prompt: int, tokens: int, spread: float, vocab: int, hopeless: bool = False) -> Load:
    """Make a load with random prompts for a cycle model.

    Args:
        name: name of the load.
        batch: maximum number of concurrent requests.
        count: number of requests.
        prompt: tokens of each prompt.
        tokens: mean tokens of an answer; lengths are uniform in `tokens * (1 ± spread)`.
        spread: see `tokens`.
        vocab: the model's vocabulary size.
        hopeless: use answers in the upper half of the vocabulary, where all drafts are wrong, instead of the lower half.
    """
    draw = random.Random(f"{name} {batch} {count} {hopeless}")
    half, room = vocab // 2, vocab // 2 - 2 * tokens
    assert room > 0, "answers do not leave their half of the vocabulary"
    prompts = [[draw.randrange(half) for _ in range(prompt - 1)] + [draw.randrange(room) + half * hopeless] for _ in range(count)]
    lengths = [max(1, round(tokens * draw.uniform(1 - spread, 1 + spread))) for _ in range(count)]
    return Load(name, batch, prompts, lengths)


@dataclass(slots=True)
class Run:
    """The result of sending a load once. seconds: from the first request to the last answer.

    wrong: number of answers that differ from the expected ones. idle: share of the engine's slots that were empty while requests were
    queued; None if all requests were sent at once.
    """

    seconds: float
    tokens: int
    wrong: int
    idle: float | None = None
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class OfflineEngine:
    """vLLM's `LLM` in a Ray actor."""

    def __init__(self, settings: VllmSettings) -> None:
        os.environ.update(settings.environment)
        import torch
        from vllm import LLM

        if settings.threads:
            torch.set_num_threads(settings.threads)
        own = ("weight_transfer_config", "worker_extension_cls", "per_request_spec_decode_metrics")
        self._llm = LLM(**{name: value for name, value in settings.args.items() if name not in own})

    def send(self, load: Load, vocab: int | None, logprobs: bool) -> Run:
        """Send a load. vocab: the cycle model's vocabulary size, to check its answers; None for another model."""
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
        return Run(seconds, sum(map(len, answers)), 0 if vocab is None else _wrong(load, answers, vocab))


async def send(pool: ReplicaPool, load: Load, vocab: int) -> Run:
    """Send a load through a pool with one replica, and wait for all answers."""
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
        idle = 1 - (after - before) / (load.batch * (last - first))
    return Run(seconds, sum(map(len, answers)), _wrong(load, answers, vocab), idle, stats)


def _wrong(load: Load, answers: list[list[int]], vocab: int) -> int:
    """The number of answers that differ from those of the cycle model."""
    expected = (answer(prompt[-1], length, vocab) for prompt, length in zip(load.prompts, load.lengths, strict=True))
    return sum(ids != right for ids, right in zip(answers, expected, strict=True))


Send = Callable[[Load], Awaitable[Run]]
"""Sends a load and waits for its answers."""
Offline = Callable[[Load, bool], Awaitable[Run]]
"""Sends a load through vLLM's offline generation, with or without log-probs."""


@dataclass(frozen=True, slots=True)
class Options:
    """prompt, tokens: tokens of a request's prompt and answer. drafts: maximum number of draft tokens per step."""

    shape: Literal["mimo7b", "tiny"]
    folder: Path
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    drafts: int
    acceptance: float
    rounds: int
    device: Literal["cpu", "cuda"]
    eager: bool = False


def parse_shape(text: str) -> Literal["mimo7b", "tiny"]:
    """Check the name of a shape. Raises UserError if it is unknown."""
    if text == "mimo7b":
        return "mimo7b"
    if text == "tiny":
        return "tiny"
    raise UserError(f"--shape: must be mimo7b or tiny, got {text}")


def config_of(shape: Literal["mimo7b", "tiny"]) -> dict[str, object]:
    """The `config.json` fields of a shape, with a `model_type` that vLLM supports without `mtpctl.compat.transformers.register_mimo`."""
    return TINY if shape == "tiny" else hub_config("XiaomiMiMo/MiMo-7B-RL") | {"model_type": "qwen2"}


class Bench:
    """Creates the model, its loads and its engines. at_once: number of engines that share the GPU."""

    def __init__(self, options: Options, say: Callable[[str], None], at_once: int) -> None:
        self.options, self.at_once = options, at_once
        config = config_of(options.shape)
        self.shape = shape_of(config)
        longest = self.shape.vocab // 4 - 1
        if options.tokens > longest:
            raise UserError(f"--tokens: {options.tokens} is too long for a vocabulary of {self.shape.vocab}; at most {longest}")
        if self.context > self.shape.max_positions:
            raise UserError(
                f"--prompt: {options.prompt} tokens and answers of up to {2 * options.tokens} take {self.context} positions, the model has "
                f"{self.shape.max_positions}; reduce --prompt or --tokens"
            )
        write_cycle_model(options.folder, config, acceptance=options.acceptance, device=options.device)
        say(f"model: {options.folder}, {count_parameters(self.shape)['total']:,} parameters")

    def loads(self, *, hopeless: bool = False) -> list[Load]:
        """One load for each batch size, whose requests are all sent at once."""
        return [self._load(f"batch {batch}", batch, batch, 0.0, hopeless) for batch in self.options.batches]

    def queued(self) -> Load:
        """A load with four times the largest batch, and answers of different lengths, so that slots are refilled continuously."""
        most = max(self.options.batches)
        return self._load(f"{most} in flight, {4 * most} in all", most, 4 * most, 0.5, False)

    def _load(self, name: str, batch: int, count: int, spread: float, hopeless: bool) -> Load:
        options = self.options
        return make_load(
            name, batch, count, prompt=options.prompt, tokens=options.tokens, spread=spread, vocab=self.shape.vocab, hopeless=hopeless
        )

    def recipe(self, drafts: int) -> Recipe:
        """The recipe of an engine for the largest batch.

        CUDA graphs are captured for the batch sizes of the loads, for smaller batches (when requests end), and for steps with prefill.
        """
        options = self.options
        most = max(options.batches)
        rollout: dict[str, object] = {
            "engine": "vllm",
            "max_in_flight": most,
            "max_tokens": 2 * options.tokens,
            "threads": 1 if options.device == "cpu" else 0,
            "eager": options.eager,
            "speculation": {"num_tokens": drafts, "auto": drafts > 0},
        }
        if options.device == "cuda":
            room = most * (options.prompt + options.tokens + 32)
            rollout["kv_cache_bytes"] = room * kv_bytes_per_token(self.shape, 1, 2, drafting=True)
            rollout["gpu_memory"] = GPU_MEMORY_FRACTION / self.at_once
            if not options.eager:
                counts = sorted({1, 2, 4, *options.batches, *range(32, most + 1, 32)})
                mixed = range(most, 2 * most + 1, max(1, most // 4))
                sizes = sorted({*(count * width for count in counts for width in range(1, drafts + 2)), *mixed})
                rollout["engine_args"] = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        return engine_recipe(options.folder, options.device, rollout)

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt with its answer, plus a margin."""
        return self.options.prompt + 2 * self.options.tokens + 64

    @property
    def _gpus(self) -> float:
        return round(1 / self.at_once, 2) if self.options.device == "cuda" else 0.0

    def cluster(self) -> AbstractContextManager[object]:
        """A local Ray cluster with room for the engines."""
        gpus = 1 if self.options.device == "cuda" else 0
        config = ClusterConfig(device=self.options.device, num_cpus=None if gpus else self.at_once + 1)
        return cluster(config, cpus=self.at_once, gpus=gpus)

    def pool(self, drafts: int) -> AbstractAsyncContextManager[ReplicaPool]:
        """A pool with one engine. drafts: maximum number of draft tokens; the engine selects the number until `speculate` sets it."""
        return engine_pool(self.recipe(drafts), self.options.folder, self.context, self.options.device, self._gpus)

    @asynccontextmanager
    async def offline(self) -> AsyncIterator[Offline]:
        """vLLM's offline generation with the settings of `pool(0)`."""
        async with offline_actor(self.recipe(0), self.options.folder, self.context, self.options.device, self._gpus) as actor:

            async def send_offline(load: Load, logprobs: bool) -> Run:
                run: Run = await actor.send.remote(load, self.shape.vocab, logprobs)
                return run

            yield send_offline

    def through(self, pool: ReplicaPool) -> Send:
        return lambda load: send(pool, load, self.shape.vocab)


def engine_recipe(folder: Path, device: Literal["cpu", "cuda"], rollout: dict[str, object], *, mtp: str = "isolated") -> Recipe:
    """The recipe of engines that serve the model in `folder`. rollout: its section of that name; mtp: `mtp.mode`."""
    return Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "mtp": {"mode": mtp},
            "train": {"precision": "fp32" if device == "cpu" else "bf16"},
            "rollout": rollout,
            "sync": {"transport": "shm"},
            "cluster": {"device": device, "actor_deadline_s": START_S},
        }
    )


@asynccontextmanager
async def engine_pool(
    recipe: Recipe, folder: Path, context: int, device: Literal["cpu", "cuda"], gpus: float, engines: int = 1
) -> AsyncIterator[ReplicaPool]:
    """A pool with engines of the recipe. gpus: the share of a GPU of each."""
    actors = tuple(Actor("rollout", index, 0, 0, 1.0, gpus) for index in range(engines))
    pool = await start_pool(recipe, model=str(folder), context=context, placement=Placement(device, actors, 1))
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def offline_actor(recipe: Recipe, folder: Path, context: int, device: Literal["cpu", "cuda"], gpus: float) -> AsyncIterator[Any]:
    """A Ray actor with vLLM's offline engine, with the settings of the recipe's engines. gpus: its share of a GPU."""
    import ray

    settings = engine_settings(
        recipe.rollout.model_copy(update={"context": context}),  # type: ignore[arg-type]
        model=str(folder),
        precision=recipe.train.precision,
        device=device,
        admit_at_once=True,
    )
    options = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": settings.environment}}
    actor: Any = ray.remote(OfflineEngine).options(**options).remote(settings)
    try:
        await within(actor.__ray_ready__.remote(), START_S, "vLLM, start")
        yield actor
    finally:
        ray.kill(actor)


@asynccontextmanager
async def enter_all[T](*managers: AbstractAsyncContextManager[T]) -> AsyncIterator[list[T]]:
    """Enter all managers concurrently, because engines take a minute or two to start.

    If managers fail to enter, exits the others and raises the error of the first that failed.
    """
    entered = await asyncio.gather(*(manager.__aenter__() for manager in managers), return_exceptions=True)
    async with AsyncExitStack() as stack:
        for manager, value in reversed(list(zip(managers, entered, strict=True))):
            if not isinstance(value, BaseException):
                stack.push_async_exit(manager)
        ready = []
        for value in entered:
            if isinstance(value, BaseException):
                raise value
            ready.append(value)
        yield ready
