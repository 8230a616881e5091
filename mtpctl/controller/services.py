"""Starts the parts of an RL run other than the trainer: rollout engines, the log-prob server, a teacher, and reward processes.

Ray actors run in bundles that are reserved beforehand for the whole placement.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Literal

from mtpctl.cluster.bundles import POLL_S, Bundles, BundleSpec, BundlesUnavailable, Claim, list_ray_hosts
from mtpctl.cluster.deadlines import await_start
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.scoring import HintRenderer, LocalSource, RemoteSource, Teacher, TeacherSource
from mtpctl.controller.status import Waits
from mtpctl.data.sets import UNNAMED
from mtpctl.data.tokenizers import has_tokenizer, load_tokenizer
from mtpctl.environments.turns import load_turns
from mtpctl.errors import ClusterResources
from mtpctl.logprob.server import ROLE_NAMES, LogprobServer, start_server
from mtpctl.plan.placement import Actor, Placement, place
from mtpctl.recipe.rl import POLICY
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.function import Reward
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.start import start_pool
from mtpctl.routes import RouteShape
from mtpctl.sync.store import VersionStore
from mtpctl.telemetry.session import Telemetry

CHECKED_PROMPTS = 8
"""Number of prompts on which the teacher's tokenizer is compared with the policy's."""


async def reserve_bundles(recipe: Recipe, waits: Waits, stop_requested: asyncio.Event) -> tuple[Placement, Bundles] | None:
    """Plan the run on the free resources of the cluster, and reserve them. Returns None if a stop is requested first.

    Waits while other jobs use too much of the cluster. Raises ClusterResources if even the empty cluster is too small: immediately if the
    run has started Ray itself, otherwise after `cluster.actor_deadline_s`, because hosts may join.
    """
    start_time = time.monotonic()
    if (reservation := await _try_reserve(recipe, start_time)) is not None:
        return reservation
    with waits.show("cluster: waiting for capacity for the run"):
        while not stop_requested.is_set():
            await asyncio.sleep(POLL_S)
            if (reservation := await _try_reserve(recipe, start_time)) is not None:
                return reservation
    return None


async def _try_reserve(recipe: Recipe, start_time: float) -> tuple[Placement, Bundles] | None:
    hosts = list_ray_hosts()
    try:
        placement = place(recipe, [host.free for host in hosts])
    except ClusterResources:
        try:
            place(recipe, [host.total for host in hosts])
        except ClusterResources:
            if recipe.cluster.address is None or time.monotonic() - start_time > recipe.cluster.actor_deadline_s:
                raise
        return None
    bundles = Bundles()
    try:
        await bundles.reserve([BundleSpec(hosts[bundle.host].node_id, create_claims(bundle.actors)) for bundle in placement.bundles()])
    except BundlesUnavailable:
        return None
    return placement, bundles


def create_engine_claim(placement: Placement) -> Claim:
    """The CPUs and GPUs of one rollout engine, including all its ranks."""
    return create_claims(tuple(actor for actor in placement.of("rollout") if actor.index == 0))[0]


def create_claims(actors: tuple[Actor, ...]) -> tuple[Claim, ...]:
    """A claim for each Ray actor. The ranks of an engine share one claim, because they are processes of one actor."""
    claims: dict[str, Claim] = {}
    for actor in actors:
        name = f"rollout-{actor.index}" if actor.role == "rollout" else actor.name
        claim = claims.get(name, Claim(name, 0.0))
        claims[name] = Claim(name, claim.cpus + actor.cpus, claim.gpus + actor.gpus)
    return tuple(claims.values())


class Services:
    """Starts the Ray actors that RL needs in addition to the trainer. They are closed by the `stack` that is passed to each method."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        placement: Placement,
        bundles: Bundles,
        store: VersionStore,
        waits: Waits,
        telemetry: Telemetry,
    ) -> None:
        self.recipe, self.prepared, self.placement, self.bundles = recipe, prepared, placement, bundles
        self.store, self.waits, self.telemetry = store, waits, telemetry
        self._report_restart = partial(telemetry.event, "restart")

    @contextlib.contextmanager
    def _show_start(self, name: str, actors: list[str]) -> Iterator[None]:
        """Show that these actors are starting while the block runs, and log how long it took."""
        with self.waits.show(f"{name}: starting", *actors) as wait:
            yield
        self.telemetry.event("start", f"{name}: ready after {wait.seconds:.0f} s")

    async def start_rollout(self, stack: AsyncExitStack) -> ReplicaPool:
        """Start the rollout engines, at first the minimum of `rollout.replicas`."""
        shape = self.prepared.model.shape
        routes = RouteShape.of(shape) if self.recipe.replay(shape) == "rollout" else None
        replicas = [f"rollout replica {i}" for i in range(self.recipe.rollout.replica_range.min)]
        with self._show_start(f"rollout, {len(replicas)} replica(s)", replicas):
            pool = await start_pool(
                self.recipe,
                model=str(self.prepared.model.path),
                context=self.prepared.context,
                placement=self.placement,
                bundles=self.bundles,
                store=self.store,
                tokenizer=self.prepared.tokenizer.name,
                turn_runner=load_turns(self.recipe.rollout, self.prepared.tokenizer),
                routes=routes.layers if routes is not None else (),
                log=self._report_restart,
            )
        stack.push_async_callback(pool.close)
        return pool

    async def start_logprob(self, stack: AsyncExitStack) -> LogprobServer:
        """Start the log-prob server of the policy."""
        store = self.store.for_logprob(self.recipe)
        return await self._start_server(stack, self.recipe, self.prepared.model.path, "logprob", store=store)

    async def start_teacher(self, stack: AsyncExitStack, policy: LogprobServer | None) -> Teacher | None:
        """Start or connect to the teacher of `train.rl.teacher`; None without one. `policy`: the run's log-prob server.

        Raises UserError if no server answers at its URL, its tokenizer is not the policy's, or the hint does not fit the problems.
        """
        recipe, prepared, config = self.recipe, self.prepared, self.recipe.train.rl.teacher
        if config is None:
            return None
        source: TeacherSource
        if config.url is not None:
            source = await stack.enter_async_context(RemoteSource(config.url))
        elif config.path == POLICY:
            assert policy is not None, "the recipe's checks reject such a teacher without the server"
            source = LocalSource(policy, "the policy", None)
        else:
            source = await self._serve_teacher(stack)
        hint = None if config.hint is None else HintRenderer(config.hint, prepared.tokenizer, recipe.data, prepared.tools)
        teacher = Teacher(config, source, recipe.rollout.temperature, hint)
        await teacher.check(prepared.tokenizer, prepared.problems.train[:CHECKED_PROMPTS])
        return teacher

    async def _serve_teacher(self, stack: AsyncExitStack) -> LocalSource:
        model_folder = self.prepared.teacher
        assert model_folder is not None, "prepare() finds the model of a teacher that the run serves"
        server = await self._start_server(stack, self.recipe.for_teacher_server(), model_folder.path, "teacher")
        return LocalSource(
            server, f"the teacher {model_folder.path}", load_tokenizer(model_folder.path) if has_tokenizer(model_folder.path) else None
        )

    async def _start_server(
        self,
        stack: AsyncExitStack,
        recipe: Recipe,
        folder: Path,
        role: Literal["logprob", "teacher"],
        *,
        store: VersionStore | None = None,
    ) -> LogprobServer:
        first_rank = self.placement.of(role)[0]
        starting = start_server(
            recipe,
            folder,
            device=self.placement.device,
            cpus=first_rank.cpus,
            gpus=first_rank.gpus,
            bundles=self.bundles,
            store=store,
            role=role,
            log=self._report_restart,
        )
        role_name = ROLE_NAMES[role]
        title = role_name if role == "teacher" else f"{role_name} server"
        with self._show_start(title, [f"{role_name} replica {i} rank 0" for i in range(recipe.logprob.replicas)]):
            server = await await_start(starting, recipe.cluster.actor_deadline_s, title)
        stack.push_async_callback(server.close)
        return server


async def start_rewards(
    recipe: Recipe, stack: AsyncExitStack, *, report: Callable[[str], None], log: Path | None = None
) -> Mapping[str, Reward]:
    """Start the recipe's reward (key `UNNAMED`) and those of held-out sets (by name). `stack` closes them. Raises like `Rewarder`."""
    configs = {UNNAMED: recipe.reward}
    for name, held_out in recipe.evaluation.sets.items():
        if held_out.reward is not None:
            configs[name] = held_out.reward
    return {name: await stack.enter_async_context(Rewarder(config, report=report, log=log)) for name, config in configs.items()}
