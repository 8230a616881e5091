"""The group of trainer ranks: errors that mean a lost rank, and the number of ranks after hosts are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from mtpctl.cluster.bundles import ActorBundle, ActorLocation, Bundles, BundleSpec, Claim
from mtpctl.cluster.hosts import Host
from mtpctl.controller import trainers
from mtpctl.controller.trainers import TrainerGroup, TrainerLost
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.plan.placement import Placement
from mtpctl.recipe.schema import Recipe

Answer = Callable[[], Awaitable[object]]


class Rank:
    """A handle whose calls behave as configured. `here` answers unless the rank is lost."""

    def __init__(self, persist_weights: Answer, location: Answer) -> None:
        self.persist_weights, self.location = SimpleNamespace(remote=persist_weights), SimpleNamespace(remote=location)


async def fine() -> ActorLocation:
    return ActorLocation("a", ())


async def dead() -> object:
    raise ActorDiedError


async def silent() -> object:
    return await asyncio.sleep(60)


def raises(error: Exception) -> Answer:
    async def step() -> object:
        raise RayTaskError("step", "traceback", error).as_instanceof_cause()  # as awaiting an actor's call does

    return step


def group(*ranks: Rank) -> TrainerGroup:
    created = TrainerGroup.__new__(TrainerGroup)
    created.recipe = Recipe.model_validate({"model": {"path": "anywhere"}, "cluster": {"step_deadline_s": 0.2}})
    created.actors = cast(Any, ranks)
    return created


@pytest.mark.parametrize(
    ("ranks", "kind", "message"),
    [
        ([Rank(fine, fine), Rank(dead, dead)], TrainerLost, "trainer rank 1, persist_weights: ActorDiedError"),
        ([Rank(fine, fine), Rank(silent, silent)], TrainerLost, r"trainer rank 1, persist_weights: no answer within 0\.2 s"),
        ([Rank(raises(ConnectionError("by peer")), fine), Rank(silent, dead)], TrainerLost, r"trainer rank 1: ActorDied.*by peer"),
        ([Rank(raises(ConnectionError("by peer")), fine), Rank(silent, silent)], TrainerLost, r"trainer rank 1: no answer.*by peer"),
        (
            [Rank(raises(ValueError("a fault")), fine), Rank(fine, fine)],
            RuntimeFailure,
            r"trainer rank 0, persist_weights: ValueError: a fault",
        ),
        (
            [Rank(raises(TimeoutError("the file is locked")), fine), Rank(fine, fine)],
            RuntimeFailure,
            r"trainer rank 0, persist_weights: TimeoutError: the file is locked",
        ),
        ([Rank(raises(TimeoutError("the file is locked")), fine), Rank(silent, dead)], TrainerLost, "ActorDied.*the file is locked"),
        ([Rank(raises(UserError("train.x: no")), fine), Rank(silent, silent)], UserError, r"train\.x: no"),
        ([Rank(raises(RuntimeFailure("the disk is full")), fine), Rank(silent, silent)], RuntimeFailure, "the disk is full"),
        ([Rank(raises(RuntimeFailure("rl-4 was not written")), fine), Rank(silent, dead)], TrainerLost, "ActorDied.*was not written"),
        ([], TrainerLost, "no rank runs"),
    ],
)
def test_rank_is_lost_if_dead_or_silent_and_not_if_it_raises(
    ranks: list[Rank], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "LIVENESS_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeFailure if kind is not UserError else UserError, match=message) as result:
        asyncio.run(group(*ranks).persist_weights())
    assert type(result.value) is kind


class Cluster:
    """Hosts by their names, and the CPUs that are free on each. Ranks of two tensor-parallel ones sit on `b` and `c`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: dict[str, float]) -> None:
        self.free = free
        self.bundles = Bundles({f"trainer-{i}": ActorBundle(Claim(f"trainer-{i}", 1), "bbcc"[i], None) for i in range(4)})
        monkeypatch.setattr("mtpctl.cluster.bundles.list_live_nodes", lambda: set(self.free))
        monkeypatch.setattr("mtpctl.cluster.bundles.list_ray_hosts", self._hosts)
        monkeypatch.setattr(Bundles, "reserve", lambda bundles, specs, *, planned: self._reserve(bundles, specs))
        monkeypatch.setattr(trainers, "CAPACITY_WAIT_S", 0.1)
        monkeypatch.setattr(trainers, "POLL_S", 0.02)

    def _hosts(self) -> list[Any]:
        return [SimpleNamespace(node_id=name, free=Host(cpus), whole=Host(cpus), name=name) for name, cpus in self.free.items()]

    async def _reserve(self, bundles: Bundles, specs: list[BundleSpec]) -> None:
        for spec in specs:
            for claim in spec.claims:
                self.free[spec.node_id] -= claim.cpus
                bundles.by_actor[claim.actor] = ActorBundle(claim, spec.node_id, None)

    def restart(self, monkeypatch: pytest.MonkeyPatch, *, least: int | None = None, then: Callable[[], object] = lambda: None) -> Any:
        """The hosts of the started ranks, and the reports."""
        parallel = {"tp": 2, "dp": 2}
        recipe = Recipe.model_validate({"model": {"path": "x"}, "train": {"parallel": parallel, "min_dp": least}})
        started: list[list[str]] = []
        monkeypatch.setattr(TrainerGroup, "_start", lambda self, options: started.append([option["on"] for option in options]))
        monkeypatch.setattr(ActorBundle, "options", lambda bundle: {"on": bundle.node_id})
        monkeypatch.setattr(TrainerGroup, "kill", lambda self: None)
        placement = cast(Placement, SimpleNamespace(of=lambda _: [SimpleNamespace(cpus=1.0, gpus=0.0)]))
        created, message = TrainerGroup(recipe, placement, self.bundles), list[str]()

        async def main() -> None:
            stopping = asyncio.Event()

            async def later() -> None:
                await asyncio.sleep(0.3)
                then()
                if then() == "stop":
                    stopping.set()

            waiting = asyncio.create_task(later())
            await asyncio.wait_for(created.restart(message.append, stopping), 10)
            waiting.cancel()

        asyncio.run(main())
        return started[-1], message, created.recipe.train.parallel.dp


