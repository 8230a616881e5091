"""The sample buffer: samples in, whole groups out, and over a restart."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.data.problems import Problem
from mtpctl.samples import Sample


def group(number: int, size: int = 2) -> Group:
    return Group(number, Problem(f"p{number}", f"{number}+1=", str(number + 1)), size)


def sample(number: int, index: int) -> Sample:
    created = Sample(prompt_id=f"p{number}", group_id=str(number), prompt_ids=[1, 2], index=index)
    created.append([3, 4], [-0.5, -0.25], version=1)
    created.reward = float(index)
    return created


async def take(buffer: SampleBuffer, count: int, *, due: int = -1, later: int = 0) -> list[Group]:
    await buffer.wait(count, due_version=due, max_deferred=later)
    return buffer.take(count)


def test_last_sample_completes_a_group_in_index_order() -> None:
    buffer = SampleBuffer()
    buffer.begin(group(0))
    assert buffer.add(sample(0, 1)) is None
    complete = buffer.add(sample(0, 0))
    assert complete is not None
    assert [s.index for s in complete.samples] == [0, 1]


def test_pending_counts_groups_in_flight_and_groups_that_wait() -> None:
    async def scenario() -> None:
        buffer = SampleBuffer()
        buffer.begin(group(0))
        buffer.begin(group(1, size=1))
        done = buffer.add(sample(1, 0))
        assert done is not None
        await buffer.put(done)
        assert (buffer.num_pending, buffer.num_ready) == (2, 1)
        await take(buffer, 1)
        assert (buffer.num_pending, buffer.num_ready) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(("ordered", "expected"), [(False, [2, 0, 1]), (True, [0, 1, 2])])
def test_groups_are_trained_in_order_of_completion_or_of_drawing(ordered: bool, expected: list[int]) -> None:
    async def scenario() -> list[int]:
        buffer = SampleBuffer(ordered=ordered)
        for number in (2, 0, 1):
            await buffer.put(group(number))
        return [g.number for g in await take(buffer, 3)]

    assert asyncio.run(scenario()) == expected


def test_wait_returns_once_enough_groups_are_ready() -> None:
    async def scenario() -> None:
        buffer = SampleBuffer()
        taking = asyncio.create_task(take(buffer, 2))
        await buffer.put(group(0))
        await asyncio.sleep(0)
        assert not taking.done()
        await buffer.put(group(1))
        assert [g.number for g in await taking] == [0, 1]

    asyncio.run(scenario())


def test_saved_buffer_restores_complete_groups_and_requeues_unfinished_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = SampleBuffer()
        for number in (0, 1):
            buffer.begin(group(number))
        buffer.add(sample(0, 0))
        done = buffer.add(sample(0, 1))
        assert done is not None
        await buffer.put(done)
        buffer.add(sample(1, 0))
        buffer.snapshot_writer(tmp_path / "buffer.jsonl")()
        complete, again = SampleBuffer.load(tmp_path / "buffer.jsonl")
        assert complete == [done]
        assert [(g.number, g.problem.answer, g.samples) for g in again] == [(1, "2", [])]

    asyncio.run(scenario())


def test_saved_buffer_restores_routes(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer, created = SampleBuffer(), [sample(0, 0), sample(0, 1)]
        routes = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
        created[1].routes = routes
        await buffer.put(Group(0, group(0).problem, 2, created))
        buffer.snapshot_writer(tmp_path / "buffer.jsonl")()
        ((retained,), _) = SampleBuffer.load(tmp_path / "buffer.jsonl")
        assert retained.samples[0].routes is None
        assert np.array_equal(retained.samples[1].routes, routes) and retained.samples[1].routes.dtype == np.uint8

    asyncio.run(scenario())


def test_ordered_batch_waits_for_earlier_groups() -> None:
    """Whatever is complete first: put or dropped, a group of a lower number is waited for, and one of a higher number is not."""

    async def scenario() -> None:
        buffer = SampleBuffer(ordered=True)
        groups = [group(number, size=1) for number in range(4)]
        for each in groups:
            buffer.begin(each)
        await buffer.put(groups[2])
        await buffer.put(groups[1])
        taking = asyncio.create_task(take(buffer, 2))
        await asyncio.sleep(0.01)
        assert not taking.done()
        await buffer.drop(groups[0])
        assert [g.number for g in await asyncio.wait_for(taking, 1)] == [1, 2]

    asyncio.run(scenario())


def sent(number: int, version: int, retries: int = 0) -> Group:
    """A group of one response that was sent out under `version`."""
    return Group(number, Problem(f"p{number}", f"{number}+1=", str(number + 1)), 1, version=version, retries=retries)


def answer(group: Group, version: int) -> Sample:
    created = Sample(group.problem.prompt_id, group.group_id, [1, 2])
    created.append([3], [-0.5], version)
    return created


def test_the_oldest_weights_are_trained_on_first() -> None:
    async def scenario() -> list[int]:
        buffer = SampleBuffer()
        for number, version in ((0, 5), (1, 3), (2, 5), (3, 4)):
            group = sent(number, 0)
            group.samples.append(answer(group, version))
            await buffer.put(group)
        return [g.number for g in await take(buffer, 4)]

    assert asyncio.run(scenario()) == [1, 3, 0, 2]


def test_expired_groups_are_requeued_under_another_id() -> None:
    """In flight by the weights that they were sent out under, and complete by those of their oldest token."""

    async def scenario() -> None:
        buffer = SampleBuffer()
        coming, there, young = sent(0, 1), sent(1, 1), sent(2, 1)
        for group, version in ((coming, None), (there, 1), (young, 2)):
            buffer.begin(group)
            if version is not None:
                assert buffer.add(answer(group, version)) is group
                await buffer.put(group)
        assert buffer.expire(2) == 2
        assert [group.unwanted.is_set() for group in (coming, there, young)] == [True, True, False]
        assert (buffer.num_pending, buffer.num_ready) == (1, 1)
        assert [(g.number, g.group_id, g.samples) for g in buffer.requeued_groups] == [(0, "0.1", []), (1, "1.1", [])]
        late = answer(coming, 1)
        assert buffer.problem_of(late) is None and buffer.add(late) is None
        # One that was being rewarded.
        coming.samples.append(late)
        await buffer.put(coming)
        assert not await buffer.drop(coming) and buffer.num_ready == 1

    asyncio.run(scenario())


def test_batch_waits_for_retried_groups_that_would_be_too_old_for_the_next() -> None:
    async def scenario() -> None:
        buffer = SampleBuffer()
        groups = [sent(0, 3, retries=1), sent(1, 4, retries=1), sent(2, 3), sent(3, 4), sent(4, 4)]
        for group in groups:
            buffer.begin(group)
        for group in groups[2:]:
            buffer.add(answer(group, group.version))
            await buffer.put(group)
        taking = asyncio.create_task(take(buffer, 2, due=3))
        await asyncio.sleep(0.01)
        assert not taking.done()
        buffer.add(answer(groups[0], 3))
        await buffer.put(groups[0])
        assert [g.number for g in await asyncio.wait_for(taking, 1)] == [0, 2], "it does not wait for the other"

    asyncio.run(scenario())


def test_batch_leaves_retried_groups_that_later_batches_can_take() -> None:
    async def scenario() -> list[int]:
        buffer = SampleBuffer()
        for group in [late := sent(0, 3, retries=1), other := sent(1, 3, retries=1), there := sent(2, 3)]:
            buffer.begin(group)
        for group in (other, there):
            buffer.add(answer(group, 3))
            await buffer.put(group)
        assert late.samples == []
        return [g.number for g in await asyncio.wait_for(take(buffer, 2, due=3, later=1), 1)]

    assert asyncio.run(scenario()) == [1, 2]


def test_requeued_group_keeps_its_retries_after_a_resume(tmp_path: Path) -> None:
    buffer = SampleBuffer()
    buffer.begin(sent(0, 3, retries=1))
    buffer.snapshot_writer(tmp_path / "buffer.jsonl")()
    assert [(g.number, g.retries) for g in SampleBuffer.load(tmp_path / "buffer.jsonl")[1]] == [(0, 1)]
