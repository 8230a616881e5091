"""The calls to trainer and targets in each state of an update, with fakes, and how the update of one target is aborted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import RuntimeFailure
from mtpctl.plan.buckets import TensorSpec, plan_buckets
from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Manifest, PauseMode, Section, SectionPlan, SyncError, TargetDirty
from mtpctl.sync.transports.base import TransferStats
from mtpctl.sync.update import Parties, State, SyncReport, WeightUpdate, update_target


class World:
    """A fake trainer and engine that record their calls and the state of the update."""

    def __init__(self, transport: str, root: Path) -> None:
        self.calls: list[tuple[str, State]] = []
        self.refuses: Exception | None = None
        self.fails: Exception | None = None
        recipe = Recipe.model_validate({"sync": {"transport": transport}})
        self.update = WeightUpdate(Parties(recipe, self, self, None, root), 1, ("target", "draft"), verify=False)

    def note(self, what: str) -> None:
        self.calls.append((what, self.update.state))

    async def plan_weights(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest:
        self.note("plan_weights")
        assert (version, members, checksums, sections) == (1, ["engine 0"] if self.update.is_push else [], False, ("target", "draft"))
        return Manifest(1, self.update.options.transport, "", {})

    async def transfer_weights(self) -> TransferStats:
        self.note("transfer_weights")
        await asyncio.sleep(0.01)
        if self.fails is not None:
            raise self.fails
        return TransferStats(3, 1.0)

    async def persist_weights(self) -> None:
        self.note("persist_weights")
        await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def quiesce(self, mode: PauseMode) -> AsyncIterator[None]:
        self.note("quiesce")
        yield
        self.note("resume")

    def rank_names(self, num_ranks: int) -> list[str]:
        return [f"engine {rank}" for rank in range(num_ranks)]

    async def apply_update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        self.note("apply")
        await asyncio.sleep(0.02)
        self.note("applied")
        if self.refuses is not None:
            raise self.refuses
        return [SyncReport(manifest.version, 3, 0.5)]


def test_a_pushed_version_is_planned_after_quiescing_and_persisted_after_resuming(tmp_path: Path) -> None:
    world = World("nccl", tmp_path)
    asyncio.run(world.update.run())
    assert (world.update.state, world.update.sent) == (State.PERSIST, TransferStats(3, 1.0))
    asyncio.run(world.update.persist())
    assert world.update.state is State.DONE
    assert world.calls == [
        ("quiesce", State.PLAN),
        ("plan_weights", State.PLAN),
        ("transfer_weights", State.TRANSFER),
        ("apply", State.TRANSFER),
        ("applied", State.COMMIT),
        ("resume", State.PERSIST),
        ("persist_weights", State.PERSIST),
    ]


def test_shm_plans_into_the_store_before_quiescing(tmp_path: Path) -> None:
    world = World("shm", tmp_path)
    asyncio.run(world.update.run())
    assert world.update.state is State.DONE
    asyncio.run(world.update.persist())
    assert [what for what, _ in world.calls] == ["plan_weights", "quiesce", "apply", "applied", "resume"]


def test_nothing_is_persisted_after_a_target_refused(tmp_path: Path) -> None:
    world = World("ipc", tmp_path)
    world.refuses = SyncError("it does not fit")
    with pytest.raises(SyncError, match="it does not fit"):
        asyncio.run(world.update.run())
    assert world.update.state is State.COMMIT
    asyncio.run(world.update.persist())
    assert "persist_weights" not in [what for what, _ in world.calls]


@pytest.mark.parametrize(
    ("fails", "raised"),
    [
        (RuntimeFailure("w: contains NaN"), "w: contains NaN"),
        (SyncError("a receiver is gone"), "it does not fit"),
    ],
)
def test_senders_own_failure_precedes_the_receivers(fails: Exception, raised: str, tmp_path: Path) -> None:
    """Receivers fail because of it, and a SyncError would be tried again."""
    world = World("ipc", tmp_path)
    world.refuses, world.fails = SyncError("it does not fit"), fails
    with pytest.raises(RuntimeFailure, match=f"^{raised}") as caught:
        asyncio.run(world.update.run())
    assert isinstance(caught.value, SyncError) == isinstance(fails, SyncError)


SENT = Manifest(1, "shm", "nowhere", {"target": SectionPlan(tuple(plan_buckets([TensorSpec("w", (1,), "float32")], 1024)))})


class Target:
    """A target that never gets its buckets. `aborts`: whether `abort_update` returns."""

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

    async def checksums(self, *sections: Section) -> dict[str, str]:
        return {}

    def mark_dirty(self) -> None:
        self.trusted = False


def test_an_update_that_hangs_is_aborted_at_its_deadline() -> None:
    target = Target(aborts=True)
    with pytest.raises(SyncError, match=r"took longer than sync\.deadline_s = 0\.05"):
        asyncio.run(asyncio.wait_for(update_target(target, SENT, deadline_s=0.05), 5))
    assert target.trusted


def test_a_target_whose_abort_hangs_is_dirty() -> None:
    target = Target(aborts=False)
    with pytest.raises(TargetDirty, match=r"version 1 failed, and aborting it took longer than 0\.05 s"):
        asyncio.run(asyncio.wait_for(update_target(target, SENT, deadline_s=0.05), 5))
    assert not target.trusted


def test_a_target_whose_abort_is_cancelled_is_dirty() -> None:
    target = Target(aborts=False)

    async def cancel() -> None:
        updating = asyncio.create_task(update_target(target, SENT, deadline_s=0.05))
        await asyncio.sleep(0.07)
        updating.cancel()
        await updating

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert not target.trusted
