"""The job of `mtpctl sync-weights`: syncs a recipe's model or a checkpoint to running engines, or to engines that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.cluster.deadlines import await_start
from mtpctl.cluster.local import cluster
from mtpctl.controller.prepare import open_model, open_tokenizer, open_version_store
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.controller.weights import WeightSync
from mtpctl.errors import UserError
from mtpctl.jobs import print_progress
from mtpctl.jobs.engines import scratch_folder
from mtpctl.logprob.server import LogprobServer, start_server
from mtpctl.plan.placement import Host, Placement, place
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.sync import StorageConfig
from mtpctl.rollout.installed import check_engine
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.start import start_pool
from mtpctl.rollout.vllm.client import ServedEngine, ServedEngines
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.shm import NAME as SHM

if TYPE_CHECKING:
    from mtpctl.convert.hf_folder import HfFolder


Weights = tuple[Path, Path]
"""A run directory, and a checkpoint of it."""


@dataclass(frozen=True)
class SyncResult:
    """The measurements of one sync.

    `memory_gb_per_s`: the copy rate of this machine's memory, the bound of the transport `shm`; None for other transports.
    """

    version: int
    transport: str
    targets: int
    nbytes: int
    seconds: float
    export_seconds: float
    stall_seconds: float
    wire_seconds: float
    gb_per_s: float
    memory_gb_per_s: float | None
    verified: int

    @property
    def share(self) -> float | None:
        """Share of the memory's copy rate that the sync reached; None if that rate was not measured."""
        return None if not self.memory_gb_per_s else self.gb_per_s / self.memory_gb_per_s


def sync_manually(recipe: Recipe, weights: Weights | None, urls: list[str], *, verify: bool, repeat: int) -> list[SyncResult]:
    """Start the trainer and, without `urls`, the recipe's engines and log-prob server. Sync `repeat` times and measure each sync.

    `weights`: the weights to sync; None for those of the recipe's model. `verify`: verify every sync; if false, only the first one.
    """
    if not urls and not recipe.train.needs_rollout:
        raise UserError("train.stages: no stage generates, so the recipe starts no engines; name running ones by --to")
    if not urls:
        check_engine(recipe)
    recipe = _with_separate_url(recipe)
    engines = asyncio.run(_connect_engines(recipe, urls))
    # The hosts of a cluster at an address are known only after connecting to it.
    placement = place(recipe, None if recipe.cluster.address is None else [Host(float("inf"), float("inf"))])
    actors = placement.of("trainer") if engines else placement.actors
    cpus, gpus = sum(actor.cpus for actor in actors), sum(actor.gpus for actor in actors)
    with scratch_folder(recipe, "sync") as scratch, cluster(recipe.cluster, cpus=cpus, gpus=gpus):
        return asyncio.run(_sync(recipe, placement, weights, engines, Path(scratch), verify=verify, repeat=repeat))


def _with_separate_url(recipe: Recipe) -> Recipe:
    """A copy of the recipe with another folder in object storage: a store deletes the versions in its folder, and a run may use it."""
    if not isinstance(recipe.sync, StorageConfig) or recipe.sync_url is None:
        return recipe
    sync = recipe.sync.model_copy(update={"url": f"{recipe.sync_url}/sync-weights-{secrets.token_hex(4)}"})
    return recipe.model_copy(update={"sync": sync})


async def _connect_engines(recipe: Recipe, urls: list[str]) -> list[ServedEngine]:
    kv = {"release_kv": recipe.sync.release_kv, "keep_kv": recipe.sync.kv == "keep"}
    return [await ServedEngine.connect(url, recipe.sync.sections, **kv) for url in urls]


