"""A version to engines and log-prob server together: who stands when, and what is left standing when something fails.

The server is real, over replicas without a model. The engine stands from its pause until the receivers of a pushed version have met,
as a transport has it; the trainer only says what it would send.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.cluster.rendezvous import host_store
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.controller.weights import WeightSync
from mtpctl.errors import RuntimeFailure
from mtpctl.logprob.protocol import ScoreRequest
from mtpctl.logprob.server import LogprobServer
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, Section, SyncError
from mtpctl.sync.transports.base import Address, TransferStats
from mtpctl.sync.update import SyncReport
from tests.fakes.logprob import Started, Store, manifest
from tests.fakes.logprob_ranks import serve
from tests.fakes.replica import FakeReplica

PASS_S = 0.6
LONG = ScoreRequest([1] * 100)
"""With replicas that take `PASS_S / 100` for a token: a pass of `PASS_S`."""


class Trainer:
    """Records what it would send, and its receivers."""

    def __init__(self) -> None:
        self.members: list[list[str]] = []
        self.stores: list[str] = []
        self.fails = ""

    def _called(self, method: str) -> None:
        if method == self.fails:
            raise RuntimeFailure(f"the trainer cannot {method}")

    async def plan_weights(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest:
        self._called("plan_weights")
        self.stores.append(store)
        if not members:
            return manifest(version)
        self.members.append(members)
        return replace(manifest(version), transport="ipc", address="tcp://127.0.0.1:1/group?receivers=1&deadline_s=1")

    async def transfer_weights(self) -> TransferStats:
        self._called("transfer_weights")
        return TransferStats()

    async def persist_weights(self) -> None:
        self._called("persist_weights")


class Engine:
    """The one engine of a pool. `refusals`: updates that it refuses before it takes one."""

    def __init__(self, started: Started, trainer: Trainer, refusals: int = 0) -> None:
        self.started, self.trainer, self.refusals = started, trainer, refusals
        self.paused_at: list[float] = []

    def rank_names(self, num_ranks: int) -> list[str]:
        return [f"rollout 0.0.{rank}" for rank in range(num_ranks)]

    def quiesce(self, mode: str) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def apply_update(self, sent: Manifest, **options: Any) -> list[SyncReport]:
        self.paused_at.append(time.monotonic())
        if self.refusals:
            self.refusals -= 1
            raise SyncError("the engine cannot")
        while sent.transport == "ipc" and self._met(sent.version) < len(self.trainer.members[-1]):
            await asyncio.sleep(0.002)
        return [SyncReport(sent.version, 0, 0.0, stall_seconds=time.monotonic() - self.paused_at[-1])]

    def _met(self, version: int) -> int:
        """Receivers that are ready for this version: itself, and replicas."""
        return 1 + sum(ranks.rank.incoming == version for ranks in self.started.ranks)


class World:
    """A sync over `transport`, with all who take part in it."""

    def __init__(self, transport: str, root: Path, *, deadline_s: float = 10.0, refusals: int = 0) -> None:
        self.started, self.store, self.trainer = Started(seconds=PASS_S / 100), Store(), Trainer()
        self.engine = Engine(self.started, self.trainer, refusals)
        self.recipe = Recipe.model_validate({"sync": {"transport": transport, "deadline_s": deadline_s, "verify": "never"}})
        self.root = root
        self.server: LogprobServer

    async def begin(self, replicas: int = 1) -> WeightSync:
        self.server = await serve(self.started, replicas, self.store)
        return WeightSync(self.recipe, cast(TrainerGroup, self.trainer), cast(ReplicaPool, self.engine), self.server, self.root)

    async def serves(self, version: int) -> None:
        """The server answers, under this version."""
        assert (await asyncio.wait_for(self.server.score(ScoreRequest([1, 2])), 5)).version == version


def settled(test: Callable[..., Awaitable[None]]) -> Callable[[str, Path], None]:
    """A coroutine as a test, over both kinds of transport."""

    def inner(transport: str, tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(transport, tmp_path), 20))

    return pytest.mark.parametrize("transport", ["ipc", "shm"])(inner)


@settled
async def test_generation_is_not_paused_during_a_server_pass(transport: str, root: Path) -> None:
    world = World(transport, root)
    sync = await world.begin()
    await sync(1)  # imports what the first one imports
    ended: list[float] = []
    scoring = asyncio.create_task(world.server.score(LONG))
    scoring.add_done_callback(lambda _: ended.append(time.monotonic()))
    await asyncio.sleep(0.05)
    metrics = await sync(2)
    assert (await scoring).version == 1 and ended[0] <= world.engine.paused_at[-1]
    assert metrics["sync/publish_seconds"] < metrics["sync/seconds"] / 2, "the sync waits for the pass, which is not publishing"
    await world.serves(2)
    await world.server.close()


@settled
async def test_replica_with_an_endless_pass_is_replaced_without_a_wait(transport: str, root: Path) -> None:
    """Its request is completed by its replacement, under the weights that the other replicas have by then."""
    world = World(transport, root, deadline_s=PASS_S / 3)
    sync = await world.begin(2)
    scoring = asyncio.create_task(world.server.score(replace(LONG, token_ids=[1] * 300)))
    await asyncio.sleep(0.05)
    world.store.there = [1]
    await sync(1)
    assert not scoring.done()
    if transport == "ipc":
        assert world.trainer.members == [["rollout 0.0.0", "log-prob 1.0.0"]]
    await world.serves(1)
    assert (await scoring).version == 1 and world.server.replicas.num_restarts == 1
    await world.server.close()


@settled
async def test_replica_that_dies_in_its_last_pass_is_excluded(transport: str, root: Path) -> None:
    world = World(transport, root)
    sync = await world.begin(2)
    scoring = asyncio.create_task(world.server.score(LONG))
    await asyncio.sleep(0.05)
    world.store.there = [1]
    syncing = asyncio.create_task(sync(1))
    await asyncio.sleep(0.05)
    world.started.ranks[0].kill()
    await syncing  # the engine would wait for ever for a dead receiver
    if transport == "ipc":
        assert world.trainer.members == [["rollout 0.0.0", "log-prob 1.0.0"]]
    assert (await scoring).version == 1
    await world.server.close()


@settled
async def test_server_serves_after_a_failed_sync(transport: str, root: Path) -> None:
    """A pushed version is tried twice, each time with a paused server; a published one once."""
    world = World(transport, root, refusals=9)
    sync = await world.begin()
    with pytest.raises(SyncError, match="the engine cannot"):
        await sync(1)
    assert len(world.engine.paused_at) == (2 if transport == "ipc" else 1)
    await world.serves(1)
    world.engine.refusals, world.trainer.fails = 0, "plan_weights"
    with pytest.raises(RuntimeFailure, match="the trainer cannot"):
        await sync(2)
    await world.serves(1)
    await world.server.close()


@settled
async def test_engine_that_rejects_once_gets_the_version_at_the_retry(transport: str, root: Path) -> None:
    world = World(transport, root, refusals=1)
    sync = await world.begin()
    if transport == "shm":
        with pytest.raises(SyncError, match="the engine cannot"):
            await sync(1)
    else:
        await sync(1)
        assert world.trainer.members == [["rollout 0.0.0", "log-prob 0.0.0"], ["rollout 0.0.0"]], "the server has it already"
    await world.serves(1)
    await world.server.close()


@settled
async def test_cancelled_sync_leaves_nothing_paused(transport: str, root: Path) -> None:
    """While it waits for a pass of the server."""
    world = World(transport, root)
    sync = await world.begin()
    scoring = asyncio.create_task(world.server.score(LONG))
    await asyncio.sleep(0.05)
    syncing = asyncio.create_task(sync(1))
    await asyncio.sleep(0.05)
    syncing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await syncing
    assert (await scoring).version == 0 and world.engine.paused_at == []
    await world.serves(0)
    await world.server.close()


@settled
async def test_server_is_updated_before_quantized_engines(transport: str, root: Path) -> None:
    """The server first, and not again if the engines' update has failed. Only a pushed version can be tried again."""
    world = World(transport, root, refusals=2 if transport == "ipc" else 0)
    world.recipe = world.recipe.model_copy(
        update={
            "rollout": world.recipe.rollout.model_copy(update={"quantization": "fp8"}),
            "logprob": world.recipe.logprob.model_copy(update={"standalone": True}),
        }
    )
    sync = await world.begin()
    if transport == "ipc":
        with pytest.raises(SyncError, match="the engine cannot"):
            await sync(1)
        await world.serves(1)
    await sync(1)
    await sync(2)
    await world.serves(2)
    both = [str(root / "unquantized"), str(root)]
    assert world.trainer.stores == [*both, *([both[1]] * 2 if transport == "ipc" else []), *both]
    if transport == "ipc":
        server, engine = ["log-prob 0.0.0"], ["rollout 0.0.0"]
        assert world.trainer.members == [server, engine, engine, engine, server, engine]
    await world.server.close()


