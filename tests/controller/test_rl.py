"""The RL stage on a fake trainer and a fake generator: order, staleness, overlap, dynamic sampling, stops."""

from __future__ import annotations

import asyncio
import collections
import json
import math
import random
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from pathlib import Path
from typing import cast

import pytest

from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.controller.rl import RlStage
from mtpctl.controller.rollout_loop import BATCHES_WITHOUT_SIGNAL
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import TrainerGroup, TrainerLost
from mtpctl.data.problems import Problem, PromptCursor
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Answered, Outcome
from mtpctl.rollout.protocol import DEADLINE
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.rl_stage import FakeGenerator, FakeTrainer, World, drive, hold_out, recipe_of, right_or_wrong, run, stage_of
from tests.fakes.trainer_group import FakeTrainerGroup


class LongTails(FakeGenerator):
    """One response in fifty takes 200 times as long as the others, and those to `slow` prompts do so each time."""

    def __init__(self, world: World, slow: set[str]) -> None:
        super().__init__(world, lambda s: str(s.index))
        self.slow, self.dice = slow, random.Random(0)

    async def wait(self, sample: Sample) -> None:
        await asyncio.sleep(0.2 if sample.prompt_id in self.slow or self.dice.random() < 0.02 else 0.001)


def run_with_long_tails(recipe: Recipe, tmp_path: Path, slow: set[str]) -> World:
    world = World()

    stage = stage_of(recipe, world, tmp_path, generator=LongTails(world, slow))
    drive(stage, publish=True)
    return world


@pytest.mark.parametrize("sync_every", [1, 3])
@pytest.mark.parametrize("staleness", [0.5, 1.0])
def test_sample_age_is_bounded_for_slow_groups(tmp_path: Path, staleness: float, sync_every: int) -> None:
    """In versions, token by token; and a prompt that always takes longer than the bound is trained on in the end."""
    slow = {f"p{number}" for number in (3, 4, 5, 40, 41, 90)}
    recipe = recipe_of(steps=60, staleness=staleness, sync_every=sync_every, max_staleness=2)
    world = run_with_long_tails(recipe, tmp_path, slow)
    rows = [metrics for _, metrics in world.rows]
    assert max(metrics["async/staleness_max"] for metrics in rows) == 2
    for number, batch in enumerate(world.batches):
        published = 1 + number // sync_every
        assert max(published - span.version for sample in batch for span in sample.version_spans) <= 2
    trained = [sample.prompt_id for batch in world.batches for sample in batch]
    assert slow <= set(trained)
    assert len(trained) == 2 * len(set(trained)), "each prompt's group once"
    assert sum(metrics["async/asked_again"] for metrics in rows) >= len(slow)


def test_late_samples_of_an_expired_group_are_neither_scored_nor_trained_on(tmp_path: Path) -> None:
    world, scored = World(), []

    class Stale(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            """The first group completes only after it was discarded, while its second attempt is in flight."""
            if sample.prompt_id == "p0":
                await asyncio.sleep(0.01)
                while self.world.version < 3:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.0 if sample.group_id == "0" else 0.1)

    async def score(sample: Sample) -> Sample:
        scored.append(sample.group_id)
        return sample

    recipe, generator = recipe_of(steps=12, staleness=1.0, max_staleness=1), Stale(world, lambda s: str(s.index))
    stage = stage_of(recipe, world, tmp_path, generator=generator, score_logprobs=score)
    drive(stage, publish=True)
    assert "0" not in scored and scored.count("0.1") == 2
    assert [s.group_id for batch in world.batches for s in batch if s.prompt_id == "p0"] == ["0.1", "0.1"]


@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0])
def test_staleness_is_within_the_threshold_without_a_long_tail(tmp_path: Path, staleness: float, sync_every: int) -> None:
    world = run(recipe_of(staleness=staleness, sync_every=sync_every), tmp_path)
    assert len(world.batches) == 6
    for step, metrics in world.rows:
        assert metrics["async/staleness_max"] <= math.ceil(staleness), f"step {step}"


def test_groups_never_expire_while_waiting_in_the_buffer(tmp_path: Path) -> None:
    world = run(recipe_of(staleness=5.0, max_staleness=1, steps=20), tmp_path)
    assert {metrics["async/asked_again"] for _, metrics in world.rows} == {0.0}
    assert max(metrics["async/staleness_max"] for _, metrics in world.rows) == 1


def test_generation_overlaps_training_with_staleness(tmp_path: Path) -> None:
    assert run(recipe_of(staleness=1.0), tmp_path).made_while_updating > 0


