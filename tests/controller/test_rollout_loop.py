"""What the rollout loop admits, and what it does if the engines stop accepting drafts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mtpctl.controller.rollout_loop import Admission
from mtpctl.errors import RuntimeFailure
from mtpctl.samples import Sample, Speculation
from tests.fakes.rl_stage import FakeGenerator, World, recipe_of, stage_of


class Silent(FakeGenerator):
    """Answers nothing."""

    async def wait(self, sample: Sample) -> None:
        await asyncio.Event().wait()


class Drafting(FakeGenerator):
    """Accepts four of five drafts up to weight version 2, and none after it."""

    async def wait(self, sample: Sample) -> None:
        accepted = 40 if self.world.version <= 2 else 0
        sample.speculation = Speculation(50, accepted, [accepted], 50)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_groups_in_flight_do_not_depend_on_data_parallel_ranks(tmp_path: Path, dp: int) -> None:
    recipe = recipe_of(staleness=0.5)
    parallel = recipe.train.parallel.model_copy(update={"dp": dp})
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"parallel": parallel})})

    async def scenario() -> int:
        world = World()
        stage = stage_of(recipe, world, tmp_path, generator=Silent(world, lambda s: ""))
        running = asyncio.ensure_future(stage.run())
        while stage.rollout.admission.has_room:
            await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return stage.buffer.num_pending

    assert asyncio.run(scenario()) == 6, "half as many again as an update trains on"


@pytest.mark.parametrize("on_collapse", ["warn", "error"])
def test_acceptance_collapse_after_a_sync_warns_or_ends_the_run(tmp_path: Path, on_collapse: str) -> None:
    recipe = recipe_of(steps=12, staleness=0.0)
    recipe = recipe.model_copy(update={"sync": recipe.sync.model_copy(update={"on_collapse": on_collapse})})
    world = World()

    async def scenario() -> None:
        stage = stage_of(recipe, world, tmp_path, generator=Drafting(world, lambda s: str(s.index)))
        await stage.publish()
        await asyncio.wait_for(stage.run(), 20)

    messages = "fell to 0.0% over the .* drafts after the sync of version 3, from 80.0%"
    if on_collapse == "error":
        with pytest.raises(RuntimeFailure, match=f"sync.on_collapse: .*{messages}"):
            asyncio.run(scenario())
        return
    asyncio.run(scenario())
    kind, message = world.events[0]
    assert kind == "alarm" and "after the sync of version 3, from 80.0%" in message


class Cached(FakeGenerator):
    """Finds a share of each prompt in the prefix cache."""

    def __init__(self, world: World, share: float | None) -> None:
        super().__init__(world, lambda s: str(s.index))
        self.share = share

    async def wait(self, sample: Sample) -> None:
        sample.cached_tokens = None if self.share is None else int(self.share * len(sample.prompt_ids))
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("share", "events"), [(None, 0), (0.0, 1), (1.0, 0)])
def test_cold_prefix_cache_is_reported_once(tmp_path: Path, share: float | None, events: int) -> None:
    world = World()
    asyncio.run(asyncio.wait_for(stage_of(recipe_of(), world, tmp_path, generator=Cached(world, share)).run(), 20))
    rates = {metrics.get("rollout/prefix_cache_hit_rate") for _, metrics in world.rows}
    assert rates == {share}
    assert len(world.events) == events
    assert all(kind == "rollout" and "engines compute each prompt 2 times" in message for kind, message in world.events)


# Admission: how far generation may run ahead of the weights.


def let_out(admission: Admission) -> int:
    count = 0
    while admission.has_room:
        admission.admit()
        count += 1
    return count


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 8), (0.5, 12), (1.0, 16)])
def test_admission_is_limited_to_one_plus_threshold_times_the_consumption(threshold: float, expected: int) -> None:
    assert let_out(Admission(groups_per_step=4, sync_every=2, threshold=threshold)) == expected
    assert Admission(groups_per_step=100, sync_every=1, threshold=0.15).limit == 115


def test_groups_still_pending_at_a_sync_count_against_the_next_interval() -> None:
    admission = Admission(groups_per_step=8, sync_every=1, threshold=0.5)
    let_out(admission)
    admission.begin_interval(num_pending=4)
    assert let_out(admission) == 8


def test_a_dropped_group_makes_room_for_its_replacement() -> None:
    admission = Admission(groups_per_step=2, sync_every=1, threshold=0.0)
    let_out(admission)
    admission.release()
    assert let_out(admission) == 1


def test_every_group_after_a_sync_has_the_new_weights_without_staleness() -> None:
    admission = Admission(groups_per_step=3, sync_every=1, threshold=0.0)
    for _ in range(4):
        assert let_out(admission) == 3
        admission.begin_interval(num_pending=0)
