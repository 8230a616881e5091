"""From a recipe's rollout section to a running pool of engines on the cluster."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import count
from math import ceil
from typing import Protocol

from mtpctl.cluster.deadlines import within
from mtpctl.errors import EnvironmentMissing
from mtpctl.plan.placement import Placement
from mtpctl.recipe.rollout import SglangConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.actor import EngineSettings, Replica, start_replica
from mtpctl.rollout.environments import Text, Turns, environment_of
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.sglang.settings import sglang_engine_settings
from mtpctl.rollout.vllm.settings import engine_settings
from mtpctl.sync.protocol import Published

WAITING_SHARE = 1 / 16
"""Requests that wait in an engine, over those that it works on."""


class NamedText(Text, Protocol):
    """A tokenizer, and the folder or hub id that it is loaded from."""

    name: str


def check_engine_installed(recipe: Recipe) -> None:
    """Raise EnvironmentMissing where the engine's package is not on this machine, which is to run it, or has no environment of its own."""
    rollout = recipe.rollout
    if isinstance(rollout, SglangConfig):
        if rollout.python is None:
            raise EnvironmentMissing(
                "rollout.python: SGLang lives in an environment of its own; scripts/sglang_environment.sh makes one; name its python"
            )
    elif recipe.cluster.address is None and find_spec(rollout.engine) is None:
        raise EnvironmentMissing(f"rollout.engine: {rollout.engine} is not installed; install mtpctl with the extra [cpu] or [gpu]")


async def start_pool(
    recipe: Recipe,
    *,
    model: str,
    context: int,
    placement: Placement,
    published: Published | None = None,
    seed: int | None = None,
    tokenizer: NamedText | None = None,
) -> ReplicaPool:
    """Start the recipe's engines on the model in the folder `model`, each with a random stream of its own.

    `tokenizer` is what stop strings and an environment need; `seed` stands in for the recipe's. A replica that restarts takes in
    what the others serve from `published`, and does not repeat the draws of the one before it.

    Raises RuntimeFailure where an engine does not start in time, UserError for what an engine cannot do.
    """
    rollout = recipe.rollout
    first = recipe.seed if seed is None else seed
    seat = placement.of("rollout")[0]
    options = {"num_cpus": seat.cpus * rollout.tp, "num_gpus": seat.gpus * rollout.tp}
    starts = count()
    environment = environment_of(rollout)
    stop = [*rollout.stop, *(environment.stop if environment else ())]
    assert not stop or tokenizer is not None, "stop strings and environments read and write text"
    turns = Turns(environment, tokenizer, rollout.max_turns) if environment and tokenizer else None
    named = tokenizer.name if stop and tokenizer else None

    def settings() -> EngineSettings:
        stream = (first + 1_000_003 * next(starts)) % (1 << 31)
        sized = rollout.model_copy(update={"context": context, "stop": stop})
        precision = recipe.train.precision
        if isinstance(sized, SglangConfig):
            return sglang_engine_settings(sized, model=model, precision=precision, seed=stream, tokenizer=named)
        return engine_settings(
            sized,
            model=model,
            precision=precision,
            device=placement.device,
            seed=stream,
            tokenizer=named,
            adapter_rank=recipe.train.lora.rank if recipe.train.lora and "adapter" in recipe.sync.sections else None,
            release_kv=recipe.sync.release_kv,
        )

    async def start(index: int) -> Replica:
        # One that comes back as well: a host that is gone may leave no room for it.
        name = f"rollout replica {index}"
        return await within(start_replica(settings(), name=name, options=options), recipe.cluster.actor_deadline_s, f"{name}, start")

    # A few requests wait inside each engine, so that no place of it stands empty while an answer travels back.
    room = rollout.max_in_flight + ceil(WAITING_SHARE * rollout.max_in_flight)
    starting = ReplicaPool.start(
        start,
        rollout.replicas,
        published=published,
        max_in_flight=room,
        max_restarts=rollout.max_restarts,
        sync_deadline_s=recipe.sync.deadline_s,
        turns=turns,
    )
    return await within(starting, recipe.cluster.actor_deadline_s, "rollout, start")
