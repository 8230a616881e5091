"""One update of one target: whatever does not end is given up, and a target that may hold two versions serves none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mtpctl.sync.protocol import Manifest, SectionPlan, SyncError, TargetDirty
from mtpctl.sync.update import update_target

SENT = Manifest(1, "shm", "nowhere", {"target": SectionPlan(())})


class Target:
    """Never gets its buckets. `aborts`: whether it returns to what it had."""

    version = 0

    def __init__(self, *, aborts: bool) -> None:
        self.aborts, self.trusted = aborts, True

    async def begin_update(self, *_: Any) -> None: ...

    async def receive(self, *_: Any) -> None:
        await asyncio.Event().wait()

    async def finish_update(self) -> None: ...

    async def abort_update(self) -> None:
        if not self.aborts:
            await asyncio.Event().wait()

    async def checksums(self) -> dict[str, str]:
        return {}

    def distrust(self) -> None:
        self.trusted = False


def test_an_update_that_does_not_end_is_given_up() -> None:
    target = Target(aborts=True)
    with pytest.raises(SyncError, match=r"took longer than sync\.deadline_s = 0\.05"):
        asyncio.run(asyncio.wait_for(update_target(target, SENT, deadline_s=0.05), 5))
    assert target.trusted


def test_a_target_that_does_not_come_back_from_one_either_is_dirty() -> None:
    target = Target(aborts=False)
    with pytest.raises(TargetDirty, match=r"version 1 broke off, and giving it up took longer than 0\.05 s"):
        asyncio.run(asyncio.wait_for(update_target(target, SENT, deadline_s=0.05), 5))
    assert not target.trusted


def test_one_that_is_left_on_its_way_back_is_not_trusted() -> None:
    target = Target(aborts=False)

    async def leave() -> None:
        updating = asyncio.create_task(update_target(target, SENT, deadline_s=0.05))
        await asyncio.sleep(0.07)
        updating.cancel()
        await updating

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
    assert not target.trusted
