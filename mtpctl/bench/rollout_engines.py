"""The engines that `mtpctl bench rollout` holds side by side: on one card, of one model, ready all the time.

What a host does beside us changes from minute to minute, by more than the bounds are wide. So engines are not measured one after the
other: all stand ready, and the same load goes to each in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtpctl.bench.cycle_model import write_cycle_model
from mtpctl.bench.rollout_load import Load, Run, make_load, send, start_offline
from mtpctl.cluster.deadlines import within
from mtpctl.errors import UserError
from mtpctl.families.hub import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import count_parameters
from mtpctl.families.toy import toy_config
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.start import start_pool
from mtpctl.rollout.vllm.settings import engine_settings

START_S = 420.0
CARD_SHARE = 0.9
"""Of the card, for all engines together."""

Once = Callable[[Load], Awaitable[Run]]
"""Sends a load and waits for it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `tokens` of an answer, `prompt` tokens before it; `drafts` the most a step may draft."""

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


def config_of(shape: Literal["mimo7b", "tiny"]) -> dict[str, Any]:
    """config.json fields; `model_type` is one that every vLLM reads without a stand-in."""
    return TINY if shape == "tiny" else hub_config("XiaomiMiMo/MiMo-7B-RL") | {"model_type": "qwen2"}


class Bench:
    """Model, loads and engines. `at_once` engines are on the card together."""

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
        """All at once, for every batch size."""
        return [self._load(f"batch {batch}", batch, batch, 0.0, hopeless) for batch in self.options.batches]

    def queued(self) -> Load:
        """Four times the largest batch, answers of different lengths: places are refilled all the time."""
        most = max(self.options.batches)
        return self._load(f"{most} in flight, {4 * most} in all", most, 4 * most, 0.5, False)

    def _load(self, name: str, batch: int, count: int, spread: float, hopeless: bool) -> Load:
        options = self.options
        return make_load(
            name, batch, count, prompt=options.prompt, tokens=options.tokens, spread=spread, vocab=self.shape.vocab, hopeless=hopeless
        )

    # ------------------------------------------------------------------------------------------------------- engines

    def recipe(self, drafts: int) -> Recipe:
        """One engine for the largest batch. CUDA graphs are captured for the batches used, a few below, and as vLLM itself would for
        steps that take in prompts beside them."""
        options = self.options
        most = max(options.batches)
        rollout: dict[str, Any] = {
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
        """Tokens of the longest prompt and answer, and a little."""
        return self.options.prompt + 2 * self.options.tokens + 64

    @property
    def _gpus(self) -> float:
        return round(1 / self.at_once, 2) if self.options.device == "cuda" else 0.0

    @asynccontextmanager
    async def pool(self, drafts: int) -> AsyncIterator[ReplicaPool]:
        """A pool of one engine, and its end; with any drafts, how many it makes is its own choice until somebody says."""
        seat = Actor("rollout", 0, 0, 0, 1.0, self._gpus)
        placement = Placement(self.options.device, (seat,), 1)
        pool = await start_pool(self.recipe(drafts), model=str(self.options.folder), context=self.context, placement=placement)
        try:
            yield pool
        finally:
            await pool.close()

    @asynccontextmanager
    async def offline(self) -> AsyncIterator[Callable[[Load, bool], Awaitable[Run]]]:
        """vLLM's own offline generation with the settings of `pool(0)`, and its end: a load, and whether log-probs are wanted."""
        import ray

        recipe = self.recipe(0)
        settings = engine_settings(
            recipe.rollout.model_copy(update={"context": self.context}),  # type: ignore[arg-type]
            model=str(self.options.folder),
            precision=recipe.train.precision,
            device=self.options.device,
        )
        actor = start_offline(settings, {"num_cpus": 1, "num_gpus": self._gpus})

        async def once(load: Load, logprobs: bool) -> Run:
            run: Run = await actor.send.remote(load, self.shape.vocab, logprobs)
            return run

        try:
            await within(actor.__ray_ready__.remote(), START_S, "vLLM, start")
            yield once
        finally:
            ray.kill(actor)

    def through(self, pool: ReplicaPool) -> Once:
        """The way through a pool."""
        return lambda load: send(pool, load, self.shape.vocab)


@asynccontextmanager
async def all_of(*managers: Any) -> AsyncIterator[list[Any]]:
    """Enter the managers at once, since engines take a minute or two to start, and leave them all."""
    entered = await asyncio.gather(*(manager.__aenter__() for manager in managers), return_exceptions=True)
    async with AsyncExitStack() as began:
        for manager, found in reversed(list(zip(managers, entered, strict=True))):
            if not isinstance(found, BaseException):
                began.push_async_exit(manager)
        for found in entered:
            if isinstance(found, BaseException):
                raise found
        yield entered
