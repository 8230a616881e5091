"""The stage draft without a trainer and engines: which samples are generated, and in which order they are trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.checkpoint.finding import newest_checkpoint
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.sft import DraftStage
from mtpctl.controller.state import RunState, load_resume_state
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.rl_stage import Letters, Rows, World
from tests.fakes.trainer_group import FakeTrainerGroup

PROBLEMS = [Problem(f"p{number}", f"{number}+{number}=", str(2 * number)) for number in range(5)]
Row = tuple[list[int], list[int], list[int]]


class ScriptedGenerator:
    """Answers the requests of a batch in reverse order, with a count of its answers; `requested` has their numbers.

    empty: the responses have no token. Ctrl-C comes after `stop_after` samples.
    """

    def __init__(self, *, empty: bool = False, stop_after: int = 0) -> None:
        self.requested: list[int] = []
        self.empty, self.stop_after, self.answers = empty, stop_after, 0
        self.state = cast(RunState, None)

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        batch = [request async for request in requests]
        self.requested += [request.sample.index for request in batch]
        for request in reversed(batch):
            self.answers += 1
            sample = request.sample
            ids = [] if self.empty else [100 + self.answers, *sample.prompt_ids.tolist()]
            sample.append(ids, [-1.0] * len(ids), 0)
            if self.answers == self.stop_after:
                self.state.stop_requested.set()
            yield sample


class Learner(FakeTrainerGroup):
    """Records the rows of each update. Ctrl-C comes in update `stop_at`."""

    def __init__(self, stop_at: int = 0) -> None:
        super().__init__()
        self.stop_at, self.state, self.trained = stop_at, cast(RunState, None), cast(list[Row], [])

    async def draft_step(self, rows: list[Any]) -> dict[str, float]:
        self.trained += [(list(row.prompt), list(row.target), list(row.mask)) for row in rows]
        if self.state.step + 1 == self.stop_at:
            self.state.stop_requested.set()
        return {"mtp/trunk_nll": 1.0, "mtp/loss_1": 1.0, "skipped": 0.0, "perf/tokens": 4.0}


def train(root: Path, learner: Learner, generator: ScriptedGenerator | None, *, samples: int = 7, steps: int = 6) -> World:
    """One start of the stage, which resumes from the newest checkpoint, as a run does. Returns the fakes' record."""
    recipe = Recipe.model_validate(
        {"model": {"path": "anywhere"}, "train": {"stages": ["draft"], "draft": {"steps": steps, "batch_size": 2, "samples": samples}}}
    )
    prepared, world = Prepared(cast(Any, None), Letters(), ProblemSets(PROBLEMS, [], PROBLEMS), 64), World()

    async def main() -> None:
        state = learner.state = RunState(root / "checkpoints", recipe.train)
        if (checkpoint := newest_checkpoint(root / "checkpoints")) is not None:
            state.load(load_resume_state(checkpoint, recipe.train))
        state.begin("draft")
        if generator is not None:
            generator.state = state
        trainer, telemetry = cast(TrainerGroup, learner), cast(Any, Rows(world))
        stage = DraftStage(recipe, prepared, trainer, telemetry, state, generator=cast(Any, generator), file=root / "samples.jsonl")
        await stage.run()
        if state.stop_requested.is_set() and state.step:
            await state.checkpoint(trainer)

    asyncio.run(main())
    return world


def uninterrupted(root: Path, **settings: int) -> list[Row]:
    """The rows of a run that nothing interrupts."""
    root.mkdir(exist_ok=True)
    learner = Learner()
    train(root, learner, ScriptedGenerator(), **settings)
    return learner.trained


