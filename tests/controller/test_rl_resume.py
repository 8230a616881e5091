"""The RL stage continues after a stop at any update, whatever its buffer contains."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.controller.buffer import SampleBuffer
from mtpctl.controller.rl import RlStage
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.samples import Sample
from tests.fakes.rl_stage import FakeGenerator, FakeTrainer, World, recipe_of, stage_of
from tests.fakes.trainer_group import FakeTrainerGroup

GROUPS, SYNC_EVERY, STEPS = 4, 4, 10
"""Groups an update trains on, updates between two syncs, and updates in all."""


class Held(FakeGenerator):
    """Answers the prompts before `limit` only; the others stay in flight."""

    def __init__(self, world: World, limit: float) -> None:
        super().__init__(world, lambda s: str(s.index))
        self.limit = limit

    async def wait(self, sample: Sample) -> None:
        if int(sample.prompt_id[1:]) >= self.limit:
            await asyncio.Event().wait()


class Stopping(FakeTrainer):
    """Request a stop in the update `stop`, with `full` only after every response in flight has completed."""

    def __init__(self, world: World, stage: RlStage, stop: int, full: bool) -> None:
        super().__init__(world)
        self.stage, self.stop, self.full = stage, stop, full

    async def rl_step(self, samples: list[Sample], version: int) -> dict[str, float]:
        if len(self.world.batches) + 1 == self.stop:
            while self.full and (self.stage.rollout.admission.has_room or self.stage.buffer.num_ready < self.stage.buffer.num_pending):
                await asyncio.sleep(0.001)
            self.stage.state.stop_requested.set()
        return await super().rl_step(samples, version)


@pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])
@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_run_resumed_after_any_update_trains_every_prompt_once(tmp_path: Path, stop: int, staleness: float, full: bool) -> None:
    """The engines wait for no version that the trainer does not publish, and the trainer for no group that is not sent out."""
    recipe = recipe_of(steps=STEPS, staleness=staleness, sync_every=SYNC_EVERY)
    stopped, resumed = World(), World()

    async def scenario() -> RlStage:
        first = stage_of(recipe, stopped, tmp_path, generator=Held(stopped, float("inf") if full else stop * GROUPS))
        first.trainer = cast(TrainerGroup, Stopping(stopped, first, stop, full))
        first.state.begin("rl")
        await first.publish()
        await asyncio.wait_for(first.run(), 20)
        saved = await first.state.checkpoint(cast(TrainerGroup, FakeTrainerGroup()))
        assert saved is not None
        complete, unfinished = SampleBuffer.load(saved / "buffer.jsonl")
        if not full:
            assert not complete
        elif stop != SYNC_EVERY:  # The sync after that update sends out more.
            assert complete and not unfinished
        second = stage_of(recipe, resumed, tmp_path)
        for name, value in json.loads((saved / "run.json").read_text()).items():
            setattr(second.state, name, value)
        second.rollout.cursor.load_state_dict(cast(dict[str, Any], second.state.cursor))
        await second.resume_buffer(complete, unfinished)
        await second.publish()
        await asyncio.wait_for(second.run(), 20)
        return second

    stage = asyncio.run(scenario())
    rows = [*stopped.rows, *resumed.rows]
    assert [step for step, _ in rows] == list(range(1, STEPS + 1))
    trained = [s.prompt_id for batch in (*stopped.batches, *resumed.batches) for s in batch if s.index == 0]
    waiting = [group.problem.prompt_id for group in (*stage.buffer._ready_groups, *stage.buffer.unfinished_groups())]
    assert len(trained) == STEPS * GROUPS
    assert sorted(trained + waiting) == sorted(f"p{number}" for number in range(stage.rollout.cursor.drawn))