def test_generation_and_training_alternate_without_staleness(tmp_path: Path) -> None:
    assert run(recipe_of(staleness=0.0), tmp_path).made_while_updating == 0


def test_every_drawn_prompt_is_trained_waiting_or_in_flight(tmp_path: Path) -> None:
    """Over 200 updates of short answers far ahead of the trainer, each exactly once, including those discarded as too old."""
    recipe, world = recipe_of(steps=200, staleness=4, max_staleness=3), World()
    stages: list[RlStage] = []

    async def scenario() -> None:
        stages.append(stage_of(recipe, world, tmp_path, generator=LongTails(world, {"p3", "p40"})))
        await stages[0].publish()
        await asyncio.wait_for(stages[0].run(), 60)

    asyncio.run(scenario())
    (stage,) = stages
    trained = [sample.prompt_id for batch in world.batches for sample in batch if sample.index == 0]
    waiting = [group.problem.prompt_id for group in (*stage.buffer._ready_groups, *stage.buffer.unfinished_groups())]
    assert len(trained) == 200 * 4 and sum(metrics["async/asked_again"] for _, metrics in world.rows) > 0
    assert sorted(trained + waiting) == sorted(f"p{number}" for number in range(stage.rollout.cursor.drawn))


def test_tokens_are_of_the_published_version_with_zero_max_staleness(tmp_path: Path) -> None:
    world = run(recipe_of(steps=8, staleness=1, max_staleness=0), tmp_path)
    assert len(world.rows) == 8 and max(metrics["async/staleness_max"] for _, metrics in world.rows) == 0


def test_batches_hold_whole_groups_with_rewards(tmp_path: Path) -> None:
    for batch in run(recipe_of(), tmp_path).batches:
        assert [s.index for s in batch] == [0, 1] * 4
        assert [s.group_id for s in batch[::2]] == [s.group_id for s in batch[1::2]]
        assert [s.reward for s in batch] == [0.0, 1.0] * 4


def test_deterministic_run_trains_in_the_order_of_the_data(tmp_path: Path) -> None:
    world = run(recipe_of(deterministic=True), tmp_path)
    assert [s.prompt_id for batch in world.batches for s in batch[::2]] == [f"p{i}" for i in range(24)]


def test_groups_without_signal_are_replaced_and_counted(tmp_path: Path) -> None:
    world = run(recipe_of(staleness=0.0), tmp_path, lambda s: str(s.index) if int(s.prompt_id[1:]) % 2 else "0")
    assert {int(s.prompt_id[1:]) % 2 for batch in world.batches for s in batch} == {1}
    assert all(len(batch) == 8 for batch in world.batches)
    assert world.rows[-1][1]["reward/signal_fraction"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("backoff", [False, True])
def test_signal_backoff_skips_problems_without_signal(tmp_path: Path, backoff: bool) -> None:
    """Half of 16 problems never have signal. 8 epochs draw them 8 times, or in epochs 0, 2 and 6."""
    recipe = recipe_of(steps=16, staleness=0.0, signal_backoff=backoff)
    world, answered = World(), collections.Counter[str]()

    def text(sample: Sample) -> str:
        answered[sample.prompt_id] += 1
        return str(sample.index) if int(sample.prompt_id[1:]) % 2 else "1"

    stage = stage_of(recipe, world, tmp_path, text)
    stage.rollout.cursor = PromptCursor([Problem(f"p{i}", f"{i}", "1") for i in range(16)], 0, shuffle=False, backoff=backoff)
    drive(stage)
    hopeless = sum(answered[f"p{i}"] for i in range(0, 16, 2)) / 16
    learning = sum(answered[f"p{i}"] for i in range(1, 16, 2)) / 16
    assert learning == 8 and hopeless == (3 if backoff else 8)


def test_signal_fraction_excludes_trained_groups_without_signal(tmp_path: Path) -> None:
    recipe = recipe_of(deterministic=True, dynamic_sampling=False)
    world = run(recipe, tmp_path, lambda s: str(s.index) if int(s.prompt_id[1:]) % 4 == 0 else "0")
    assert [metrics["reward/signal_fraction"] for _, metrics in world.rows] == [0.25] * 6


def test_run_fails_after_many_groups_without_signal(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=f"{BATCHES_WITHOUT_SIGNAL * 4} groups in a row had no signal .* mtpctl samples RUN --worst"):
        run(recipe_of(), tmp_path, lambda s: "0")


def with_deadline(recipe: Recipe, seconds: float) -> Recipe:
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"step_deadline_s": seconds})})