def test_ranks_restart_on_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cluster(monkeypatch, {"a": 8, "b": 0, "c": 0}).restart(monkeypatch) == (["b", "b", "c", "c"], [], 2)


def test_ranks_of_a_lost_host_move_together(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Cluster(monkeypatch, {"a": 1, "c": 0, "d": 3})
    assert hosts.restart(monkeypatch) == (["c", "c", "d", "d"], [], 2)
    assert hosts.free == {"a": 1, "c": 0, "d": 1}


def test_fewer_ranks_restart_if_room_is_missing_down_to_min_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cluster(monkeypatch, {"a": 1, "c": 0}).restart(monkeypatch, least=1) == (["c", "c"], [], 1)


def test_restart_waits_for_a_host_without_min_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Cluster(monkeypatch, {"a": 1, "c": 0})
    started, message, dp = hosts.restart(monkeypatch, then=lambda: hosts.free.setdefault("e", 2))
    assert (started, dp) == (["c", "c", "e", "e"], 2)
    assert message == ["no host has capacity for the trainer's ranks; waiting for a host that joins or becomes free"]


def test_stop_ends_the_wait_for_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainerLost, match="a stop was requested"):
        Cluster(monkeypatch, {"a": 1, "c": 0}).restart(monkeypatch, then=lambda: "stop")


def test_rank_0_that_dies_before_it_names_its_address_is_a_lost_trainer() -> None:
    group = TrainerGroup.__new__(TrainerGroup)
    group.recipe, group.bundles = Recipe(), None
    group.actors = [SimpleNamespace(address=SimpleNamespace(remote=dead))]  # type: ignore[list-item]
    with pytest.raises(TrainerLost, match="trainer rank 0, start: "):
        asyncio.run(group.build(Path("model")))
