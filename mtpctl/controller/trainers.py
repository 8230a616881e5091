"""The trainer ranks as the controller sees them: one call to all, under a deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from mtpctl.cluster.deadlines import within
from mtpctl.plan.placement import Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.trainer.actor import TrainerRank


class TrainerGroup:
    """The trainer ranks as one: every call goes to all of them, rank 0 answers."""

    def __init__(self, recipe: Recipe, placement: Placement) -> None:
        import ray

        self.recipe = recipe
        world_size = recipe.train.parallel.world_size
        payload = recipe.model_dump_json(by_alias=True)
        environment = {"env_vars": {"OMP_NUM_THREADS": str(recipe.train.threads)} if recipe.train.threads else {}}
        self.ranks: list[Any] = []
        for seat in placement.of("trainer"):
            actor = ray.remote(TrainerRank).options(num_cpus=seat.cpus, num_gpus=seat.gpus, runtime_env=environment)
            self.ranks.append(actor.remote(payload, seat.rank, world_size))

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """`method` on every rank; the answer of rank 0. Raises RuntimeFailure where a rank dies or is late."""
        seconds = deadline_s or self.recipe.cluster.step_deadline_s
        refs = [getattr(rank, method).remote(*args) for rank in self.ranks]
        waits = [within(ref, seconds, f"trainer rank {i}, {method}") for i, ref in enumerate(refs)]
        return (await asyncio.gather(*waits))[0]

    async def build(self, folder: Path) -> dict[str, Any]:
        """Start every rank on the model in `folder`."""
        deadline = self.recipe.cluster.actor_deadline_s
        master = await within(self.ranks[0].address.remote(), deadline, "trainer rank 0, start")
        return await self.call("build", str(folder), master, deadline_s=deadline)