def test_batch_has_no_deadline_while_responses_arrive(tmp_path: Path) -> None:
    """Eight responses, one after the other, take longer than nothing may happen."""
    recipe, world = with_deadline(recipe_of(steps=1, staleness=0.0), 0.5), World()
    turn = asyncio.Lock()

    class OneByOne(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            async with turn:
                await asyncio.sleep(0.1)

    stage = stage_of(recipe, world, tmp_path, generator=OneByOne(world, lambda s: str(s.index)))
    drive(stage)
    assert len(world.batches) == 1


def test_reported_wait_suspends_the_deadline(tmp_path: Path) -> None:
    """Such as a host for its engines, which is reported elsewhere."""
    recipe, world = with_deadline(recipe_of(steps=1, staleness=0.0), 0.2), World()
    there = asyncio.Event()

    class Waiting(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            await there.wait()

    async def scenario() -> None:
        stage = stage_of(recipe, world, tmp_path, generator=Waiting(world, lambda s: str(s.index)))
        running = asyncio.ensure_future(stage.run())
        for _ in range(20):
            await asyncio.sleep(0.05)
            stage.rollout.record_progress()
        there.set()
        await asyncio.wait_for(running, 20)

    asyncio.run(scenario())
    assert len(world.batches) == 1


def test_stuck_rollout_fails_the_run_and_reports_its_progress(tmp_path: Path) -> None:
    recipe, world = with_deadline(recipe_of(steps=1, staleness=0.0), 0.2), World()

    class Stuck(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            if sample.group_id == "3":
                await asyncio.Event().wait()

    async def scenario() -> None:
        stage = stage_of(recipe, world, tmp_path, generator=Stuck(world, lambda s: str(s.index)))
        await asyncio.wait_for(stage.run(), 20)

    with pytest.raises(RuntimeFailure, match=r"batch of step 1: no response for 0\.2 s, with 3 of 4 groups ready; .*step_deadline_s"):
        asyncio.run(scenario())


def test_stop_takes_effect_at_the_next_step(tmp_path: Path) -> None:
    recipe, world = recipe_of(steps=1000), World()

    async def scenario() -> RunState:
        stage = stage_of(recipe, world, tmp_path, lambda s: str(s.index))
        running = asyncio.create_task(stage.run())
        while len(world.batches) < 3:
            await asyncio.sleep(0.001)
        stage.state.stop_requested.set()
        await asyncio.wait_for(running, 5)
        return stage.state

    state = asyncio.run(scenario())
    assert state.step == len(world.batches) < 1000


def test_rollout_failure_during_an_update_waits_for_the_update(tmp_path: Path) -> None:
    """So that it can be checkpointed."""
    recipe, world = recipe_of(staleness=2.0), World()
    under_way = asyncio.Event()

    class Failing(FakeGenerator):
        async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
            async for sample in super().generate(requests):
                yield sample
                if int(sample.group_id) >= 8:
                    await under_way.wait()
                    raise RuntimeFailure("every rollout replica failed")

    class Slow(FakeTrainer):
        async def rl_step(self, samples: list[Sample], version: int) -> dict[str, float]:
            if len(world.batches) == 1:
                under_way.set()
            return await super().rl_step(samples, version)

    async def scenario() -> RunState:
        stage = stage_of(recipe, world, tmp_path, generator=Failing(world, lambda s: str(s.index)))
        stage.trainer = cast(TrainerGroup, Slow(world))
        with pytest.raises(RuntimeFailure, match="every rollout replica failed"):
            await asyncio.wait_for(stage.run(), 20)
        return stage.state

    state = asyncio.run(scenario())
    assert (state.step, state.is_updating, len(world.batches)) == (2, False, 2)


class FailsOnce(FakeGenerator):
    """Fails after eight groups, once `under_way` is set."""

    def __init__(self, world: World) -> None:
        super().__init__(world, lambda s: str(s.index))
        self.under_way = asyncio.Event()

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        async for sample in super().generate(requests):
            yield sample
            if int(sample.group_id) >= 8:
                await self.under_way.wait()
                raise RuntimeFailure("every rollout replica failed")


def test_rollout_failure_is_the_error_even_if_the_trainer_is_lost_afterwards(tmp_path: Path) -> None:
    """The trainer is not restarted: the run has failed."""
    recipe, world = recipe_of(staleness=2.0), World()

    async def scenario() -> list[TrainerLost]:
        generator = FailsOnce(world)
        stage, recovered = stage_of(recipe, world, tmp_path, generator=generator), []

        async def lose_trainer(samples: list[Sample], version: int) -> dict[str, float]:
            generator.under_way.set()
            await asyncio.sleep(0.05)
            raise TrainerLost("rank 0 has died")

        async def recover(error: TrainerLost, **_: object) -> None:
            recovered.append(error)

        stage.trainer.rl_step = lose_trainer  # type: ignore[method-assign, assignment]
        stage.recover = recover
        with pytest.raises(RuntimeFailure, match="every rollout replica failed"):
            await asyncio.wait_for(stage.run(), 20)
        return recovered

    assert asyncio.run(scenario()) == []


def test_rollout_failure_does_not_interrupt_a_checkpoint(tmp_path: Path) -> None:
    recipe, world = recipe_of(staleness=2.0), World()

    async def scenario() -> list[int]:
        generator = FailsOnce(world)
        stage, written = stage_of(recipe, world, tmp_path, generator=generator), []

        async def checkpoint_if_due(trainer: object) -> None:
            generator.under_way.set()
            await asyncio.sleep(0.05)
            written.append(stage.state.step)

        stage.state.checkpoint_if_due = checkpoint_if_due  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeFailure, match="every rollout replica failed"):
            await asyncio.wait_for(stage.run(), 20)
        return written

    assert asyncio.run(scenario()) == [1]


def test_rollout_failure_during_a_sync_loses_no_metrics(tmp_path: Path) -> None:
    """The checkpoint contains the update, and a resumed run does not repeat it."""
    recipe, world = recipe_of(staleness=2.0), World()
    syncing = asyncio.Event()

    class Failing(FakeGenerator):
        async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
            async for sample in super().generate(requests):
                yield sample
                if int(sample.group_id) >= 8:
                    await syncing.wait()
                    raise RuntimeFailure("every rollout replica failed")

    async def sync(version: int) -> dict[str, float]:
        if version == 2:
            syncing.set()
            await asyncio.Event().wait()
        world.version = version
        return {"sync/seconds": 0.0}

    async def scenario() -> RunState:
        stage = stage_of(recipe, world, tmp_path, generator=Failing(world, lambda s: str(s.index)))
        stage.sync = sync
        with pytest.raises(RuntimeFailure, match="every rollout replica failed"):
            await asyncio.wait_for(stage.run(), 20)
        return stage.state

    state = asyncio.run(scenario())
    assert (state.step, state.version, state.is_updating) == (2, 1, False)
    assert [(step, "sync/seconds" in metrics) for step, metrics in world.rows] == [(1, True), (2, False)]


def numbers_of(groups: list[Group]) -> set[int]:
    return {group.number for group in groups}


def kept_by(stage: RlStage, path: Path) -> set[int]:
    """Numbers of the groups that a checkpoint of this moment would hold."""
    stage.buffer.snapshot_writer(path)()
    complete, again = SampleBuffer.load(path)
    return numbers_of(complete) | numbers_of(again)


def test_stop_loses_no_group(tmp_path: Path) -> None:
    """Also if the next batch is ready."""
    recipe, world = recipe_of(steps=1000, staleness=2.0), World()

    async def scenario() -> RlStage:
        stage = stage_of(recipe, world, tmp_path, lambda s: str(s.index))

        async def update(samples: list[Sample], version: int) -> dict[str, float]:
            world.batches.append(samples)
            while stage.buffer.num_ready < 4:
                await asyncio.sleep(0.001)
            if len(world.batches) == 3:
                stage.state.stop_requested.set()
            return {"skipped": 0.0, "perf/tokens": 1.0}

        stage.trainer.rl_step = update  # type: ignore[method-assign, assignment]
        await asyncio.wait_for(stage.run(), 5)
        return stage

    stage = asyncio.run(scenario())
    trained = {int(s.group_id) for batch in world.batches for s in batch}
    assert len(world.batches) == 3
    assert trained | kept_by(stage, tmp_path / "buffer.jsonl") == set(range(stage.rollout.cursor.drawn))


class OneEngine(FakeGenerator):
    """Works on four responses at once, 10 ms each. `busy` adds up the seconds in which it works, `span` those from first to last."""

    def __init__(self, world: World) -> None:
        super().__init__(world, lambda s: str(s.index))
        self.slots, self.working, self.busy, self.began, self.ended = asyncio.Semaphore(4), 0, 0.0, 0.0, 0.0

    async def wait(self, sample: Sample) -> None:
        async with self.slots:
            loop = asyncio.get_running_loop()
            self.began = self.began or loop.time()
            since, self.working = loop.time(), self.working + 1
            await asyncio.sleep(0.01)
            self.working -= 1
            self.ended = loop.time()
            self.busy += (self.ended - since) / 4


def test_slow_reward_does_not_make_engines_idle(tmp_path: Path) -> None:
    """As long as a hundred responses of an engine: as 2 s are to responses of 20 ms; groups ahead are what async lets in."""

    def share(seconds: float) -> tuple[float, list[float]]:
        world = World()

        async def slow(response: str, problem: Answered, sample: Sample) -> Outcome:
            await asyncio.sleep(seconds)
            return Outcome(float(response == problem.answer), seconds=seconds)

        async def scenario() -> OneEngine:
            engine = OneEngine(world)
            stage = stage_of(recipe_of(steps=60, staleness=15.0, max_staleness=100), world, tmp_path, generator=engine, reward=slow)
            await asyncio.wait_for(stage.run(), 60)
            return engine

        engine = asyncio.run(scenario())
        return engine.busy / (engine.ended - engine.began), [row["timing_s/reward"] for _, row in world.rows if row.get("timing_s/reward")]

    without, _ = share(0.0)
    with_it, waited = share(0.2)
    assert with_it > 0.95 * without
    assert waited == pytest.approx([0.2] * len(waited)) and waited


def test_rewards_are_computed_concurrently_as_responses_arrive(tmp_path: Path) -> None:
    """None waits for the others of its group: the first is rewarded while the second is still being generated."""
    world, observed = World(), []

    class SecondIsSlow(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            await asyncio.sleep(0.0 if sample.index == 0 else 0.05)
            observed.append(("made", sample.index))

    async def reward(response: str, problem: Answered, sample: Sample) -> Outcome:
        observed.append(("rewarded", sample.index))
        return await right_or_wrong(response, problem, sample)

    async def scenario() -> None:
        generator = SecondIsSlow(world, lambda s: str(s.index))
        await asyncio.wait_for(stage_of(recipe_of(steps=1, staleness=0.0), world, tmp_path, generator=generator, reward=reward).run(), 20)

    asyncio.run(scenario())
    assert observed.index(("rewarded", 0)) < observed.index(("made", 1))


def run_with_failures(recipe: Recipe, tmp_path: Path, failed: Outcome, fails: Callable[[Sample], bool]) -> World:
    """The stage to its end, with rewards of which some fail."""
    world = World()

    async def reward(response: str, problem: Answered, sample: Sample) -> Outcome:
        if fails(sample):
            return failed
        return Outcome(float(response == problem.answer), {"tone": 0.5})

    drive(stage_of(recipe, world, tmp_path, reward=reward))
    return world


def test_parts_of_rewards_are_logged_and_failures_counted(tmp_path: Path) -> None:
    """A failure that counts as 0 is trained on."""
    failed = Outcome(0.0, error="judge.py:3: ValueError", timed_out=True)
    world = run_with_failures(recipe_of(), tmp_path, failed, lambda s: s.index == 0)
    for _, row in world.rows:
        assert (row["reward/tone"], row["reward/mean"], row["reward/dropped"]) == (0.5, 0.5, 0.0)
    assert sum(row["reward/errors"] for _, row in world.rows) >= 24
    assert sum(row["reward/timeouts"] for _, row in world.rows) >= 24


def test_group_with_a_missing_reward_is_replaced(tmp_path: Path) -> None:
    failed = Outcome(None, error="judge.py:3: ValueError")
    world = run_with_failures(recipe_of(), tmp_path, failed, lambda s: s.prompt_id in ("p1", "p4") and s.index == 1)
    trained = {sample.prompt_id for batch in world.batches for sample in batch}
    assert not {"p1", "p4"} & trained and len(trained) == 6 * 4
    assert sum(row["reward/dropped"] for _, row in world.rows) == 2
    assert {row["reward/signal_fraction"] for _, row in world.rows} == {1.0}, "they are counted apart"


def test_reward_that_always_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"^reward\.on_error: 80 groups in a row were dropped \(the last: judge\.py:3: ValueError\)"):
        run_with_failures(recipe_of(), tmp_path, Outcome(None, error="judge.py:3: ValueError"), lambda s: True)


def test_group_without_a_reward_is_dropped_with_the_error_of_its_sample(tmp_path: Path) -> None:
    """Also if the sample that failed is not the last of its group."""
    with pytest.raises(RuntimeFailure, match=r"reward.on_error: \d+ groups in a row were dropped \(the last: judge is down\)"):
        run_with_failures(recipe_of(), tmp_path, Outcome(None, error="judge is down"), lambda s: s.index == 0)


def test_group_awaiting_its_reward_is_in_flight(tmp_path: Path) -> None:
    """It counts for staleness, and is requested again after a resume."""
    world, checking, checked = World(), asyncio.Event(), asyncio.Event()

    async def slow(response: str, problem: Answered, sample: Sample) -> Outcome:
        checking.set()
        await checked.wait()
        return await right_or_wrong(response, problem, sample)

    async def scenario() -> None:
        stage = stage_of(recipe_of(steps=1, staleness=0.0), world, tmp_path, reward=slow)
        running = asyncio.create_task(stage.run())
        await asyncio.wait_for(checking.wait(), 5)
        while stage.rollout.cursor.drawn < 4:
            await asyncio.sleep(0.001)
        assert stage.buffer.num_pending == 4
        assert kept_by(stage, tmp_path / "buffer.jsonl") == {0, 1, 2, 3}
        assert SampleBuffer.load(tmp_path / "buffer.jsonl")[0] == []
        checked.set()
        await asyncio.wait_for(running, 5)

    asyncio.run(scenario())


def test_requeued_groups_are_in_the_next_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = stage_of(recipe_of(), World(), tmp_path, lambda s: str(s.index))
        again = [Group(number, Problem(f"p{number}", str(number), "1"), 2) for number in range(3)]
        await stage.resume_buffer([], again)
        stage.buffer.begin(stage.rollout.next_group())
        assert kept_by(stage, tmp_path / "buffer.jsonl") == {0, 1, 2}

    asyncio.run(scenario())


def test_run_resumed_between_syncs_generates_only_for_the_rest_of_its_interval(tmp_path: Path) -> None:
    """The resumed run syncs earlier than the original one, and then generates only for the rest of the interval."""
    world = World()

    async def scenario() -> None:
        stage = stage_of(recipe_of(steps=8, staleness=0.0, sync_every=4), world, tmp_path, lambda s: str(s.index))
        stage.state.step, stage.state.version = 2, 1
        groups = [Group(number, Problem(f"p{number}", str(number), "1"), 2) for number in range(8)]
        for group in groups:
            group.samples = [Sample(group.problem.prompt_id, group.group_id, [1], index=i, reward=float(i)) for i in range(2)]
            for sample in group.samples:
                sample.append([1], [-1.0], 1)
        await stage.resume_buffer(groups, [])
        stage.rollout.cursor.take(8)
        await stage.publish()
        await asyncio.wait_for(stage.run(), 20)

    asyncio.run(scenario())
    assert {step: metrics["async/staleness_max"] for step, metrics in world.rows} == {3: 1, 4: 1, 5: 0, 6: 0, 7: 0, 8: 0}
    updates = {step: metrics["async/staleness_updates_max"] for step, metrics in world.rows}
    assert updates == {3: 4, 4: 5, 5: 0, 6: 1, 7: 2, 8: 3}, "the trainer is ahead of what it published"


@pytest.mark.parametrize("sync_every", [1, 2])
def test_resumed_groups_are_within_the_staleness_threshold(tmp_path: Path, sync_every: int) -> None:
    """If a run was stopped after a sync, the weights that it resumes with already have a version."""
    recipe = recipe_of(steps=8, staleness=1.0, sync_every=sync_every)
    stopped, resumed = World(), World()

    async def scenario() -> None:
        first = stage_of(recipe, stopped, tmp_path, lambda s: str(s.index))

        class Stopping(FakeTrainer):
            async def rl_step(self, samples: list[Sample], version: int) -> dict[str, float]:
                if first.state.step == 3:
                    first.state.stop_requested.set()
                return await super().rl_step(samples, version)

        first.trainer = cast(TrainerGroup, Stopping(stopped))
        first.state.begin("rl")
        await first.publish()
        await asyncio.wait_for(first.run(), 20)
        saved = await first.state.checkpoint(cast(TrainerGroup, FakeTrainerGroup()))
        assert saved is not None
        saved_state = json.loads((saved / "run.json").read_text())
        second = stage_of(recipe, resumed, tmp_path, lambda s: str(s.index))
        for name, value in saved_state.items():
            setattr(second.state, name, value)
        second.rollout.cursor.load_state_dict(saved_state["cursor"])
        await second.resume_buffer(*SampleBuffer.load(saved / "buffer.jsonl"))
        assert second.buffer.num_ready, "there is what may get stale"
        await second.publish()
        await asyncio.wait_for(second.run(), 20)

    asyncio.run(scenario())
    rows = [*stopped.rows, *resumed.rows]
    assert [step for step, _ in rows] == list(range(1, 9))
    assert max(metrics["async/staleness_max"] for _, metrics in rows) == 1
    assert [metrics["async/version"] for _, metrics in rows] == [1 + step // sync_every for step in range(1, 9)], "as without a stop"


def test_responses_cut_by_the_deadline_are_counted_and_reported(tmp_path: Path) -> None:
    recipe, world = recipe_of(steps=2), World()

    class Cutting(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            sample.finish_reason = DEADLINE if sample.index == 0 else "stop"

    stage = stage_of(recipe, world, tmp_path, generator=Cutting(world, lambda s: str(s.index)))
    hold_out(stage)
    drive(stage)
    evaluated, trained = [[m for _, m in world.rows if name in m] for name in ("eval/accuracy", "reward/mean")]
    assert [metrics["eval/deadline_fraction"] for metrics in evaluated] == [1.0, 1.0]
    assert [metrics["response/deadline_fraction"] for metrics in trained] == [0.5, 0.5]
    assert [(kind, message[:32]) for kind, message in world.events if kind != "data"] == [
        ("eval", "1 of 1 held-out responses were t"),
        ("rollout", "4 of 8 responses were truncated "),
        ("eval", "1 of 1 held-out responses were t"),
    ]


def test_last_evaluation_uses_the_last_update(tmp_path: Path) -> None:
    """Also if the last updates were not due to be synced yet."""
    world, observed = World(), []

    async def reward(response: str, problem: Answered, sample: Sample) -> Outcome:
        observed.append((world.version, len(world.batches)))
        return await right_or_wrong(response, problem, sample)

    stage = stage_of(recipe_of(steps=6, sync_every=4), world, tmp_path, reward=reward)
    hold_out(stage)
    drive(stage)
    assert observed[-1] == (2, 6)


def test_empty_response_is_rewarded_and_not_scored(tmp_path: Path) -> None:
    """What a deadline may leave."""
    world, scored = World(), []

    async def score(sample: Sample) -> Sample:
        scored.append(len(sample.response_ids))
        return sample

    stage = stage_of(recipe_of(), world, tmp_path, lambda s: str(s.index) if s.index else "", score_logprobs=score)
    drive(stage)
    assert set(scored) == {1}
    assert [s.reward for s in world.batches[0]] == [0.0, 1.0] * 4


def test_tokens_beyond_the_context_are_neither_scored_nor_trained_on(tmp_path: Path) -> None:
    """Where an environment's last answer reaches."""
    world = run(recipe_of(), tmp_path, lambda s: str(s.index) if s.index else "0" * 100)
    assert max(len(s.prompt_ids) + len(s.response_ids) for batch in world.batches for s in batch) == 64


@pytest.mark.parametrize(("resumed_at", "evaluated"), [(0, [0, 2, 4, 6]), (2, [2, 4, 6]), (3, [4, 6])])
def test_resumed_run_repeats_the_evaluation_that_was_due(tmp_path: Path, resumed_at: int, evaluated: list[int]) -> None:
    recipe, world = recipe_of(steps=6), World()
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"eval_every": 2})})

    stage = stage_of(recipe, world, tmp_path, lambda s: str(s.index))
    hold_out(stage)
    stage.state.step = resumed_at
    drive(stage)
    assert [step for step, metrics in world.rows if "eval/accuracy" in metrics] == evaluated


