"""The trainer ranks as one: a call goes to all of them and has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.logs import name_for_one
from mtpctl.plan.placement import Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Sample
from mtpctl.trainer.actor import TrainerRank
from mtpctl.trainer.share import deal

if TYPE_CHECKING:
    from ray import ObjectRef
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
        """Call `method` of `TrainerRank` on every rank. Returns the answer of rank 0. A list among `args` is written once for all ranks.

        Raises RuntimeFailure where a rank dies, or does not answer within `deadline_s` (default: `cluster.step_deadline_s`).
        """
        import ray

        given = tuple(ray.put(each) if isinstance(each, list) else each for each in args)
        return await self._all(method, lambda rank: given, deadline_s or self.recipe.cluster.step_deadline_s)

    async def _all(self, method: str, args: Callable[[int], tuple[object, ...]], seconds: float) -> Any:
        refs = [getattr(actor, method).remote(*args(rank)) for rank, actor in enumerate(self.ranks)]
        waits = [within(ref, seconds, f"trainer rank {i}, {method}") for i, ref in enumerate(refs)]
        return (await asyncio.gather(*waits))[0]

    async def rl_step(self, samples: Sequence[Sample], version: int, train_mtp: bool) -> dict[str, float]:
        """One policy update on samples that are ordered by group: `TrainerRank.rl_step` on every rank, with its share of them.

        Each share is written into Ray's object store once, for all ranks that compute on it.
        """
        table, shares = await asyncio.to_thread(self._put, samples)
        parallel = self.recipe.train.parallel
        metrics: dict[str, float] = await self._all(
            "rl_step", lambda rank: (table, shares[parallel.dp_rank(rank)], version, train_mtp), self.recipe.cluster.step_deadline_s
        )
        return metrics

    def _put(self, samples: Sequence[Sample]) -> tuple[ObjectRef, list[ObjectRef]]:
        """References to the table of these samples and to the share of each data-parallel rank."""
        import ray

        train = self.recipe.train
        table, shares = deal(
            samples, minibatches=train.rl.minibatches, tokens_per_microbatch=train.tokens_per_microbatch, dp=train.parallel.dp
        )
        return ray.put(table), [ray.put(made()) for made in shares]

    async def build(self, folder: Path) -> dict[str, int]:
        """Have every rank build the model in `folder`. Returns how many `parameters` it has, and how many of them are `trained`."""
        deadline = self.recipe.cluster.actor_deadline_s
        master: str = await within(self.ranks[0].address.remote(), deadline, "trainer rank 0, start")
        counts: dict[str, int] = await self.call("build", str(folder), master, deadline_s=deadline)
        return counts
