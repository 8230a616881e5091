"""The states of a weight update, and who is asked for what in each. Trainer and targets are made up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Manifest, PauseMode, SyncError
from mtpctl.sync.transports.base import Sent
from mtpctl.sync.update import Parties, State, SyncReport, WeightUpdate


class World:
    """Writes down what is asked of trainer and engines, and the state that the update is in then."""

    def __init__(self, transport: str, root: Path) -> None:
        self.asked: list[tuple[str, State]] = []
        self.refuses: Exception | None = None
        recipe = Recipe.model_validate({"sync": {"transport": transport}})
        self.update = WeightUpdate(Parties(recipe, self, self, None, root), 1, ("target", "draft"), verify=False)

    def note(self, what: str) -> None:
        self.asked.append((what, self.update.state))

    async def call(self, method: str, *args: object) -> object:
        self.note(method)
        if method == "plan_weights":
            assert (args[0], args[2:]) == (1, (["engine 0"] if self.update.pushed else [], False, ("target", "draft")))
            return Manifest(1, self.update.options.transport, "", {})
        await asyncio.sleep(0.01)
        return Sent(3, 1.0) if method == "transfer_weights" else None

    @contextlib.asynccontextmanager
    async def quiesce(self, mode: PauseMode) -> AsyncIterator[None]:
        self.note("quiesce")
        yield
        self.note("resume")

    def members(self, ranks: int) -> list[str]:
        return [f"engine {rank}" for rank in range(ranks)]

    async def apply_update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        self.note("apply")
        await asyncio.sleep(0.02)
        self.note("applied")
        if self.refuses is not None:
            raise self.refuses
        return [SyncReport(manifest.version, 3, 0.5)]


def test_a_pushed_version_is_planned_with_those_who_quiesced_and_persisted_after_all_go_on(tmp_path: Path) -> None:
    world = World("nccl", tmp_path)
    asyncio.run(world.update.run())
    assert (world.update.state, world.update.sent) == (State.PERSIST, Sent(3, 1.0))
    asyncio.run(world.update.persist())
    assert world.update.state is State.DONE
    assert world.asked == [
        ("quiesce", State.PLAN),
        ("plan_weights", State.PLAN),
        ("transfer_weights", State.TRANSFER),
        ("apply", State.TRANSFER),
        ("applied", State.COMMIT),
        ("resume", State.PERSIST),
        ("persist_weights", State.PERSIST),
    ]


def test_a_version_of_shm_is_in_the_store_before_anyone_quiesces(tmp_path: Path) -> None:
    world = World("shm", tmp_path)
    asyncio.run(world.update.run())
    assert world.update.state is State.DONE
    asyncio.run(world.update.persist())
    assert [what for what, _ in world.asked] == ["plan_weights", "quiesce", "apply", "applied", "resume"]


def test_a_target_that_refuses_is_waited_for_and_nothing_is_persisted(tmp_path: Path) -> None:
    world = World("ipc", tmp_path)
    world.refuses = SyncError("it does not fit")
    with pytest.raises(SyncError, match="it does not fit"):
        asyncio.run(world.update.run())
    assert world.update.state is State.COMMIT
    asyncio.run(world.update.persist())
    assert "persist_weights" not in [what for what, _ in world.asked]