def test_samples_of_updates_and_dropped_groups_are_recorded(tmp_path: Path) -> None:
    recipe = recipe_of(steps=3)
    assert recipe.telemetry.samples == 8

    def text(sample: Sample) -> str:
        return "1" if int(sample.prompt_id[1:]) % 3 == 0 else str(sample.index)

    world = run(recipe, tmp_path, text)
    for step in (1, 2, 3):
        updated = [row for row in world.sample_rows if (row["step"], row["kind"]) == (step, "update")]
        assert len(updated) == 8 and {row["reward"] for row in updated} == {0.0, 1.0}
        assert all(row["answer"] == "1" and row["prompt"] == row["prompt_id"][1:] for row in updated)
    dropped = [row for row in world.sample_rows if row["kind"] == "dropped"]
    assert dropped and all(row["note"] == "no signal: every reward of its group is 1" for row in dropped)


def test_no_samples_are_recorded_with_samples_0(tmp_path: Path) -> None:
    recipe = recipe_of(steps=2)
    recipe = recipe.model_copy(update={"telemetry": recipe.telemetry.model_copy(update={"samples": 0})})
    assert run(recipe, tmp_path).sample_rows == []


def test_stop_may_cancel_the_evaluation_before_the_last_one(tmp_path: Path) -> None:
    """The stage returns, and the run writes its checkpoint."""
    recipe, world = recipe_of(steps=3), World()
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"eval_every": 2})})

    async def scenario() -> None:
        class Hanging(FakeGenerator):
            async def wait(self, sample: Sample) -> None:
                if sample.prompt_id == "e0" and len(world.batches) >= 2:
                    await asyncio.Event().wait()

        stage = stage_of(recipe, world, tmp_path, generator=Hanging(world, lambda s: str(s.index)))
        hold_out(stage)
        running = asyncio.create_task(stage.run())
        while stage.state.step < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        stage.state.stop_requested.set()
        await asyncio.wait_for(running, 20)

    asyncio.run(scenario())


