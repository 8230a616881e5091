"""Starts the engines of a recipe's rollout section on the cluster, as a pool."""

from __future__ import annotations

from itertools import count
from math import ceil

from mtpctl.cluster.bundles import Bundles, Options
from mtpctl.cluster.deadlines import await_start
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
from mtpctl.rollout.sglang.settings import build_sglang_settings
from mtpctl.rollout.vllm.settings import build_engine_settings
from mtpctl.sync.protocol import PublishedVersions

MAX_HOST_LIMITED_WEIGHTS = 4 << 30
"""Maximum active parameters per token of a model whose steps are assumed to be limited by the host, not the GPU."""
WAITING_SHARE = 1 / 16
"""Maximum requests that wait in an engine, as a share of its slots."""


async def start_pool(
    recipe: Recipe,
    *,
    model: str,
    context: int,
    placement: Placement,
    bundles: Bundles | None = None,
    store: PublishedVersions | None = None,
    seed: int | None = None,
    tokenizer: str | None = None,
    turn_runner: TurnRunner | None = None,
    routes: tuple[int, ...] = (),
    log: Log = no_log,
) -> ReplicaPool:
    """Start the recipe's minimum number of engines with the model in the folder `model`, each with its own random seed.

    Args:
        bundles: the reserved bundles; if None, Ray chooses.
        store: the published versions, of which a restarted replica loads the current one.
        seed: replaces the recipe's seed. A restarted replica gets a new one.
        tokenizer: folder or hub id; required for stop strings, environments and agents.
        turn_runner: plays the recipe's environment.
        routes: MoE layers whose routing decisions are recorded in samples.
        log: see `ReplicaPool.start`; its lines begin with `rollout replica`.

    Raises:
        RuntimeFailure: if an engine does not start in time.
        UserError: for settings that the engine does not support.
    """
    rollout = recipe.rollout
    base_seed = recipe.seed if seed is None else seed
    rank_by_index = {rank.index: rank for rank in placement.of("rollout")}
    start_count = count()
    recipe_with_context = apply_change(recipe, {"rollout.context": context})

    def options_of(index: int) -> Options:
        rank = rank_by_index.get(index, next(iter(rank_by_index.values())))
        return {"num_cpus": rank.cpus * rollout.tp, "num_gpus": rank.gpus * rollout.tp}

    needs_tokenizer = bool(rollout.stop or turn_runner is not None or rollout.uses_agents)
    if needs_tokenizer:
        assert tokenizer is not None, "stop strings, agents and environments need a tokenizer"

    def build_settings(index: int) -> EngineSettings:
        # `start_count` counts starts, not replicas, so that a restarted replica gets a new seed.
        engine_seed = (base_seed + 1_000_003 * next(start_count)) % (1 << 31)
        kv_cache_bytes, outside_cache = rollout.kv_cache_bytes, None
        if kv_cache_bytes is None and (placement.device == "cpu" or shares_gpu(recipe, index)):
            engine_bytes = engine_memory(recipe_with_context, shape_of(hf_config(ModelConfig(path=model)) or {}), index)
            if placement.device == "cpu":
                kv_cache_bytes = engine_bytes.kv_cache
            else:
                outside_cache = engine_bytes.weights + engine_bytes.reserve
        engine_config = rollout.model_copy(
            update={"context": context, "kv_cache_bytes": kv_cache_bytes, "gpu_memory": engine_memory_share(recipe, index)}
        )
        precision = recipe.train.precision
        if isinstance(engine_config, SglangConfig):
            return build_sglang_settings(
                engine_config, model=model, precision=precision, seed=engine_seed, tokenizer=tokenizer if needs_tokenizer else None
            )
        return build_engine_settings(
            engine_config,
            model=model,
            precision=precision,
            device=placement.device,
            seed=engine_seed,
            tokenizer=tokenizer if needs_tokenizer else None,
            adapter=recipe.train.lora if "adapter" in recipe.sync.sections else None,
            release_kv=recipe.sync.release_kv,
            keep_kv=recipe.sync.kv == "keep",
            routes=routes,
            outside_cache=outside_cache,
            immediate_admission=recipe.async_.deterministic,
            numerics=recipe.numerics,
            host_limited=placement.device == "cuda"
            and trunk_weights(shape_of(hf_config(ModelConfig(path=model)) or {})) <= MAX_HOST_LIMITED_WEIGHTS,
        )

    async def start(index: int) -> Replica:
        # The deadline also applies to restarts: after the loss of a host, the cluster may lack resources.
        name = f"rollout replica {index}"
        return await await_start(start_actor(index, f"rollout-{index}", name), recipe.cluster.actor_deadline_s, name)

    async def start_actor(index: int, actor_name: str, name: str) -> Replica:
        options = options_of(index) if bundles is None else (await bundles.acquire(actor_name))[0].options()
        replica = await start_replica(build_settings(index), name=name, options=options)
        try:
            if bundles is not None:
                bundles.check(actor_name, await replica.location())
        except BaseException:
            await replica.shutdown()
            raise
        return replica

    # A few requests wait inside each engine, so that a freed slot is refilled without waiting for a Ray call.
    max_in_flight = rollout.max_in_flight + ceil(WAITING_SHARE * rollout.max_in_flight)
    pool_start = ReplicaPool.start(
        start,
        rollout.replica_range.min,
        store=store,
        max_in_flight=max_in_flight,
        max_restarts=rollout.max_restarts,
        sync_deadline_s=recipe.sync.deadline_s,
        turn_runner=turn_runner,
        use_relays=isinstance(recipe.sync, StorageConfig) and recipe.sync.relay,
        log=lambda line: log(f"rollout {line}"),
    )
    return await await_start(pool_start, recipe.cluster.actor_deadline_s, "rollout")
