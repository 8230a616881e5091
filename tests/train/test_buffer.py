"""The sample buffer: samples in, whole groups out, and over a restart."""

import asyncio
from pathlib import Path

import pytest

from mtpctl.data import Problem
from mtpctl.samples import Sample
from mtpctl.train.buffer import Group, SampleBuffer


def group(number: int, size: int = 2) -> Group:
    return Group(number, Problem(f"p{number}", f"{number}+1=", str(number + 1)), size)


def sample(number: int, index: int) -> Sample:
    made = Sample(prompt_id=f"p{number}", group_id=str(number), prompt_ids=[1, 2], index=index)
    made.append([3, 4], [-0.5, -0.25], version=1)
    made.reward = float(index)
    return made


def test_a_group_comes_out_when_its_last_sample_is_in_sorted_by_index() -> None:
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
        assert (buffer.pending, buffer.ready) == (2, 1)
        await buffer.take(1)
        assert (buffer.pending, buffer.ready) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(("ordered", "expected"), [(False, [2, 0, 1]), (True, [0, 1, 2])])
def test_groups_leave_in_order_of_completion_or_of_drawing(ordered: bool, expected: list[int]) -> None:
    async def scenario() -> list[int]:
        buffer = SampleBuffer(ordered=ordered)
        for number in (2, 0, 1):
            await buffer.put(group(number))
        return [g.number for g in await buffer.take(3)]

    assert asyncio.run(scenario()) == expected


def test_take_waits_until_there_are_enough() -> None:
    async def scenario() -> None:
        buffer = SampleBuffer()
        taking = asyncio.create_task(buffer.take(2))
        await buffer.put(group(0))
        await asyncio.sleep(0)
        assert not taking.done()
        await buffer.put(group(1))
        assert [g.number for g in await taking] == [0, 1]

    asyncio.run(scenario())


def test_a_saved_buffer_keeps_complete_groups_and_asks_again_for_those_in_flight(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = SampleBuffer()
        for number in (0, 1):
            buffer.begin(group(number))
        buffer.add(sample(0, 0))
        done = buffer.add(sample(0, 1))
        assert done is not None
        await buffer.put(done)
        buffer.add(sample(1, 0))
        buffer.save(tmp_path / "buffer.jsonl")
        complete, again = SampleBuffer.load(tmp_path / "buffer.jsonl")
        assert complete == [done]
        assert [(g.number, g.problem.answer, g.samples) for g in again] == [(1, "2", [])]

    asyncio.run(scenario())


def test_an_ordered_batch_waits_for_what_was_drawn_before_it() -> None:
    """Whatever is complete first: put or dropped, a group of a lower number is waited for, and one of a higher number is not."""

    async def scenario() -> None:
        buffer = SampleBuffer(ordered=True)
        groups = [group(number, size=1) for number in range(4)]
        for each in groups:
            buffer.begin(each)
        await buffer.put(groups[2])
        await buffer.put(groups[1])
        taking = asyncio.create_task(buffer.take(2))
        await asyncio.sleep(0.01)
        assert not taking.done()
        await buffer.drop(groups[0])
        assert [g.number for g in await asyncio.wait_for(taking, 1)] == [1, 2]

    asyncio.run(scenario())