@pytest.mark.parametrize("hangs_at", [0, 2, 4], ids=["before training", "between updates", "after the last update"])
def test_stop_does_not_wait_for_an_evaluation(tmp_path: Path, hangs_at: int) -> None:
    recipe, world = recipe_of(steps=4), World()
    train, evaluation = recipe.train.model_copy(update={"eval_every": 2}), recipe.evaluation.model_copy(update={"wait": True})
    recipe = recipe.model_copy(update={"train": train, "evaluation": evaluation})

    async def scenario() -> None:
        hanging = asyncio.Event()

        class Hanging(FakeGenerator):
            async def wait(self, sample: Sample) -> None:
                if sample.prompt_id == "e0" and len(world.batches) == hangs_at:
                    hanging.set()
                    await asyncio.Event().wait()

        stage = stage_of(recipe, world, tmp_path, generator=Hanging(world, lambda s: str(s.index)))
        hold_out(stage)
        running = asyncio.create_task(stage.run())
        await asyncio.wait_for(hanging.wait(), 20)
        stage.state.stop_requested.set()
        await asyncio.wait_for(running, 20)
        assert stage.state.step == hangs_at

    asyncio.run(scenario())
    assert [step for step, metrics in world.rows if "eval/accuracy" in metrics] == list(range(0, hangs_at, 2))
    assert ("eval", "the evaluation in progress has no result: the stage ended first") in world.events


