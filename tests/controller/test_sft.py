"""The supervised stage without a trainer: when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.checkpoint.finding import newest_checkpoint
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.sft import LOSS_WINDOW, SftStage
from mtpctl.controller.state import RunState, load_resume_state
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets
from mtpctl.recipe.schema import Recipe
from tests.fakes.rl_stage import Letters, Rows, World
from tests.fakes.trainer_group import FakeTrainerGroup


class Learner(FakeTrainerGroup):
    """Its loss is 1 for five updates and 0.1 afterwards; Ctrl-C is sent in update `stop_at`."""

    def __init__(self, root: Path, stop_at: int = 0) -> None:
        super().__init__()
        self.root, self.stop_at, self.state = root, stop_at, cast(RunState, None)

    async def sft_step(self, rows: list[Any]) -> dict[str, float]:
        if self.state.step + 1 == self.stop_at:
            self.state.stop_requested.set()
        return {"sft/loss": 1.0 if self.state.step < 5 else 0.1, "skipped": 0.0, "perf/tokens": 4.0}


async def train(learner: Learner, *, resumed: bool = False) -> int:
    """A start of the stage, as a run makes it. Returns the step at which it ended."""
    recipe = Recipe.model_validate({"model": {"path": "anywhere"}, "train": {"sft": {"steps": 40, "until_loss": 0.15, "batch_size": 1}}})
    prepared = Prepared(cast(Any, None), Letters(), ProblemSets([], [], [Problem("p", "1+1=", "2")]), 64)
    trainer = cast(TrainerGroup, learner)
    learner.state = RunState(learner.root, recipe.train)
    if resumed:
        learner.state.load(load_resume_state(newest_checkpoint(learner.root), recipe.train))
    learner.state.begin("sft")
    await SftStage(recipe, prepared, trainer, cast(Any, Rows(World())), learner.state).run()
    if learner.state.stop_requested.is_set():
        await learner.state.checkpoint(trainer)
    return learner.state.step


@pytest.mark.parametrize("stop_at", [0, 7])
def test_stage_ends_at_until_loss_across_a_stop(tmp_path: Path, stop_at: int) -> None:
    async def main() -> int:
        reached = await train(Learner(tmp_path, stop_at))
        return await train(Learner(tmp_path), resumed=True) if reached == stop_at else reached

    assert asyncio.run(main()) == 5 + LOSS_WINDOW


def test_conversation_is_masked_to_the_assistants_turns(tmp_path: Path) -> None:
    class Recording(Learner):
        async def sft_step(self, rows: list[Any]) -> dict[str, float]:
            trained.extend(rows)
            return await super().sft_step(rows)

    class Chat(Letters):
        """A message is its role's first letter and its content."""

        special_ids = frozenset({0})

        def chat_text(self, messages: Any, tools: Any = (), *, add_generation_prompt: bool = True) -> str:
            return "".join(m["role"][0] + m["content"] for m in messages) + ("a" if add_generation_prompt else "")

        def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
            return self.encode(text), list(range(len(text)))

    trained: list[tuple[list[int], list[int], list[int]]] = []
    messages = [{"role": ("user", "assistant")[number % 2], "content": str(number)} for number in range(4)]
    recipe = Recipe.model_validate({"model": {"path": "anywhere"}, "train": {"sft": {"steps": 1, "batch_size": 1}}})
    prepared = Prepared(cast(Any, None), Chat(), ProblemSets([], [], [Problem("c", "", "", messages=messages)]), 64)
    learner = Recording(tmp_path)
    learner.state = RunState(tmp_path, recipe.train)
    learner.state.begin("sft")
    asyncio.run(SftStage(recipe, prepared, cast(TrainerGroup, learner), cast(Any, Rows(World())), learner.state).run())
    assert trained == [([*map(ord, "u0a")], [*map(ord, "1u2a3"), 0], [1, 0, 0, 0, 1, 1])]