async def _sync(
    recipe: Recipe, placement: Placement, weights: Weights | None, engines: list[ServedEngine], scratch: Path, *, verify: bool, repeat: int
) -> list[SyncResult]:
    run, checkpoint = weights or (scratch, None)
    model = open_model(recipe, run)
    store = open_version_store(scratch, recipe, model.shape)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(store.close)
        trainer = TrainerGroup(recipe, placement)
        print_progress("starting the trainer" + ("" if engines else ", engines and log-prob server"))
        pool: ReplicaPool | None = None
        server: LogprobServer | None = None
        if engines:
            counts = await trainer.build(model.path)
        else:
            context = recipe.rollout.context or model.shape.max_positions
            tokenizer = open_tokenizer(recipe, model, run)
            counts, pool, server = await asyncio.gather(
                trainer.build(model.path),
                start_pool(recipe, model=str(model.path), context=context, placement=placement, store=store, tokenizer=tokenizer.name),
                _start_log_prob_server(recipe, model, placement, store),
            )
        for service in (pool, server):
            if service is not None:
                stack.push_async_callback(service.close)
        if checkpoint is not None:
            await trainer.restore(checkpoint)
        print_progress(f"trainer ready: {counts['parameters']:,} parameters" + (f", of {checkpoint.name}" if checkpoint else ""))
        served_engines = ServedEngines(engines)
        sync = WeightSync(recipe, trainer, served_engines if pool is None else pool, server, store.root)
        first_version = served_engines.version + 1 if engines else 1
        targets = len(engines) or recipe.rollout.replica_range.min + (recipe.logprob.replicas if server is not None else 0)
        return [
            await _measure_sync(sync, version, verify or version == first_version, targets)
            for version in range(first_version, first_version + repeat)
        ]


async def _start_log_prob_server(recipe: Recipe, model: HfFolder, placement: Placement, store: VersionStore) -> LogprobServer | None:
    if not recipe.runs_logprob_server:
        return None
    first_rank, logprob_store = placement.of("logprob")[0], store.for_logprob(recipe)
    server_start = start_server(
        recipe, model.path, device=placement.device, cpus=first_rank.cpus, gpus=first_rank.gpus, store=logprob_store
    )
    return await await_start(server_start, recipe.cluster.actor_deadline_s, "log-prob server")


async def _measure_sync(sync: WeightSync, version: int, verify: bool, targets: int) -> SyncResult:
    metrics = await sync(version, verify=verify)
    await sync.wait_copied()
    from mtpctl.sync.receiver import copy_rate

    update = sync.last_update
    assert update is not None
    manifest, sent = update.manifest, update.sent
    largest_bucket = max(bucket.nbytes for plan in manifest.sections.values() for bucket in plan.buckets)
    memory_rate = copy_rate(largest_bucket) if manifest.transport == SHM else None
    return SyncResult(
        version,
        manifest.transport,
        targets,
        manifest.nbytes,
        metrics["sync/seconds"],
        metrics["sync/publish_seconds"],
        metrics["sync/stall_seconds"],
        sent.wire_seconds,
        manifest.nbytes / (sent.wire_seconds or metrics["sync/seconds"]) / 1e9,
        memory_rate,
        sum(report.verified for report in update.reports),
    )


def render(results: list[SyncResult]) -> str:
    lines = []
    for sync in results:
        share = "" if sync.share is None else f", {sync.share:.0%} of memory's copy rate of {sync.memory_gb_per_s:.1f} GB/s"
        lines.append(
            f"version {sync.version} over {sync.transport} to {sync.targets} target(s): {sync.nbytes / 1e6:,.1f} MB "
            f"in {sync.seconds:.3f} s (export {sync.export_seconds:.3f} s), {sync.gb_per_s:.2f} GB/s{share}; "
            f"generation stalled for {sync.stall_seconds:.3f} s; "
            + (f"{sync.verified} tensors compared, all equal" if sync.verified else "not verified")
        )
    return "\n".join(lines)


def as_json(results: list[SyncResult]) -> str:
    return json.dumps([{**asdict(sync), "share": sync.share} for sync in results], indent=1)
