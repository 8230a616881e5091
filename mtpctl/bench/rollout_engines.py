"""The engines of `mtpctl bench rollout`, all of one model, on one card and loaded at the same time.

Other work on a host changes throughput from minute to minute by more than the bounds allow. So all engines are loaded, and the same load
goes to each in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtpctl.bench.cycle_model import write_cycle_model
from mtpctl.bench.rollout_load import Load, Run, make_load, send, start_offline
from mtpctl.cluster.deadlines import within
from mtpctl.errors import UserError
from mtpctl.families.configs import hub_config, toy_config
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.start import start_pool
from mtpctl.rollout.vllm.settings import engine_settings

START_S = 420.0
CARD_SHARE = 0.9
"""Share of the card for all engines together."""

Once = Callable[[Load], Awaitable[Run]]
"""Sends a load and waits for its answers."""
Offline = Callable[[Load, bool], Awaitable[Run]]
"""The same through vLLM's offline generation, with log-probs or without."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure: `prompt` tokens of each request, `tokens` of its answer, at most `drafts` draft tokens a step."""

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


TINY = toy_config(vocab_size=1024, max_position_embeddings=1024, torch_dtype="float32")


def known_shape(text: str) -> Literal["mimo7b", "tiny"]:
    """A shape by its name on the command line. Raises UserError for another."""
    if text == "mimo7b":
        return "mimo7b"
    if text == "tiny":
        return "tiny"
    raise UserError(f"--shape: must be mimo7b or tiny, got {text}")


def config_of(shape: Literal["mimo7b", "tiny"]) -> dict[str, object]:
    """The config.json fields of a shape, with a `model_type` that vLLM reads without `mtpctl.compat.mimo_config`."""
    return TINY if shape == "tiny" else hub_config("XiaomiMiMo/MiMo-7B-RL") | {"model_type": "qwen2"}


class Bench:
    """Makes the model, its loads and its engines, `at_once` of which share the card."""

    def __init__(self, options: Options, say: Callable[[str], None], at_once: int) -> None:
        self.options, self.at_once = options, at_once
        config = config_of(options.shape)
        self.shape = shape_of(config)
        most = self.shape.vocab // 4 - 1
        if options.tokens > most:
            raise UserError(f"--tokens: {options.tokens} is too long for a vocabulary of {self.shape.vocab}; at most {most}")
        if self.context > self.shape.max_positions:
            raise UserError(
                f"--prompt: {options.prompt} tokens and answers of up to {2 * options.tokens} take {self.context} positions, the model has "
                f"{self.shape.max_positions}; give fewer, or fewer --tokens"
            )
        write_cycle_model(options.folder, config, acceptance=options.acceptance, device=options.device)
        say(f"model: {options.folder}, {count_parameters(self.shape)['total']:,} parameters")

    # --------------------------------------------------------------------------------------------------------- loads

    def loads(self, *, hopeless: bool = False) -> list[Load]:
        """For every batch size, a load of so many requests at once."""
        return [self._load(f"batch {batch}", batch, batch, 0.0, hopeless) for batch in self.options.batches]

    def queued(self) -> Load:
        """Four times the largest batch, with answers of different lengths, so that slots are refilled all the time."""
        most = max(self.options.batches)
        return self._load(f"{most} in flight, {4 * most} in all", most, 4 * most, 0.5, False)

    def _load(self, name: str, batch: int, count: int, spread: float, hopeless: bool) -> Load:
        options = self.options
        return make_load(
            name, batch, count, prompt=options.prompt, tokens=options.tokens, spread=spread, vocab=self.shape.vocab, hopeless=hopeless
        )

    # ------------------------------------------------------------------------------------------------------- engines

    def recipe(self, drafts: int) -> Recipe:
        """A recipe of one engine for the largest batch.

        CUDA graphs are captured for the batches of the loads, for smaller ones as requests end, and for steps with prompts in them.
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
            rollout["gpu_memory"] = CARD_SHARE / self.at_once
            if not options.eager:
                counts = sorted({1, 2, 4, *options.batches, *range(32, most + 1, 32)})
                mixed = range(most, 2 * most + 1, max(1, most // 4))
                sizes = sorted({*(count * width for count in counts for width in range(1, drafts + 2)), *mixed})
                rollout["engine_args"] = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        precision = "fp32" if options.device == "cpu" else "bf16"
        return Recipe.model_validate(
            {
                "model": {"path": str(options.folder)},
                "train": {"precision": precision},
                "rollout": rollout,
                "sync": {"transport": "shm"},
                "cluster": {"device": options.device, "actor_deadline_s": START_S},
            }
        )

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and answer, and some to spare."""
        return self.options.prompt + 2 * self.options.tokens + 64

    @property
    def _gpus(self) -> float:
        return round(1 / self.at_once, 2) if self.options.device == "cuda" else 0.0

    @asynccontextmanager
    async def pool(self, drafts: int) -> AsyncIterator[ReplicaPool]:
        """A pool of one engine, closed at the end of the block. With `drafts` the engine chooses how many, until `speculate` sets it."""
        first = Actor("rollout", 0, 0, 0, 1.0, self._gpus)
        placement = Placement(self.options.device, (first,), 1)
        pool = await start_pool(self.recipe(drafts), model=str(self.options.folder), context=self.context, placement=placement)
        try:
            yield pool
        finally:
            await pool.close()

    @asynccontextmanager
    async def offline(self) -> AsyncIterator[Offline]:
        """vLLM's offline generation with the settings of `pool(0)`, closed at the end of the block."""
        import ray

        recipe = self.recipe(0)
        settings = engine_settings(
            recipe.rollout.model_copy(update={"context": self.context}),  # type: ignore[arg-type]
            model=str(self.options.folder),
            precision=recipe.train.precision,
            device=self.options.device,
        )
        actor = start_offline(settings, cpus=1, gpus=self._gpus)

        async def once(load: Load, logprobs: bool) -> Run:
            run: Run = await actor.send.remote(load, self.shape.vocab, logprobs)
            return run

        try:
            await within(actor.__ray_ready__.remote(), START_S, "vLLM, start")
            yield once
        finally:
            ray.kill(actor)

    def through(self, pool: ReplicaPool) -> Once:
        return lambda load: send(pool, load, self.shape.vocab)


@asynccontextmanager
async def all_of[T](*managers: AbstractAsyncContextManager[T]) -> AsyncIterator[list[T]]:
    """Enter all managers at the same time, since engines take a minute or two to start, and leave them at the end of the block.

    Raises what the first manager raised that could not be entered, once it has left the others.
    """
    entered = await asyncio.gather(*(manager.__aenter__() for manager in managers), return_exceptions=True)
    async with AsyncExitStack() as stack:
        for manager, found in reversed(list(zip(managers, entered, strict=True))):
            if not isinstance(found, BaseException):
                stack.push_async_exit(manager)
        ready = []
        for found in entered:
            if isinstance(found, BaseException):
                raise found
            ready.append(found)
        yield ready
