"""Reserves the places that a run's plan gives its actors on the Ray cluster, and waits for room while others use it."""

from __future__ import annotations

import asyncio
import time

from mtpctl.cluster.bundles import LOOK_S, Bundles, BundleSpec, BundlesUnavailable, Claim, RayHost, ray_hosts
from mtpctl.controller.waits import Waits
from mtpctl.errors import ClusterResources
from mtpctl.plan.placement import Actor, Bundle, Placement, place
from mtpctl.recipe.schema import Recipe


async def seated(recipe: Recipe, waits: Waits, stopping: asyncio.Event) -> tuple[Placement, Bundles] | None:
    """Plan the run on what is free of the cluster, and reserve the places. Returns None where a stop is asked for first.

    While others use too much of the cluster, waits. Raises ClusterResources where even the whole cluster is too small: at once where the
    run has started Ray itself; in a cluster that it has joined, after `cluster.actor_deadline_s`, in which further hosts may join.
    """
    began = time.monotonic()
    if (found := await _try(recipe, began)) is not None:
        return found
    with waits.on("cluster: no room for the run just now, waiting for it"):
        while not stopping.is_set():
            await asyncio.sleep(LOOK_S)
            if (found := await _try(recipe, began)) is not None:
                return found
    return None


async def _try(recipe: Recipe, began: float) -> tuple[Placement, Bundles] | None:
    hosts = ray_hosts()
    try:
        placement = place(recipe, [host.free for host in hosts])
    except ClusterResources:
        try:
            place(recipe, [host.whole for host in hosts])
        except ClusterResources:
            if recipe.cluster.address is None or time.monotonic() - began > recipe.cluster.actor_deadline_s:
                raise
        return None
    bundles = Bundles()
    try:
        await bundles.reserve([_wanted(bundle, hosts) for bundle in placement.bundles()])
    except BundlesUnavailable:
        return None
    return placement, bundles


def _wanted(bundle: Bundle, hosts: list[RayHost]) -> BundleSpec:
    return BundleSpec(hosts[bundle.host].node, claims_of(bundle.actors))


def engine_claim(placement: Placement) -> Claim:
    """The CPUs and GPUs that one rollout engine takes, with all its ranks."""
    return claims_of(tuple(actor for actor in placement.of("rollout") if actor.index == 0))[0]


def claims_of(actors: tuple[Actor, ...]) -> tuple[Claim, ...]:
    """A claim for each Ray actor. All ranks of an engine are one claim, since they are processes of one actor."""
    found: dict[str, Claim] = {}
    for actor in actors:
        name = f"rollout-{actor.index}" if actor.role == "rollout" else actor.name
        before = found.get(name, Claim(name, 0.0))
        found[name] = Claim(name, before.cpus + actor.cpus, before.gpus + actor.gpus)
    return tuple(found.values())
