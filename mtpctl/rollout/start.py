"""From a recipe's rollout section to a running pool of engines on the cluster."""

from __future__ import annotations

from itertools import count
from math import ceil
from typing import Literal

from mtpctl.cluster import within
from mtpctl.plan import Placement
from mtpctl.recipe import Recipe, UserError
from mtpctl.recipe.schema import VllmConfig
from mtpctl.rollout.actor import Replica, start_replica
from mtpctl.rollout.pool import Latest, ReplicaPool
from mtpctl.rollout.vllm_settings import engine_settings

WAITING_SHARE = 1 / 16
"""Requests that wait in an engine, over those that it works on."""


async def start_pool(
    recipe: Recipe, *, model: str, context: int, placement: Placement, latest: Latest, seed: int | None = None
) -> ReplicaPool:
    """Start the recipe's engines on the model in the folder `model`, each with a random stream of its own.

    `seed` stands in for the recipe's. A replica that restarts takes in `latest`, and does not repeat the draws of the one
    before it. Raises RuntimeFailure where an engine does not start in time, UserError for an engine that is not driven yet.
    """
    rollout = recipe.rollout
    if not isinstance(rollout, VllmConfig):
        raise UserError(f"rollout.engine: {rollout.engine} cannot be started here; set rollout.engine: vllm")
    device: Literal["cpu", "cuda"] = placement.device
    first = recipe.seed if seed is None else seed
    seat = placement.of("rollout")[0]
    options = {"num_cpus": seat.cpus * rollout.tp, "num_gpus": seat.gpus * rollout.tp}
    starts = count()

    async def start(index: int) -> Replica:
        settings = engine_settings(
            rollout.model_copy(update={"context": context}),
            model=model,
            precision=recipe.train.precision,
            device=device,
            seed=(first + 1_000_003 * next(starts)) % (1 << 31),
        )
        return await start_replica(settings, name=f"rollout replica {index}", options=options)

    # A few requests wait inside each engine, so that no place of it stands empty while an answer travels back.
    room = rollout.max_in_flight + ceil(WAITING_SHARE * rollout.max_in_flight)
    starting = ReplicaPool.start(start, rollout.replicas, latest=latest, max_in_flight=room, max_restarts=rollout.max_restarts)
    return await within(starting, recipe.cluster.actor_deadline_s, "rollout, start")
