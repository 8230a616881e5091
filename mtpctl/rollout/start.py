"""Starts the engines of a recipe's rollout section on the cluster, as a pool."""

from __future__ import annotations

from itertools import count
from math import ceil

from mtpctl.cluster.bundles import Bundles, Options
from mtpctl.cluster.deadlines import within
from mtpctl.cluster.replicas import Log, no_log
from mtpctl.families.reading import shape_of
from mtpctl.plan.fitting import apply_change
from mtpctl.plan.flops import trunk_weights
from mtpctl.plan.memory import engine_memory
from mtpctl.plan.placement import Placement, engine_memory_share, shares_gpu
from mtpctl.recipe.model import ModelConfig, hf_config
from mtpctl.recipe.rollout import SglangConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.sync import StorageConfig
from mtpctl.rollout.actor import EngineSettings, Replica, start_replica
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import TurnRunner
from mtpctl.rollout.sglang.settings import sglang_engine_settings
from mtpctl.rollout.vllm.settings import engine_settings
from mtpctl.sync.protocol import PublishedVersions

HOST_LIMITED = 4 << 30
"""Weights that a token uses up to which the host, not the GPU, is assumed to limit an engine's steps."""
WAITING_SHARE = 1 / 16
"""Requests that may wait in an engine, as a share of its slots."""


async def start_pool(
    recipe: Recipe,
    *,
    model: str,
    context: int,
    placement: Placement,
    bundles: Bundles | None = None,
    published: PublishedVersions | None = None,
    seed: int | None = None,
    tokenizer: str | None = None,
    turns: TurnRunner | None = None,
    routes: tuple[int, ...] = (),
    log: Log = no_log,
) -> ReplicaPool:
    """Start the recipe's minimum number of engines with the model in the folder `model`, each with its own random seed.

    Args:
        bundles: the reserved bundles; if None, Ray chooses.
        published: the version that a restarted replica loads.
        seed: replaces the recipe's seed. A restarted replica gets a new one.
        tokenizer: folder or hub id; required for stop strings, environments and agents.
        turns: plays the recipe's environment.
        routes: MoE layers whose routing decisions are recorded in samples.
        log: see `ReplicaPool.start`; its lines begin with `rollout replica`.

    Raises:
        RuntimeFailure: if an engine does not start in time.
        UserError: for settings that the engine does not support.
    """
    rollout = recipe.rollout
    first = recipe.seed if seed is None else seed
    ranks = {rank.index: rank for rank in placement.of("rollout")}
    starts = count()
    sizes = apply_change(recipe, {"rollout.context": context})

    def options_of(index: int) -> Options:
        rank = ranks.get(index, next(iter(ranks.values())))
        return {"num_cpus": rank.cpus * rollout.tp, "num_gpus": rank.gpus * rollout.tp}

    reads_text = bool(rollout.stop or turns is not None or rollout.uses_agents)
    if reads_text:
        assert tokenizer is not None, "stop strings, which agents send too, and environments read and write text"

    def settings(index: int) -> EngineSettings:
        stream = (first + 1_000_003 * next(starts)) % (1 << 31)
        cache, outside = rollout.kv_cache_bytes, None
        if cache is None and (placement.device == "cpu" or shares_gpu(recipe, index)):
            memory = engine_memory(sizes, shape_of(hf_config(ModelConfig(path=model)) or {}), index)
            if placement.device == "cpu":
                cache = memory.kv_cache
            else:
                outside = memory.weights + memory.reserve
        sized = rollout.model_copy(update={"context": context, "kv_cache_bytes": cache, "gpu_memory": engine_memory_share(recipe, index)})
        precision = recipe.train.precision
        if isinstance(sized, SglangConfig):
            return sglang_engine_settings(sized, model=model, precision=precision, seed=stream, tokenizer=tokenizer if reads_text else None)
        return engine_settings(
            sized,
            model=model,
            precision=precision,
            device=placement.device,
            seed=stream,
            tokenizer=tokenizer if reads_text else None,
            adapter=recipe.train.lora if "adapter" in recipe.sync.sections else None,
            release_kv=recipe.sync.release_kv,
            keep_kv=recipe.sync.kv == "keep",
            routes=routes,
            outside_cache=outside,
            admit_at_once=recipe.async_.deterministic,
            numerics=recipe.numerics,
            host_limited=placement.device == "cuda" and trunk_weights(shape_of(hf_config(ModelConfig(path=model)) or {})) <= HOST_LIMITED,
        )

    async def start(index: int) -> Replica:
        # A restart needs the deadline too: after the loss of a host the cluster may have no room for it.
        name = f"rollout replica {index}"
        return await within(begin(index, f"rollout-{index}", name), recipe.cluster.actor_deadline_s, f"{name}, start")

    async def begin(index: int, actor: str, name: str) -> Replica:
        options = options_of(index) if bundles is None else (await bundles.take(actor))[0].options()
        replica = await start_replica(settings(index), name=name, options=options)
        try:
            if bundles is not None:
                bundles.check(actor, await replica.location())
        except BaseException:
            await replica.shutdown()
            raise
        return replica

    # A few requests wait inside each engine, so that a freed slot is refilled without waiting for a Ray call.
    room = rollout.max_in_flight + ceil(WAITING_SHARE * rollout.max_in_flight)
    starting = ReplicaPool.start(
        start,
        rollout.replica_range.min,
        published=published,
        max_in_flight=room,
        max_restarts=rollout.max_restarts,
        sync_deadline_s=recipe.sync.deadline_s,
        turns=turns,
        relays=isinstance(recipe.sync, StorageConfig) and recipe.sync.relay,
        log=lambda line: log(f"rollout {line}"),
    )
    return await within(starting, recipe.cluster.actor_deadline_s, "rollout, start")
