"""The RL stage on fakes: a trainer that counts, a generator that answers after a moment, and telemetry that records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from mtpctl.controller.prepare import Prepared
from mtpctl.controller.rl import RlStage
from mtpctl.controller.rollout_loop import ScoreLogprobs
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.data.problems import Problem
from mtpctl.data.sets import UNNAMED, ProblemSets
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Answered, Outcome, Reward
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.telemetry.sample_log import SampleRow
from mtpctl.telemetry.session import Telemetry


class Letters:
    """A tokenizer of characters."""

    eos_id, vocab_size = 0, 256

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        return "".join(chr(i) for i in ids)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise NotImplementedError


@dataclass
class World:
    """What the fakes share: the published version, who is busy, and what happened."""

    version: int = 0
    updating: bool = False
    batches: list[list[Sample]] = field(default_factory=list)
    made_while_updating: int = 0
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    sample_rows: list[SampleRow] = field(default_factory=list)


class FakeTrainer:
    def __init__(self, world: World) -> None:
        self.world = world

    async def rl_step(self, samples: list[Sample], version: int) -> dict[str, float]:
        self.world.updating = True
        self.world.batches.append(samples)
        await asyncio.sleep(0.01)
        self.world.updating = False
        return {"skipped": 0.0, "perf/tokens": 1.0}


class FakeGenerator:
    """Answers every request after a moment, with the text that `text` returns."""

    def __init__(self, world: World, text: Callable[[Sample], str]) -> None:
        self.world, self.text = world, text

    async def wait(self, sample: Sample) -> None:
        """How long a response takes."""
        await asyncio.sleep(0.001)

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        waiting: asyncio.Queue[Sample] = asyncio.Queue()

        async def one(sample: Sample, version: int) -> None:
            await self.wait(sample)
            ids = [ord(c) for c in self.text(sample)]
            sample.append(ids, [-1.0] * len(ids), version)
            self.world.made_while_updating += self.world.updating
            await waiting.put(sample)

        async def feed() -> None:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    group.create_task(one(request.sample, self.world.version))

        feeding = asyncio.create_task(feed())
        try:
            while not (feeding.done() and waiting.empty()):
                get = asyncio.create_task(waiting.get())
                await asyncio.wait({get, feeding}, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    yield get.result()
                get.cancel()
        finally:
            feeding.cancel()


class Rows:
    """Telemetry that records events and metrics."""

    def __init__(self, world: World) -> None:
        self.world = world

    def log(self, step: int, metrics: dict[str, float], phase: str) -> None:
        self.world.rows.append((step, metrics))

    def event(self, kind: str, message: str) -> None:
        self.world.events.append((kind, message))

    def samples(self, rows: list[SampleRow]) -> None:
        self.world.sample_rows += rows


def recipe_of(
    *,
    steps: int = 6,
    staleness: float = 0.5,
    sync_every: int = 1,
    max_staleness: int = 8,
    deterministic: bool = False,
    dynamic_sampling: bool = True,
    signal_backoff: bool = False,
) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": "anywhere"},
            "train": {
                "rl": {
                    "steps": steps,
                    "prompts_per_step": 4,
                    "group_size": 2,
                    "dynamic_sampling": dynamic_sampling,
                    "signal_backoff": signal_backoff,
                }
            },
            "async": {
                "staleness_threshold": staleness,
                "sync_every": sync_every,
                "max_staleness": max_staleness,
                "deterministic": deterministic,
            },
            "data": {"shuffle": False},
        }
    )


async def right_or_wrong(response: str, problem: Answered, sample: Sample) -> Outcome:
    """The reward `exact`, without a process."""
    return Outcome(float(response == problem.answer))


def stage_of(
    recipe: Recipe,
    world: World,
    tmp_path: Path,
    text: Callable[[Sample], str] = lambda s: str(s.index),
    *,
    generator: FakeGenerator | None = None,
    reward: Reward | None = None,
    score_logprobs: ScoreLogprobs | None = None,
) -> RlStage:
    problems = [Problem(f"p{i}", f"{i}", "1") for i in range(1000)]
    prepared = Prepared(cast(Any, None), Letters(), ProblemSets(problems, [], []), context=64)

    async def sync(version: int) -> dict[str, float]:
        world.version = version
        return {"sync/seconds": 0.0}

    return RlStage(
        recipe,
        prepared,
        cast(TrainerGroup, FakeTrainer(world)),
        cast(Any, FakeGenerator(world, text) if generator is None else generator),
        sync,
        {UNNAMED: reward or right_or_wrong},
        cast(Telemetry, Rows(world)),
        RunState(tmp_path, recipe.train),
        score_logprobs,
    )


def run(recipe: Recipe, tmp_path: Path, text: Callable[[Sample], str] = lambda s: str(s.index)) -> World:
    """The stage to its end. By default the second response of every group is right, the first wrong."""
    world = World()
    drive(stage_of(recipe, world, tmp_path, text))
    return world


def drive(stage: RlStage, *, publish: bool = False) -> None:
    """Run the stage to its end, after a first sync if `publish`."""

    async def main() -> None:
        if publish:
            await stage.publish()
        await stage.run()

    asyncio.run(asyncio.wait_for(main(), 60))


def hold_out(stage: RlStage) -> None:
    """Add one held-out problem to the stage."""
    prepared = stage.evaluator.prepared
    stage.evaluator.prepared = replace(prepared, problems=ProblemSets(prepared.problems.train, [Problem("e0", "0", "1")], []))
