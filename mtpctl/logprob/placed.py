"""Starts a recipe's log-prob server on the running Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mtpctl.cluster.bundles import Bundles, Options
from mtpctl.cluster.deadlines import within
from mtpctl.cluster.replicas import Log, no_log
from mtpctl.logprob.dispatch import ServerLimits
from mtpctl.logprob.rank import ReplicaConfig
from mtpctl.logprob.replica import Replica, start_replica
from mtpctl.logprob.server import LogprobServer
from mtpctl.recipe.cluster import ClusterConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Published

ATTEMPTS = 2
"""How often a run sends a sample to the server: once more where the answer is late, as a replica may have died or the queue been long."""
MOST_S = 600.0


def answer_deadline(cluster: ClusterConfig) -> float:
    """Seconds for one answer in a run: all attempts of a sample end before the run gives up waiting for its batch.

    A replica that works longer on one batch hangs: its answers would be too late, and no update of its weights can begin before.
    """
    return min(MOST_S, cluster.step_deadline_s / (ATTEMPTS + 1))


NAMES = {"logprob": "log-prob", "teacher": "teacher"}
"""What replicas are called, by role."""


async def start_server(
    recipe: Recipe,
    model: Path,
    *,
    device: Literal["cpu", "cuda"],
    cpus: float,
    gpus: float,
    bundles: Bundles | None = None,
    published: Published | None = None,
    checkpoint: Path | None = None,
    version: int = 0,
    role: Literal["logprob", "teacher"] = "logprob",
    tell: Log = no_log,
) -> LogprobServer:
    """Start the replicas of `recipe.logprob` with the weights of the folder `model`, or of a checkpoint of it; `version` is theirs.

    `cpus` and `gpus` are those of one rank. `bundles`: where the ranks sit, by the names of `role`; without them Ray chooses.
    `published`: where restarted replicas find newer weights. `tell`: as in `LogprobServer.start`; its lines begin with the replicas' role.
    """
    options = recipe.logprob
    config = ReplicaConfig(
        model=str(model),
        parallel=options.parallel,
        precision=recipe.train.precision,
        mtp=recipe.mtp,
        kernels=recipe.kernels,
        tokens_per_batch=options.tokens_per_batch,
        keep_previous=options.keep_previous,
        # Ranks on a CPU share it with generation and training, so each has one thread.
        threads=1 if device == "cpu" else 0,
        checkpoint=None if checkpoint is None else str(checkpoint),
        # Without a checkpoint the weights arrive merged, or an adapter is merged when it arrives.
        lora=None if checkpoint is None else recipe.train.lora,
        version=version,
    )

    async def start(index: int) -> Replica:
        # A restart needs the deadline too: after the loss of a host the cluster may have no room for it.
        name = f"{NAMES[role]} replica {index}"
        return await within(begin(index, name), recipe.cluster.actor_deadline_s, f"{name}, start")

    async def begin(index: int, name: str) -> Replica:
        anywhere: Options = {"num_cpus": cpus, "num_gpus": gpus}
        ranks = [f"{role}-{index}" + (f".{rank}" if rank else "") for rank in range(options.parallel.world_size)]
        taken = None if bundles is None else await bundles.take(*ranks)
        replica = await start_replica(
            config, name=name, options=[bundle.options() for bundle in taken] if taken else [anywhere] * len(ranks)
        )
        if bundles is not None:
            for rank, found in zip(ranks, await replica.where(), strict=True):
                bundles.check(rank, found)
        return replica

    limits = ServerLimits(
        options.tokens_per_batch,
        options.queue_tokens,
        batch_deadline_s=answer_deadline(recipe.cluster),
        max_restarts=options.max_restarts,
        sync_deadline_s=recipe.sync.deadline_s,
    )
    return await LogprobServer.start(start, options.replicas, limits, published=published, tell=lambda line: tell(f"{NAMES[role]} {line}"))