class Announcing(Trainer):
    """Takes its time over saying what it would send, to receivers who have to meet."""

    def __init__(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.meanwhile, self.meeting = meanwhile, host_store("127.0.0.1")

    async def plan_weights(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest:
        self.members.append(members)
        await self.meanwhile()
        address = Address(self.meeting.host, self.meeting.port, f"group-{len(self.members)}", len(members), 30.0)
        return Manifest(version, "nccl", str(address), {})


def over_a_pool(test: Callable[[Path, list[FakeReplica], ReplicaPool], Awaitable[None]]) -> Callable[[Path], None]:
    """Run a coroutine with a pool of two fake engines; `created` has every engine that was started."""

    async def drive(root: Path) -> None:
        created: list[FakeReplica] = []

        async def start(index: int) -> FakeReplica:
            await asyncio.sleep(0.2 * (len(created) > 1))
            created.append(FakeReplica())
            return created[-1]

        pool = await ReplicaPool.start(start, 2, max_in_flight=4)
        await asyncio.wait_for(test(root, created, pool), 15)
        await pool.close()

    def inner(tmp_path: Path) -> None:
        asyncio.run(drive(tmp_path))

    inner.__doc__ = test.__doc__
    return inner


@over_a_pool
async def test_response_may_outlast_the_sync_deadline_without_partial_rollout(
    root: Path, created: list[FakeReplica], pool: ReplicaPool
) -> None:
    """They have a separate deadline. None of them mixes two versions, and requests in the meantime are answered with the new one."""
    chosen = {"sync": {"transport": "shm", "deadline_s": 0.1, "verify": "never"}, "async": {"partial_rollout": False}}
    sync = WeightSync(Recipe.model_validate(chosen), cast(TrainerGroup, Trainer()), pool, None, root)
    long = asyncio.create_task(pool.sample(GenerationRequest(Sample("long", "g", [0]), 1000)))
    await asyncio.sleep(0.05)
    syncing = asyncio.create_task(sync(1))
    await asyncio.sleep(0.05)
    later = asyncio.create_task(pool.sample(GenerationRequest(Sample("later", "g", [0]), 10)))
    await asyncio.gather(syncing, long, later)
    assert [[span.version for span in (await task).version_spans] for task in (long, later)] == [[0], [1]]
    assert len((await long).response_ids) == 1000


def pushing(root: Path, trainer: Trainer, pool: ReplicaPool) -> WeightSync:
    recipe = Recipe.model_validate({"sync": {"transport": "nccl", "deadline_s": 30.0, "verify": "never"}})
    return WeightSync(recipe, cast(TrainerGroup, trainer), pool, None, root)


@over_a_pool
async def test_engine_restarted_during_a_plan_waits_for_the_next_version(root: Path, created: list[FakeReplica], pool: ReplicaPool) -> None:
    """It was not named, so that those who were would not be complete with it, and the first try would be for nothing."""

    async def until_it_is_back() -> None:
        while len(created) < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)

    trainer = Announcing(until_it_is_back)
    created[1].die()
    await pool.control_speculation()  # notices it
    await pushing(root, trainer, pool)(1)
    assert trainer.members == [["rollout 0.0.0"]]
    assert [replica.version for replica in created] == [1, 0, 0]


@over_a_pool
async def test_engine_lost_during_a_plan_makes_the_others_retry_at_once(root: Path, created: list[FakeReplica], pool: ReplicaPool) -> None:
    async def dying() -> None:
        created[1].die()
        await pool.control_speculation()  # notices it

    trainer = Announcing(dying)
    began = time.monotonic()
    await pushing(root, trainer, pool)(1)
    assert time.monotonic() - began < 10, "and not after the deadline of a transfer that waits for it"
    assert trainer.members == [["rollout 0.0.0", "rollout 1.0.0"], ["rollout 0.0.0"]]
    assert created[0].version == 1