@pytest.mark.parametrize("wait", [False, True])
def test_speed_and_idle_shares_are_correct_around_evaluations(tmp_path: Path, wait: bool) -> None:
    """Tokens generated during an evaluation count for the speed, and an engine with only held-out problems is not idle."""
    recipe, world = recipe_of(steps=6), World()
    train, evaluation = recipe.train.model_copy(update={"eval_every": 1}), recipe.evaluation.model_copy(update={"wait": wait})
    recipe = recipe.model_copy(update={"train": train, "evaluation": evaluation})
    evaluation_s, tokens = 0.05, 0

    class Slow(FakeGenerator):
        async def wait(self, sample: Sample) -> None:
            nonlocal tokens
            held_out = sample.group_id.startswith("eval")
            await asyncio.sleep(evaluation_s if held_out else 0.001)
            tokens += 30 if held_out else 1

    def text(sample: Sample) -> str:
        return "1" * 30 if sample.group_id.startswith("eval") else str(sample.index)

    stage = stage_of(recipe, world, tmp_path, generator=Slow(world, text))
    hold_out(stage)
    drive(stage)
    rows = [metrics for _, metrics in world.rows if "rollout/tokens_per_s" in metrics]
    evaluated = [metrics["timing_s/evaluation"] for _, metrics in world.rows if "timing_s/evaluation" in metrics]
    assert len(rows) == 6 and len(evaluated) == 7
    assert all(row["rollout/tokens_per_s"] > 0 for row in rows)
    if wait:
        assert sum(row["timing_s/step"] for row in rows) < sum(evaluated), "an evaluation is no part of an update"
        seconds = [row["timing_s/step"] + before for row, before in zip(rows, [0.0, *evaluated[1:-1]], strict=True)]
    else:
        assert max(row["async/rollout_idle"] for row in rows[1:]) < 0.5
        seconds = [row["timing_s/step"] for row in rows]
    counted = sum(row["rollout/tokens_per_s"] * each for row, each in zip(rows, seconds, strict=True))
    # The first and the last evaluation are before and after the updates where they are waited for.
    assert 0.8 * (tokens - 90) <= counted <= 1.2 * tokens
