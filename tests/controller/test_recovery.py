"""A trainer that dies is brought back: which updates are made again, on which samples, and when the run gives up.

The trainer's weights are a number that each update makes from the one before and from its batch, so that two histories that end in the
same number are the same.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.checkpoint.listing import write_latest
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.rl import RlStage
from mtpctl.controller.sft import SftStage
from mtpctl.controller.state import RunState
from mtpctl.controller.status import Waits
from mtpctl.controller.trainers import HostLost, TrainerGroup, TrainerLost, TrainerRecovery
from mtpctl.data.problems import Problem
from mtpctl.data.sets import UNNAMED, ProblemSets
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Sample
from tests.fakes.checkpoint_folders import SHARD, flip, write_checkpoint
from tests.fakes.rl_stage import FakeGenerator, Letters, Rows, World, recipe_of, right_or_wrong
from tests.fakes.trainer_group import FakeTrainerGroup


class Mortal(FakeTrainerGroup):
    """Dies in the calls that `dies` lists by number for each method, from 1, before or after it has executed them."""

    def __init__(self, recipe: Recipe, dies: dict[str, set[int]]) -> None:
        super().__init__()
        self.recipe, self.dies = recipe, dies
        self.weights, self.alive, self.starts = 1, True, 0
        self.trained: list[list[str]] = []
        self.meanwhile: Callable[[], bool] = lambda: True

    async def called(self, method: str) -> None:
        await super().called(method)
        if not self.alive or self.calls.count(method) in self.dies.get(method, ()):
            self.alive = False
            raise TrainerLost(f"trainer rank 0, {method}: ActorDiedError")

    async def begin_stage(self, stage: str, reference: Path, *, resumed: bool) -> None:
        await super().begin_stage(stage, reference, resumed=resumed)
        self.weights, self.trained = 1, []

    async def _train(self, batch: list[Any], names: list[str]) -> None:
        await asyncio.sleep(0.005)
        self.weights = zlib.crc32(repr((self.weights, batch)).encode())
        self.trained.append(names)

    async def sft_step(self, rows: list[Any]) -> dict[str, float]:
        metrics = await super().sft_step(rows)
        await self._train(rows, [str(rows)])
        return metrics

    async def rl_step(self, samples: list[Sample], version: int) -> dict[str, float]:
        await self.called("rl_step")
        await self._train([(s.prompt_ids, s.response_ids) for s in samples], [s.group_id.partition(".")[0] for s in samples])
        return {"skipped": 0.0, "perf/tokens": 1.0}

    async def restore(self, checkpoint: Path) -> None:
        await super().restore(checkpoint)
        saved = json.loads((checkpoint / "weights.json").read_text())
        self.weights, self.trained = saved["weights"], saved["trained"]

    async def begin_save(self, path: Path) -> Path:
        folder = await super().begin_save(path)
        (folder / "weights.json").write_text(json.dumps({"weights": self.weights, "trained": self.trained}))
        return folder

    async def publish_checkpoint(self, path: Path, keep: int, needed: Sequence[str]) -> None:
        await super().publish_checkpoint(path, keep, needed)
        write_latest(path)

    async def restart(self, report: Any, stop_requested: asyncio.Event) -> None:
        async with asyncio.timeout(10):
            while not self.meanwhile():
                await asyncio.sleep(0.005)
        self.alive, self.starts = True, self.starts + 1

    async def build(self, folder: Path) -> dict[str, int]:
        assert self.alive
        return {"parameters": 1, "trained": 1}


def test_damaged_checkpoint_returns_the_stage_to_the_previous_one_with_its_groups(tmp_path: Path) -> None:
    """The groups of the updates in between are lost, so the loss is raised to the caller, which loads those of the checkpoint."""
    root = tmp_path / "checkpoints"
    for name in ("rl-000002", "rl-000004"):
        write_checkpoint(tmp_path, name)
        (root / name / "weights.json").write_text(json.dumps({"weights": 1, "trained": []}))
    flip(root / "rl-000004" / SHARD)
    recipe = recipe_with()
    trainer, state, rows = Mortal(recipe, {}), RunState(root, recipe.train, stage="rl", step=5), Rows(World())
    group, telemetry = cast(TrainerGroup, trainer), cast(Any, rows)
    recovery = TrainerRecovery(recipe, group, state, telemetry, Waits(lambda _: None, tmp_path), folder=tmp_path, reference=tmp_path)
    lost = TrainerLost("trainer rank 0: ActorDiedError")

    async def main() -> Path | None:
        with pytest.raises(TrainerLost) as raised:
            await recovery(lost)
        assert raised.value is lost and trainer.starts == 0
        return await recovery(lost, redraw_prompts=True)

    assert asyncio.run(main()) == root / "rl-000002" and state.step == 2
    assert [path.name for path in root.iterdir() if ".damaged" in path.name] == ["rl-000004.damaged"]


def test_stop_during_a_wait_for_capacity_ends_the_recovery(tmp_path: Path) -> None:
    """It does not count as a loss, after some of which the run would report too many."""
    recipe = recipe_with()
    trainer, state = Mortal(recipe, {}), RunState(tmp_path / "checkpoints", recipe.train, stage="rl", step=5)
    waiting = TrainerLost("trainer: a stop was requested before there was capacity for its ranks")

    async def restart(report: Any, stop_requested: asyncio.Event) -> None:
        stop_requested.set()
        raise waiting

    trainer.restart = restart  # type: ignore[method-assign]
    group, telemetry = cast(TrainerGroup, trainer), cast(Any, Rows(World()))
    recovery = TrainerRecovery(recipe, group, state, telemetry, Waits(lambda _: None, tmp_path), folder=tmp_path, reference=tmp_path)
    with pytest.raises(TrainerLost) as raised:
        asyncio.run(recovery(TrainerLost("trainer rank 0: ActorDiedError"), redraw_prompts=True))
    assert raised.value is waiting


def recipe_with(deterministic: bool = False, restarts: int = 3, **train: Any) -> Recipe:
    recipe = recipe_of(steps=9, deterministic=deterministic, staleness=0.0 if deterministic else 0.5, dynamic_sampling=False)
    changed = recipe.train.model_copy(update={"checkpoint_every": 2, "max_restarts": restarts, **train})
    return recipe.model_copy(update={"train": changed})


def rl(
    recipe: Recipe, tmp_path: Path, dies: dict[str, set[int]], sync_dies: int = 0, *, meanwhile: int = 0
) -> tuple[Mortal, World, RunState]:
    """Run the RL stage to its end, on engines whose responses depend on their weights.

    The trainer recovers once `meanwhile` groups are ready for it.
    """
    world, trainer, state = World(), Mortal(recipe, dies), RunState(tmp_path, recipe.train)
    served, syncs = {0: 1}, 0
    versions: list[int] = []

    def text(sample: Sample) -> str:
        return str(zlib.crc32(repr((sample.prompt_id, sample.index, served[world.version])).encode()) % 10)

    async def sync(version: int) -> dict[str, float]:
        nonlocal syncs
        syncs += 1
        if not trainer.alive:
            raise TrainerLost("trainer rank 0, plan_weights: ActorDiedError")
        served[version] = trainer.weights
        world.version = version
        assert version not in versions or served[version] == trainer.weights, "a version is never other weights"
        versions.append(version)
        if syncs == sync_dies:
            trainer.alive = False
            raise TrainerLost("trainer rank 0, transfer_weights: ActorDiedError")
        return {}

    async def main() -> None:
        problems = [Problem(f"p{i}", f"{i}", "1") for i in range(1000)]
        prepared = Prepared(cast(Any, None), Letters(), ProblemSets(problems, [], []), context=64)
        rows, group = cast(Any, Rows(world)), cast(TrainerGroup, trainer)
        recover = TrainerRecovery(
            recipe, group, state, rows, Waits(lambda _: None, tmp_path), folder=tmp_path, reference=tmp_path / "reference"
        )
        state.begin("rl")
        generator = cast(Any, FakeGenerator(world, text))
        stage = RlStage(recipe, prepared, group, generator, sync, {UNNAMED: right_or_wrong}, rows, state, None, recover=recover)
        trainer.meanwhile = lambda: stage.buffer.num_ready >= meanwhile
        await stage.publish()
        await asyncio.wait_for(stage.run(), 30)

    asyncio.run(main())
    assert versions == sorted(versions)
    return trainer, world, state


DEATHS = [
    pytest.param({"rl_step": {1}}, 0, id="in the first update"),
    pytest.param({"rl_step": {4}}, 0, id="in an update after a checkpoint"),
    pytest.param({"rl_step": {3, 6, 8}}, 0, id="three times"),
    pytest.param({"begin_save": {2}}, 0, id="in a save"),
    pytest.param({"finish_save": {2}}, 0, id="at the end of a save"),
    pytest.param({"publish_checkpoint": {1}}, 0, id="before a checkpoint is published"),
    pytest.param({}, 5, id="in a sync"),
    pytest.param({"rl_step": {4}, "restore": {1}}, 0, id="while it is brought back"),
]


@pytest.mark.parametrize(("dies", "sync_dies"), DEATHS)
def test_every_prompt_is_trained_on_once_after_a_trainer_loss(tmp_path: Path, dies: dict[str, set[int]], sync_dies: int) -> None:
    trainer, world, state = rl(recipe_with(), tmp_path, dies, sync_dies)
    assert state.step == 9 and len(trainer.trained) == 9 and trainer.starts >= 1
    groups = Counter(name for batch in trainer.trained for name in batch)
    assert len(groups) == 9 * 4 and set(groups.values()) == {2}, "each of 36 groups with its two responses, once"
    assert sorted(map(int, groups)) == list(range(36)), "and no prompt was left out"
    assert [kind for kind, _ in world.events].count("restart") >= 2


@pytest.mark.parametrize(("dies", "sync_dies"), DEATHS)
def test_deterministic_run_with_a_lost_trainer_ends_with_the_undisturbed_weights(
    tmp_path: Path, dies: dict[str, set[int]], sync_dies: int
) -> None:
    undisturbed, _, _ = rl(recipe_with(deterministic=True), tmp_path / "a", {})
    disturbed, _, _ = rl(recipe_with(deterministic=True), tmp_path / "b", dies, sync_dies)
    assert undisturbed.starts == 0 < disturbed.starts
    assert disturbed.trained == undisturbed.trained
    assert disturbed.weights == undisturbed.weights


def test_rollout_continues_while_the_trainer_restarts(tmp_path: Path) -> None:
    """As far as staleness allows: half a batch is generated ahead."""
    trainer, _, _ = rl(recipe_with(), tmp_path, {"rl_step": {4}}, meanwhile=2)
    assert trainer.starts == 1


def test_loss_and_resume_point_are_logged(tmp_path: Path) -> None:
    _, world, _ = rl(recipe_with(), tmp_path, {"rl_step": {4}})
    lost, back = [message for kind, message in world.events if kind == "restart"]
    assert lost == "trainer rank 0, rl_step: ActorDiedError; restarting the trainer: restart 1 of at most 3 (train.max_restarts)"
    assert back.startswith("trainer back after 0 s: rl resumes after step 2, from rl-000002")


@pytest.mark.parametrize(
    ("recipe", "messages"),
    [
        (recipe_with(restarts=0), "trainer rank 0, rl_step: ActorDiedError$"),
        (recipe_with(restarts=2), "train.max_restarts: the limit of 2 within an hour is reached"),
        (recipe_with(keep_checkpoints=0, checkpoint_every=0), "trainer rank 0, rl_step: ActorDiedError$"),
        (recipe_with(checkpoint_minutes=0.0, checkpoint_every=0), "trainer rank 0, rl_step: ActorDiedError$"),
    ],
)
def test_trainer_is_not_restarted_after_too_many_losses_or_without_checkpoints(tmp_path: Path, recipe: Recipe, messages: str) -> None:
    with pytest.raises(RuntimeFailure, match=messages):
        rl(recipe, tmp_path, {"rl_step": {4, 5, 6}})


def test_trainer_lost_before_its_first_stage_is_restarted(tmp_path: Path) -> None:
    recipe, world = recipe_with(), World()
    trainer = Mortal(recipe, {})
    group, rows = cast(TrainerGroup, trainer), cast(Any, Rows(world))
    state, waits = RunState(tmp_path, recipe.train), Waits(lambda _: None, tmp_path)
    recovery = TrainerRecovery(recipe, group, state, rows, waits, folder=tmp_path, reference=tmp_path / "reference")
    assert asyncio.run(recovery.recover_start(TrainerLost("trainer rank 0, build: ActorDiedError"))) == {"parameters": 1, "trained": 1}
    assert trainer.starts == 1
    assert [kind for kind, _ in world.events] == ["restart", "restart"] and world.events[1][1] == "trainer back after 0 s"


def test_host_lost_during_a_restart_is_part_of_the_same_loss(tmp_path: Path) -> None:
    recipe, world = recipe_with(restarts=1), World()
    gone = iter([HostLost("trainer-1: its host is lost")])

    class Late(Mortal):
        async def build(self, folder: Path) -> dict[str, int]:
            for error in gone:
                raise error
            return await super().build(folder)

    group, rows = cast(TrainerGroup, Late(recipe, {})), cast(Any, Rows(world))
    state, waits = RunState(tmp_path, recipe.train), Waits(lambda _: None, tmp_path)
    recovery = TrainerRecovery(recipe, group, state, rows, waits, folder=tmp_path, reference=tmp_path / "reference")
    asyncio.run(recovery.recover_start(TrainerLost("trainer rank 1, build: ActorDiedError")))
    messages = [message for _, message in world.events]
    assert (
        messages[1] == "trainer-1: its host is lost; restarting the trainer: restart 1 of at most 1 (train.max_restarts)"
        and len(messages) == 3
    )


def test_supervised_stage_repeats_the_same_problems_after_a_loss(tmp_path: Path) -> None:
    def train(home: Path, dies: dict[str, set[int]]) -> Mortal:
        recipe = Recipe.model_validate(
            {"model": {"path": "anywhere"}, "train": {"sft": {"steps": 7, "batch_size": 2}, "checkpoint_every": 3, "max_restarts": 2}}
        )
        trainer, state, rows = Mortal(recipe, dies), RunState(home, recipe.train), cast(Any, Rows(World()))
        group = cast(TrainerGroup, trainer)
        problems = [Problem(f"p{i}", f"{i}", "1") for i in range(5)]
        prepared = Prepared(cast(Any, None), Letters(), ProblemSets([], [], problems), 64)
        recover = TrainerRecovery(recipe, group, state, rows, Waits(lambda _: None, home), folder=home, reference=home / "reference")
        state.begin("sft")
        asyncio.run(SftStage(recipe, prepared, group, rows, state, recover=recover).run())
        return trainer

    undisturbed, disturbed = train(tmp_path / "a", {}), train(tmp_path / "b", {"sft_step": {2, 7}})
    assert (disturbed.starts, disturbed.trained, disturbed.weights) == (2, undisturbed.trained, undisturbed.weights)