def test_every_sample_is_generated_once_and_trained_on_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    learner, generator = Learner(), ScriptedGenerator()
    world = train(tmp_path, learner, generator)
    assert generator.requested == list(range(7)), "five problems, then two of the next epoch"
    numbers = [json.loads(line)[0] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert numbers == [6, 5, 4, 3, 2, 1, 0], "stored as they arrive"
    assert len(learner.trained) == 12
    # Sample n arrived as number 7 - n, and repeats its prompt.
    assert [target[0] for _, target, _ in learner.trained] == [107 - n % 7 for n in range(12)]
    assert all(target[1:] == prompt and mask == [1] * len(target) for prompt, target, mask in learner.trained)
    prompts = ["".join(map(chr, prompt)) for prompt, _, _ in learner.trained[:5]]
    assert sorted(prompts) == [problem.prompt for problem in PROBLEMS]
    assert ("draft", "generating 7 samples with the model") in world.events
    assert [message for _, message in world.events if "tokens" in message] == ["7 samples, 35 tokens"]


def test_restarted_draft_stage_reuses_its_samples_in_the_same_order(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path / "whole", steps=9)
    first = Learner(stop_at=4)
    train(tmp_path, first, ScriptedGenerator(), steps=9)
    second, generator = Learner(), ScriptedGenerator()
    train(tmp_path, second, generator, steps=9)
    assert len(first.trained) == 8 and generator.requested == []
    assert first.trained + second.trained == expected


@pytest.mark.parametrize("cut", [1, 12, 10_000], ids=["a line break", "within a line", "everything"])
def test_samples_that_were_not_stored_whole_are_generated_again(tmp_path: Path, cut: int) -> None:
    """Only those, and the file is whole afterwards."""
    file = tmp_path / "samples.jsonl"
    uninterrupted(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut] if cut < len(whole) else b"")
    learner, generator = Learner(), ScriptedGenerator()
    train(tmp_path, learner, generator)
    assert generator.requested == ([0] if cut < len(whole) else list(range(7)))
    stored = dict(enumerate(sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: row[0])))
    assert [row[0] for row in stored.values()] == list(range(7))
    again = ScriptedGenerator()
    resumed = Learner()
    train(tmp_path, resumed, again)
    assert again.requested == [] and resumed.trained == learner.trained


def test_stop_while_samples_are_generated_ends_the_stage_without_an_update(tmp_path: Path) -> None:
    learner, generator = Learner(), ScriptedGenerator(stop_after=3)
    train(tmp_path, learner, generator)
    assert learner.trained == [] and learner.state.step == 0
    stored = {json.loads(line)[0] for line in (tmp_path / "samples.jsonl").read_text().splitlines()}
    assert stored == {6, 5, 4}
    resumed, rest = Learner(), ScriptedGenerator()
    train(tmp_path, resumed, rest)
    assert rest.requested == [0, 1, 2, 3] and len(resumed.trained) == 12


def test_stage_without_samples_trains_on_the_responses_of_rows(tmp_path: Path) -> None:
    learner = Learner()
    train(tmp_path, learner, None, samples=0)
    assert not (tmp_path / "samples.jsonl").exists()
    # Twelve rows are two epochs and two problems.
    answers = {tuple(map(ord, problem.prompt)): [*map(ord, problem.answer), Letters.eos_id] for problem in PROBLEMS}
    assert all(target == answers[tuple(prompt)] and mask == [1] * len(target) for prompt, target, mask in learner.trained)
    assert {tuple(prompt) for prompt, _, _ in learner.trained[:5]} == answers.keys()


def test_empty_samples_are_skipped_and_only_empty_samples_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeFailure, match=r"^train\.draft\.samples: no response has a token; check the prompts and rollout\.max_tokens$"
    ):
        train(tmp_path / "empty", Learner(), _in(tmp_path / "empty", ScriptedGenerator(empty=True)))
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps([number, [1], [] if number % 2 else [50 + number], []]) + "\n" for number in range(7)))
    learner = Learner()
    train(tmp_path, learner, ScriptedGenerator())
    assert [target for _, target, _ in learner.trained[:5]] == [[50], [52], [54], [56], [50]]


def _in(folder: Path, generator: ScriptedGenerator) -> ScriptedGenerator:
    folder.mkdir()
    return generator


def test_finished_stage_generates_nothing(tmp_path: Path) -> None:
    train(tmp_path, Learner(stop_at=6), ScriptedGenerator())
    (tmp_path / "samples.jsonl").unlink()
    learner, generator = Learner(), ScriptedGenerator()
    train(tmp_path, learner, generator)
    assert generator.requested == [] and learner.trained == []
