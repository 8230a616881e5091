"""Replicas that die are replaced once, after bring-up, and slots that fail too often are quarantined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

import mtpctl.cluster.replicas as module
from mtpctl.cluster.replicas import Lifecycle, Replicas, Slot, start_all
from tests.fakes.event_loop import in_loop


class Gone(Exception):
    """The error of a dead replica."""


class Fake:
    def __init__(self, index: int) -> None:
        self.index, self.version, self.ended = index, 0, False
        self.answer: str | Exception = "here"

    async def ask(self) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Fleet:
    """Fake replicas. `failing`: number of starts that fail next; `available`: whether bring-up has its version."""

    def __init__(self) -> None:
        self.started: list[Fake] = []
        self.failing = 0
        self.bringing_up: Callable[[Fake], None] = lambda _: None
        self.bringing_up_takes = self.ending_takes = partial(asyncio.sleep, 0)
        self.available = True
        self.changes = 0
        self.lines: list[str] = []
        self.end_s = self.catch_up_s = 1.0

    async def start(self, index: int) -> Fake:
        await asyncio.sleep(0)
        if self.failing:
            self.failing -= 1
            raise RuntimeError("no memory")
        self.started.append(Fake(index))
        return self.started[-1]

    async def end(self, replica: Fake) -> None:
        replica.ended = True
        await self.ending_takes()

    async def catch_up(self, replica: Fake) -> bool:
        self.bringing_up(replica)
        await self.bringing_up_takes()
        return self.available

    def changed(self) -> None:
        self.changes += 1

    async def replicas(self, count: int, *, max_restarts: int = 3) -> Replicas[Fake]:
        lifecycle = Lifecycle(
            self.start,
            self.catch_up,
            self.end,
            self.changed,
            (Gone,),
            max_restarts,
            end_timeout_s=self.end_s,
            catch_up_timeout_s=self.catch_up_s,
            log=self.lines.append,
        )
        return Replicas(await start_all(self.start, self.end, count), lifecycle)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@in_loop
async def test_a_dead_replica_is_replaced_once_despite_repeated_reports() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(2)
    slot, dead = replicas.live()[1]
    for _ in range(5):
        replicas.report_failure(slot, dead, Gone("killed"))
    assert slot.state == "restarting" and [r.index for _, r in replicas.live()] == [0]
    await until(lambda: len(replicas.live()) == 2)
    assert dead.ended and len(fleet.started) == 3 and fleet.started[-1].index == 1
    assert (replicas.num_restarts, fleet.changes, slot.reason) == (1, 1, "Gone: killed")
    assert fleet.lines == ["replica 1 failed: Gone: killed", "replica 1 is back"]


@in_loop
async def test_a_replica_that_dies_during_start_up_is_restarted() -> None:
    """Up to `max_restarts` times. Other errors are raised at once."""

    def starter(*errors: Exception) -> Callable[[int], Coroutine[Any, Any, Fake]]:
        left = list(errors)

        async def start(index: int) -> Fake:
            await asyncio.sleep(0)
            if index == 1 and left:
                raise left.pop(0)
            return await fleet.start(index)

        return start

    fleet = Fleet()
    replicas = await start_all(starter(Gone(), Gone()), fleet.end, 2, fatal_errors=(Gone,), max_restarts=2)
    assert [replica.index for replica in replicas] == [0, 1]
    for errors, kind in (((Gone(), Gone(), Gone()), Gone), ((RuntimeError("no memory"),), RuntimeError)):
        fleet = Fleet()
        with pytest.raises(kind):
            await start_all(starter(*errors), fleet.end, 2, fatal_errors=(Gone,), max_restarts=2)
        assert [each.index for each in fleet.started if each.ended] == [0]


@in_loop
async def test_a_fresh_replica_serves_after_catch_up_and_never_during_an_update() -> None:
    fleet = Fleet()
    fleet.bringing_up = lambda replica: setattr(replica, "version", 7)
    replicas = await fleet.replicas(1)
    async with replicas.updating:
        replicas.report_failure(*replicas.live()[0], Gone())
        await until(lambda: len(fleet.started) == 2)
        await asyncio.sleep(0.01)
        assert not replicas.live() and fleet.started[1].version == 0
    await until(lambda: bool(replicas.live()))
    assert replicas.live()[0][1].version == 7


@in_loop
async def test_an_update_may_provide_the_version_that_a_fresh_replica_waits_for() -> None:
    """For example the retry of a version that the others already have, but that is not in the store yet."""
    fleet = Fleet()
    fleet.available = False
    replicas = await fleet.replicas(1)
    replicas.report_failure(*replicas.live()[0], Gone())
    await until(lambda: len(fleet.started) == 2)
    async with asyncio.timeout(2), replicas.updating:
        fleet.available = True
    await until(lambda: bool(replicas.live()))
    assert replicas.live()[0][1] is fleet.started[1]


@in_loop
async def test_waiting_for_a_version_times_out() -> None:
    fleet, before = Fleet(), module.VERSION_WAIT_S
    fleet.available = False
    replicas = await fleet.replicas(1, max_restarts=0)
    module.VERSION_WAIT_S = 0.05
    try:
        replicas.report_failure(*replicas.live()[0], Gone())
        replicas.slots[0].failure_times.clear()
        await until(lambda: bool(replicas.quarantine_reasons()))
    finally:
        module.VERSION_WAIT_S = before
    assert "the weight version of the other replicas was not available within 0.05 s" in replicas.quarantine_reasons()
    assert fleet.started[1].ended


@in_loop
async def test_a_replica_whose_catch_up_fails_is_ended_and_replaced() -> None:
    fleet = Fleet()

    def refuse(replica: Fake) -> None:
        if len(fleet.started) < 4:
            raise ValueError("does not fit")

    fleet.bringing_up = refuse
    replicas = await fleet.replicas(1)
    replicas.report_failure(*replicas.live()[0], Gone())
    await until(lambda: bool(replicas.live()))
    assert [replica.ended for replica in fleet.started] == [True, True, True, False]


@in_loop
async def test_a_slot_that_fails_too_often_is_quarantined_with_its_reason() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(2, max_restarts=2)
    fleet.failing = 9
    for slot, replica in replicas.live():
        assert not replicas.quarantine_reasons()
        replicas.report_failure(slot, replica, Gone())
        await until(lambda slot=slot: slot.is_quarantined)  # type: ignore[misc]
    assert replicas.quarantine_reasons() == "0: RuntimeError: no memory; 1: RuntimeError: no memory"
    assert [len(slot.failure_times) for slot in replicas.slots] == [3, 3] and fleet.failing == 5


@in_loop
async def test_old_failures_are_forgotten() -> None:
    replicas = await Fleet().replicas(1, max_restarts=1)
    (slot,) = replicas.slots
    for _ in range(4):
        replicas.report_failure(*replicas.live()[0], Gone())
        await until(lambda: bool(replicas.live()))
        slot.failure_times = [then - module.FAILURE_WINDOW_S for then in slot.failure_times]
    assert replicas.num_restarts == 4
    for _ in range(2):
        replicas.report_failure(*replicas.live()[0], Gone())
        await until(lambda: bool(replicas.live()) or slot.is_quarantined)
    assert slot.is_quarantined and replicas.num_restarts == 5


@in_loop
async def test_replicas_are_called_concurrently_and_errors_raised_at_the_end() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(3)
    assert await replicas.call_each(Fake.ask) == ["here"] * 3
    fleet.started[0].answer, fleet.started[1].answer = ValueError("other shapes"), Gone()
    with pytest.raises(ValueError, match="other shapes"):
        await replicas.call_each(Fake.ask)
    assert [slot.state for slot in replicas.slots] == ["serving", "restarting", "serving"]


@in_loop
async def test_an_update_calls_the_named_replicas_and_no_others() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(3)
    async with replicas.fixed_members():
        assert replicas.rank_names("fake", 2, lambda replica: replica.index > 0) == ["fake 1.0.0", "fake 1.0.1", "fake 2.0.0", "fake 2.0.1"]
        fleet.started[1].answer = Gone()
        replicas.report_failure(*replicas.live()[1], Gone())
        await until(lambda: len(fleet.started) == 4)
        called: list[Fake] = []

        async def ask(replica: Fake) -> str:
            called.append(replica)
            return await replica.ask()

        assert await replicas.apply_update(ask) == ["here"]
        assert called == fleet.started[1:3], "includes the dead one, for which others may wait"
        assert len(await replicas.apply_update(Fake.ask)) == 2, "names apply to one update"
    await until(lambda: len(replicas.live()) == 3)
    assert replicas.rank_names("fake", 1) == ["fake 0.0.0", "fake 1.1.0", "fake 2.0.0"]
    async with replicas.fixed_members():
        assert await replicas.apply_update(Fake.ask, condition=lambda replica: replica.index > 1) == ["here"], (
            "names do not apply to another block"
        )


@in_loop
async def test_updates_do_not_wait_for_a_hanging_bring_up() -> None:
    fleet = Fleet()
    fleet.catch_up_s = 0.05
    replicas = await fleet.replicas(1, max_restarts=1)
    fleet.bringing_up_takes = asyncio.Event().wait
    replicas.report_failure(*replicas.live()[0], Gone())
    await until(lambda: bool(replicas.quarantine_reasons()))
    assert replicas.quarantine_reasons() == "0: RuntimeFailure: it did not load the weight version of the other replicas within 0.05 s"
    async with asyncio.timeout(1), replicas.fixed_members():
        assert all(replica.ended for replica in fleet.started)


@in_loop
async def test_close_does_not_wait_for_a_replica_that_hangs() -> None:
    fleet = Fleet()
    fleet.end_s = 0.05
    replicas = await fleet.replicas(2)
    fleet.ending_takes = asyncio.Event().wait
    replicas.report_failure(*replicas.live()[0], Gone())
    async with asyncio.timeout(1):
        await replicas.close()


@in_loop
async def test_close_ends_a_replica_during_bring_up() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(1)
    fleet.bringing_up_takes = asyncio.Event().wait
    replicas.report_failure(*replicas.live()[0], Gone())
    await until(lambda: len(fleet.started) == 2)
    await asyncio.sleep(0.01)
    await replicas.close()
    assert fleet.started[1].ended


@in_loop
async def test_if_a_replica_does_not_start_the_others_are_ended() -> None:
    fleet = Fleet()
    fleet.failing = 1
    with pytest.raises(RuntimeError, match="no memory"):
        await fleet.replicas(3)
    assert len(fleet.started) == 2 and all(replica.ended for replica in fleet.started)


async def hand_nothing_over(slot: Slot[Fake], replica: Fake) -> None:
    """The hand-over of a replica without remaining work."""


@in_loop
async def test_a_leaving_replica_gets_no_work_and_counts_no_failure() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(2)
    over = asyncio.Event()

    async def hand_over(slot: Slot[Fake], replica: Fake) -> None:
        assert slot.replica is None and not replica.ended
        await over.wait()

    leaving = asyncio.ensure_future(replicas.leave(0, hand_over))
    await asyncio.sleep(0.005)
    slot = replicas.slots[0]
    assert (slot.state, slot.failure_times, [replica.index for _, replica in replicas.live()]) == ("vacant", [], [1])
    over.set()
    await leaving
    assert fleet.started[0].ended and replicas.num_restarts == 0 and len(fleet.started) == 2 and fleet.changes == 1


@in_loop
async def test_a_restarting_or_quarantined_slot_can_be_vacated() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(3, max_restarts=0)
    fleet.bringing_up_takes = asyncio.Event().wait
    replicas.join(3)
    await until(lambda: len(fleet.started) == 4)
    await asyncio.sleep(0.005)
    async with asyncio.timeout(1):
        await replicas.leave(3, hand_nothing_over)
    assert fleet.started[3].ended and not replicas.updating.locked()
    replicas.report_failure(*replicas.live()[1], Gone("killed"))
    await until(lambda: replicas.slots[1].is_quarantined)
    await replicas.leave(1, hand_nothing_over)
    assert [slot.state for slot in replicas.slots] == ["serving", "vacant", "serving", "vacant"]


@in_loop
async def test_a_joining_replica_is_caught_up_and_earlier_failures_are_forgotten() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(1, max_restarts=0)
    replicas.report_failure(*replicas.live()[0], Gone("killed"))
    await until(lambda: bool(replicas.quarantine_reasons()))
    await replicas.leave(0, hand_nothing_over)
    assert replicas.quarantine_reasons() == "", "vacant slots do not count"
    fleet.bringing_up = lambda replica: setattr(replica, "version", 7)
    replicas.join(0)
    replicas.join(1)
    await until(lambda: len(replicas.live()) == 2)
    assert [replica.version for _, replica in replicas.live()] == [7, 7] and replicas.num_restarts == 0
    assert fleet.lines == ["replica 0 failed: Gone: killed", "replica 0 is in quarantine: it failed 1 time(s) within an hour"]


@in_loop
async def test_a_joining_replica_that_does_not_start_is_quarantined() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(1, max_restarts=1)
    fleet.failing = 9
    replicas.join(1)
    await until(lambda: replicas.slots[1].is_quarantined)
    assert replicas.slots[1].reason == "RuntimeError: no memory" and fleet.failing == 7 and not replicas.quarantine_reasons()


@in_loop
async def test_after_close_nothing_is_started() -> None:
    fleet = Fleet()
    replicas = await fleet.replicas(2)
    slot, replica = replicas.live()[0]
    replicas.report_failure(slot, replica, Gone())
    await replicas.close()
    await asyncio.sleep(0.01)
    replicas.report_failure(*replicas.live()[0], Gone())
    assert len(fleet.started) == 2 and fleet.started[1].ended


@in_loop
async def test_close_ends_a_replica_whose_failure_was_just_reported() -> None:
    """Its restart is cancelled before it begins."""
    fleet = Fleet()
    replicas = await fleet.replicas(1)
    ((slot, failed),) = replicas.live()
    replicas.report_failure(slot, failed, Gone())
    await replicas.close()
    assert failed.ended


@in_loop
async def test_cancelled_start_ends_the_replicas_that_had_started() -> None:
    fleet = Fleet()

    async def start(index: int) -> Fake:
        if index:
            await asyncio.Event().wait()
        return await fleet.start(index)

    task = asyncio.create_task(start_all(start, fleet.end, 2))
    await until(lambda: len(fleet.started) == 1)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.started[0].ended
