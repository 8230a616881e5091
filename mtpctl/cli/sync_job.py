"""One weight sync by hand: from the model that a recipe names, or a checkpoint, to engines that it starts or that serve already."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster
from mtpctl.controller.prepare import model_of, store_in
from mtpctl.controller.state import version_named
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.controller.weights import WeightSync
from mtpctl.logprob.placed import start_server
from mtpctl.logprob.server import LogprobServer
from mtpctl.plan.placement import Placement, place
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.start import check_engine_installed, start_pool
from mtpctl.rollout.vllm.http import ServedEngine, ServedEngines
from mtpctl.sync.transports.base import PUSHED


@dataclass(frozen=True)
class Source:
    """Where the weights come from: a checkpoint over the recipe's model, or the model alone; `run` is where both lie."""

    run: Path | None = None
    checkpoint: Path | None = None

    @classmethod
    def parse(cls, text: str | None) -> Source:
        """`--from`: a run directory (its newest checkpoint), or a checkpoint. Raises UserError for anything else."""
        if text is None:
            return cls()
        run, checkpoint, _ = version_named(text)
        return cls(run, checkpoint)


@dataclass(frozen=True)
class Synced:
    """One sync. Rates in GB/s; `link_gb_per_s`: this machine's memory for `shm`, the same transfer unpacked otherwise."""

    version: int
    transport: str
    targets: int
    nbytes: int
    seconds: float
    export_seconds: float
    stall_seconds: float
    wire_seconds: float
    gb_per_s: float
    link_gb_per_s: float | None
    verified: int

    @property
    def share(self) -> float | None:
        """Of the link's limit."""
        return None if not self.link_gb_per_s else self.gb_per_s / self.link_gb_per_s


def sync_by_hand(recipe: Recipe, source: Source, urls: list[str], *, verify: bool, repeat: int, say: Callable[[str], None]) -> list[Synced]:
    """Do it. Raises what starting and syncing raise."""
    if not urls:
        check_engine_installed(recipe)
    engines = asyncio.run(_serving(recipe, urls))
    placement = place(recipe)
    seats = placement.of("trainer") if engines else placement.actors
    cpus, gpus = sum(seat.cpus for seat in seats), sum(seat.gpus for seat in seats)
    with tempfile.TemporaryDirectory(prefix="mtpctl-sync-") as scratch, cluster(recipe.cluster, cpus=cpus, gpus=gpus):
        return asyncio.run(_sync(recipe, placement, source, engines, Path(scratch), verify=verify, repeat=repeat, say=say))


async def _serving(recipe: Recipe, urls: list[str]) -> list[ServedEngine]:
    return [await ServedEngine.find(url, recipe.sync.sections, release_kv=recipe.sync.release_kv) for url in urls]


async def _sync(
    recipe: Recipe,
    placement: Placement,
    source: Source,
    engines: list[ServedEngine],
    scratch: Path,
    *,
    verify: bool,
    repeat: int,
    say: Callable[[str], None],
) -> list[Synced]:
    model = model_of(recipe, source.run or scratch)
    store = store_in(scratch, recipe, model.shape)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(store.close)
        server: LogprobServer | None = None
        pool: Any = ServedEngines(engines)
        trainer = TrainerGroup(recipe, placement)
        starting: list[Any] = [trainer.build(model.path)]
        if not engines:
            context = recipe.rollout.context or model.shape.max_positions
            starting.append(start_pool(recipe, model=str(model.path), context=context, placement=placement, published=store))
            if recipe.logprob.standalone:
                seat = placement.of("logprob")[0]
                started = start_server(recipe, model.path, device=placement.device, cpus=seat.cpus, gpus=seat.gpus, published=store)
                starting.append(within(started, recipe.cluster.actor_deadline_s, "log-prob server, start"))
        say("starting the trainer" + ("" if engines else ", engines and log-prob server"))
        told, *rest = await asyncio.gather(*starting)
        for actor in rest:
            stack.push_async_callback(actor.close)
        if rest:
            pool, server = rest[0], rest[1] if len(rest) > 1 else None
        if source.checkpoint is not None:
            await trainer.call("restore", str(source.checkpoint))
        say(f"trainer ready: {told['parameters']:,} parameters" + (f", of {source.checkpoint.name}" if source.checkpoint else ""))
        weights = WeightSync(recipe, trainer, pool, server, store.root)
        first = pool.version + 1 if engines else 1
        targets = len(engines) or recipe.rollout.replicas + (recipe.logprob.replicas if server is not None else 0)
        return [await _one(weights, version, verify or version == first, targets) for version in range(first, first + repeat)]


async def _one(weights: WeightSync, version: int, verify: bool, targets: int) -> Synced:
    metrics = await weights(version, verify=verify)
    await weights.kept()
    from mtpctl.sync.memory import copy_rate

    assert weights.last is not None
    nbytes, sent = weights.last.nbytes, weights.sent
    link = None if weights.last.transport in PUSHED else copy_rate(max(plan.largest for plan in weights.last.sections.values()))
    return Synced(
        version,
        weights.last.transport,
        targets,
        nbytes,
        metrics["sync/seconds"],
        metrics["sync/publish_seconds"],
        metrics["sync/stall_seconds"],
        sent.wire_seconds,
        nbytes / (sent.wire_seconds or metrics["sync/seconds"]) / 1e9,
        link,
        sum(report.verified for report in weights.reports),
    )


def render(done: list[Synced]) -> str:
    """For a terminal."""
    lines = []
    for sync in done:
        share = "" if sync.share is None else f", {sync.share:.0%} of the {sync.link_gb_per_s:.1f} GB/s that the link gives"
        lines.append(
            f"version {sync.version} over {sync.transport} to {sync.targets} target(s): {sync.nbytes / 1e6:,.1f} MB "
            f"in {sync.seconds:.3f} s (export {sync.export_seconds:.3f} s), {sync.gb_per_s:.2f} GB/s{share}; "
            f"generation stood {sync.stall_seconds:.3f} s; "
            + (f"{sync.verified} tensors compared, all equal" if sync.verified else "not verified")
        )
    return "\n".join(lines)


def as_json(done: list[Synced]) -> str:
    """Everything that was measured."""
    return json.dumps([{**asdict(sync), "share": sync.share} for sync in done], indent=1)
