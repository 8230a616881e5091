"""Starts the teacher that the recipe names, or finds it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mtpctl.cluster.bundles import LOOK_S, Bundles, BundleSpec, BundlesUnavailable, Claim, RayHost, ray_hosts
from mtpctl.cluster.deadlines import within
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.scoring import Hint, ServedAtUrl, ServedInRun, Source, Teacher
from mtpctl.controller.status import Waits
from mtpctl.data.sets import UNNAMED
from mtpctl.data.tokenizers import has_tokenizer, load_tokenizer
from mtpctl.errors import ClusterResources
from mtpctl.logprob.server import LogprobServer, start_server
from mtpctl.plan.placement import Actor, Bundle, Placement, place
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import POLICY, TeacherConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Reward
from mtpctl.rl.rewards.pool import Rewarder

Starting = Callable[[str, list[str]], contextlib.AbstractContextManager[None]]
"""Shows that actors are starting while its block runs, from what they are together and their names."""
CHECKED = 8
"""Prompts of which the teacher's tokens are compared with the policy's."""


async def start_teacher(
    recipe: Recipe,
    prepared: Prepared,
    stack: contextlib.AsyncExitStack,
    placement: Placement,
    bundles: Bundles,
    policy: LogprobServer | None,
    starting: Starting,
) -> Teacher | None:
    """The teacher of `train.rl.teacher`, which is closed with the stack; None without one. `policy`: the run's log-prob server.

    Raises UserError where nobody is at its URL, its tokens are not the policy's, or the hint does not fit the problems.
    """
    config = recipe.train.rl.teacher
    if config is None:
        return None
    source: Source
    if config.url is not None:
        source = await stack.enter_async_context(ServedAtUrl(config.url))
    elif config.path == POLICY:
        assert policy is not None, "the recipe's checks let no such teacher through without the server"
        source = ServedInRun(policy, "the policy", None)
    else:
        source = await _served(recipe, config, prepared, stack, placement, bundles, starting)
    hint = None if config.hint is None else Hint(config.hint, prepared.tokenizer, recipe.data, prepared.tools)
    teacher = Teacher(config, source, recipe.rollout.temperature, hint)
    await teacher.check(prepared.tokenizer, prepared.problems.train[:CHECKED])
    return teacher


async def _served(
    recipe: Recipe,
    config: TeacherConfig,
    prepared: Prepared,
    stack: contextlib.AsyncExitStack,
    placement: Placement,
    bundles: Bundles,
    starting: Starting,
) -> ServedInRun:
    folder = prepared.teacher
    assert folder is not None, "prepare() finds the model of a teacher that the run serves"
    options = recipe.logprob.model_copy(update={"replicas": config.replicas, "parallel": config.parallel, "keep_previous": False})
    first = placement.of("teacher")[0]
    # Its own MTP layers have nothing to say about the policy's tokens.
    beginning = start_server(
        recipe.model_copy(update={"logprob": options, "mtp": MtpConfig(mode="off")}),
        folder.path,
        device=placement.device,
        cpus=first.cpus,
        gpus=first.gpus,
        bundles=bundles,
        role="teacher",
    )
    with starting("teacher", [f"teacher replica {i} rank 0" for i in range(config.replicas)]):
        server = await within(beginning, recipe.cluster.actor_deadline_s, "teacher, start")
    stack.push_async_callback(server.close)
    return ServedInRun(server, f"the teacher {folder.path}", load_tokenizer(folder.path) if has_tokenizer(folder.path) else None)


# The rewards of a run: the one that it trains on, and those of held-out sets that have one of their own.


async def start_rewards(
    recipe: Recipe, stack: contextlib.AsyncExitStack, *, tell: Callable[[str], None], log: Path | None = None
) -> Mapping[str, Reward]:
    """Start the reward of the recipe, under the name `UNNAMED`, and under their names those of held-out sets that name one.

    `stack` ends them. Arguments as of `Rewarder`. Raises UserError for a function that is missing or cannot be called.
    """
    configs = {UNNAMED: recipe.reward}
    for name, each in recipe.evaluation.sets.items():
        if each.reward is not None:
            configs[name] = each.reward
    return {name: await stack.enter_async_context(Rewarder(config, report=tell, log=log)) for name, config in configs.items()}


# Reserves the places that a run's plan gives its actors on the Ray cluster, and waits for room while others use it.


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
