"""The trainer ranks as one: a call goes to all of them and has a deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.logs import name_for_one
from mtpctl.plan.placement import Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.trainer.actor import TrainerRank

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class TrainerGroup:
    """The trainer ranks, as Ray actors. Every call goes to all of them, and returns the answer of rank 0."""

    def __init__(self, recipe: Recipe, placement: Placement) -> None:
        import ray
        from ray.actor import ActorHandle

        self.recipe = recipe
        world_size = recipe.train.parallel.world_size
        payload = recipe.model_dump_json(by_alias=True)
        threads = {"OMP_NUM_THREADS": str(recipe.train.threads)} if recipe.train.threads else {}
        self.ranks: list[ActorHandle] = []
        for seat in placement.of("trainer"):
            environment = {"env_vars": threads | name_for_one(f"trainer rank {seat.rank}")}
            actor = ray.remote(TrainerRank).options(num_cpus=seat.cpus, num_gpus=seat.gpus, runtime_env=environment)
            rank = actor.remote(payload, seat.rank, world_size)
            assert isinstance(rank, ActorHandle)
            self.ranks.append(rank)

    async def call(self, method: str, *args: object, deadline_s: float | None = None) -> Any:
        """Call `method` of `TrainerRank` on every rank. Returns the answer of rank 0.

        Raises RuntimeFailure where a rank dies, or does not answer within `deadline_s` (default: `cluster.step_deadline_s`).
        """
        seconds = deadline_s or self.recipe.cluster.step_deadline_s
        refs = [getattr(rank, method).remote(*args) for rank in self.ranks]
        waits = [within(ref, seconds, f"trainer rank {i}, {method}") for i, ref in enumerate(refs)]
        return (await asyncio.gather(*waits))[0]

    async def build(self, folder: Path) -> dict[str, int]:
        """Have every rank build the model in `folder`. Returns how many `parameters` it has, and how many of them are `trained`."""
        deadline = self.recipe.cluster.actor_deadline_s
        master: str = await within(self.ranks[0].address.remote(), deadline, "trainer rank 0, start")
        counts: dict[str, int] = await self.call("build", str(folder), master, deadline_s=deadline)
        return counts
