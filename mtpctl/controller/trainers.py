"""The trainer ranks: every call goes to all of them, with a deadline. A lost trainer is restarted from the newest checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Protocol

from mtpctl.checkpoint.finding import prepare_resume
from mtpctl.checkpoint.listing import Entry
from mtpctl.cluster.bundles import POLL_S, ActorLocation, Bundles, Options
from mtpctl.cluster.deadlines import await_start, await_within, describe_error
from mtpctl.cluster.process import make_log_name_variables
from mtpctl.cluster.replicas import FAILURE_WINDOW_S
from mtpctl.controller.state import RunState
from mtpctl.controller.status import Waits
from mtpctl.data.prompts import SftSample
from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.plan.placement import Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Sample
from mtpctl.sync.protocol import Manifest, Section
from mtpctl.sync.transports.base import TransferStats
from mtpctl.telemetry.session import Telemetry
from mtpctl.trainer.actor import Parameters, TrainerRank
from mtpctl.trainer.share import distribute

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

LIVENESS_TIMEOUT_S = 15.0
"""Time limit for an idle rank to answer before it counts as lost, in seconds. It includes the time that Ray needs to detect a lost host."""
CAPACITY_WAIT_S = 30.0
"""Seconds to wait for capacity for all ranks before fewer are started. Until then Ray may not know which hosts are free or lost."""


class TrainerLost(RuntimeFailure):
    """A trainer rank has died or does not answer. The others cannot continue without it."""


class HostLost(TrainerLost):
    """A host was lost while ranks were starting on it. It counts as part of the previous loss, because Ray detects lost hosts late."""


class RecoverTrainer(Protocol):
    """Restarts a lost trainer, and resets the run's state to the newest checkpoint."""

    async def __call__(self, error: TrainerLost, *, redraw_prompts: bool = False) -> object:
        """`redraw_prompts`: samples since the checkpoint are lost too, so their prompts are drawn again.

        Raises `error` if the recipe permits no restarts.
        """
        ...


async def no_recovery(error: TrainerLost, *, redraw_prompts: bool = False) -> None:
    """The `RecoverTrainer` of a trainer that is never restarted."""
    raise error


class TrainerGroup:
    """The trainer ranks, as Ray actors.

    A method that has the name of a `TrainerRank` method calls that method on every rank, and returns the result of rank 0.

    Attributes:
        recipe: the recipe of the ranks. After the loss of a host it may have fewer data-parallel ranks than the run's recipe.
        bundles: reserved for the ranks. If None, Ray chooses the hosts, and no rank can be restarted.
    """

    def __init__(self, recipe: Recipe, placement: Placement, bundles: Bundles | None = None) -> None:
        self.recipe, self.bundles = recipe, bundles
        self._run_recipe = recipe
        self.actors: list[ActorHandle] = []
        first_rank = placement.of("trainer")[0]
        options: Options = {"num_cpus": first_rank.cpus, "num_gpus": first_rank.gpus}
        actor_names = self.actor_names
        self._start([options] * len(actor_names) if bundles is None else [bundles.by_actor[name].options() for name in actor_names])

    @property
    def actor_names(self) -> list[str]:
        """The names of the ranks in the placement."""
        return [f"trainer-{rank}" for rank in range(self.recipe.train.parallel.world_size)]

    def _start(self, options: Sequence[Options]) -> None:
        import ray
        from ray.actor import ActorHandle

        recipe_json = self.recipe.model_dump_json(by_alias=True)
        threads = {}
        if self.recipe.train.threads:
            # Idle threads sleep. Spinning ones take cores from engines on the same host: the first updates, during the start of the
            # engines, took ten times as long on two cores.
            threads = {"OMP_NUM_THREADS": str(self.recipe.train.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self.actors = []
        for rank, option in enumerate(options):
            environment = {"env_vars": threads | make_log_name_variables(f"trainer rank {rank}")}
            actor = ray.remote(TrainerRank).options(runtime_env=environment, **option).remote(recipe_json, rank, len(options))
            assert isinstance(actor, ActorHandle)
            self.actors.append(actor)

    async def begin_stage(self, stage: str, reference: Path, *, resumed: bool) -> None:
        await self._call(TrainerRank.begin_stage, stage, str(reference), resumed)

    async def sft_step(self, rows: list[SftSample]) -> dict[str, float]:
        return await self._call(TrainerRank.sft_step, rows)

    async def draft_step(self, rows: list[SftSample]) -> dict[str, float]:
        return await self._call(TrainerRank.draft_step, rows)

    async def restore(self, checkpoint: Path) -> None:
        await self._call(TrainerRank.restore, str(checkpoint))

    async def begin_save(self, path: Path) -> Path:
        return Path(await self._call(TrainerRank.begin_save, str(path)))

    async def finish_save(self, *, wait: bool, entries: Mapping[str, Entry]) -> bool:
        return await self._call(TrainerRank.finish_save, wait, entries)

    async def abandon_save(self) -> None:
        await self._call(TrainerRank.abandon_save)

    async def publish_checkpoint(self, path: Path, keep: int, needed: Sequence[str]) -> None:
        await self._call(TrainerRank.publish_checkpoint, str(path), keep, needed)

    async def plan_weights(
        self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]
    ) -> Manifest | None:
        return await self._call(TrainerRank.plan_weights, version, store, members, checksums, sections)

    async def transfer_weights(self) -> TransferStats | None:
        return await self._call(TrainerRank.transfer_weights)

    async def persist_weights(self) -> None:
        await self._call(TrainerRank.persist_weights)

    async def _call[**P, T](self, method: Callable[Concatenate[TrainerRank, P], T], *args: P.args, **_: P.kwargs) -> T:
        """Call `method` on every rank with the same arguments. A list is written into the object store once for all ranks."""
        import ray

        shared_args = tuple(ray.put(arg) if isinstance(arg, list) else arg for arg in args)
        return await self._call_each(method, lambda rank: shared_args, self.recipe.cluster.step_deadline_s)

    async def _call_each[T](self, method: Callable[..., T], args_of_rank: Callable[[int], tuple[object, ...]], deadline_s: float) -> T:
        """Call `method` of `TrainerRank` on every rank with the arguments `args_of_rank(rank)`. Returns the result of rank 0.

        Raises TrainerLost if a rank dies or does not answer within `deadline_s`. If a rank fails, raises its error: an MtpctlError
        unchanged, any other as a RuntimeFailure.
        """
        name = method.__name__
        if not self.actors:
            raise TrainerLost(f"trainer, {name}: no rank runs")
        calls = [getattr(actor, name).remote(*args_of_rank(rank)) for rank, actor in enumerate(self.actors)]
        futures: list[asyncio.Future[T]] = [
            asyncio.ensure_future(await_within(call, deadline_s, f"trainer rank {rank}, {name}")) for rank, call in enumerate(calls)
        ]
        try:
            return (await asyncio.gather(*futures))[0]
        except RuntimeFailure as error:
            await self._raise_if_lost(error)
            raise
        finally:
            for future in futures:
                future.cancel()

    async def _raise_if_lost(self, error: RuntimeFailure) -> None:
        """Raise TrainerLost if a rank is dead, which explains the errors of the others.

        An unresponsive rank counts as lost, unless a rank raised an MtpctlError.
        """
        import ray

        cause = error.__cause__
        # If a rank raises an error, the RayTaskError is an instance of its class, too, which may be TimeoutError.
        is_raised_by_rank = isinstance(cause, ray.exceptions.RayTaskError)
        if isinstance(cause, ray.exceptions.RayActorError | TimeoutError) and not is_raised_by_rank:
            raise TrainerLost(str(error)) from error
        # An MtpctlError has its own cause: unresponsive ranks may be waiting for the rank that failed. A dead rank may have caused it.
        is_own_error = isinstance(cause, ray.exceptions.RayTaskError) and isinstance(cause.cause, MtpctlError)
        location_calls: list[Coroutine[None, None, ActorLocation]] = [
            await_within(actor.location.remote(), LIVENESS_TIMEOUT_S, f"trainer rank {i}") for i, actor in enumerate(self.actors)
        ]
        for answer in await asyncio.gather(*location_calls, return_exceptions=True):
            has_died = isinstance(answer, BaseException) and isinstance(answer.__cause__, ray.exceptions.RayActorError)
            if has_died or (isinstance(answer, BaseException) and not is_own_error):
                raise TrainerLost(f"{answer} ({describe_error(error)})") from error

    async def rl_step(self, samples: Sequence[Sample], version: int) -> dict[str, float]:
        """One policy update: each rank gets its share of the samples, which are ordered by group."""
        batch_table, shares = await asyncio.to_thread(self._put_shares, samples)
        parallel = self.recipe.train.parallel
        deadline_s = self.recipe.cluster.step_deadline_s
        return await self._call_each(TrainerRank.rl_step, lambda rank: (batch_table, shares[parallel.dp_rank(rank)], version), deadline_s)

    def _put_shares(self, samples: Sequence[Sample]) -> tuple[ObjectRef, list[ObjectRef]]:
        """Write the table of the samples and the share of each data-parallel rank into Ray's object store, each once."""
        import ray

        train = self.recipe.train
        batch_table, shares = distribute(
            samples, minibatches=train.rl.minibatches, tokens_per_microbatch=train.tokens_per_microbatch, dp=train.parallel.dp
        )
        return ray.put(batch_table), [ray.put(share()) for share in shares]

    async def build(self, folder: Path) -> Parameters:
        """Load the model in `folder` on every rank. Returns the number of parameters, and the number of trained parameters."""
        deadline_s = self.recipe.cluster.actor_deadline_s
        await self._wait_for_ranks(deadline_s)
        try:
            rendezvous_address: str = await await_start(self.actors[0].address.remote(), deadline_s, "trainer rank 0")
        except RuntimeFailure as error:
            raise TrainerLost(str(error)) from error
        return await self._call_each(TrainerRank.build, lambda rank: (str(folder), rendezvous_address), deadline_s)

    async def _wait_for_ranks(self, deadline_s: float) -> None:
        """Wait until every rank has started, and check its bundle. Raises HostLost if a host is lost during the wait."""
        if self.bundles is None:
            return
        futures: list[asyncio.Future[ActorLocation]] = [
            asyncio.ensure_future(await_start(actor.location.remote(), deadline_s, f"trainer rank {i}"))
            for i, actor in enumerate(self.actors)
        ]
        try:
            while (await asyncio.wait(futures, timeout=POLL_S))[1]:
                if lost_actors := self.bundles.on_lost_hosts(self.actor_names):
                    raise HostLost(f"{lost_actors[0]}: its host is lost")
            for name, future in zip(self.actor_names, futures, strict=True):
                try:
                    location: ActorLocation = future.result()
                except RuntimeFailure as error:
                    raise TrainerLost(str(error)) from error
                self.bundles.check(name, location)
        finally:
            for future in futures:
                future.cancel()

    def kill(self) -> None:
        """Kill every rank's process."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    async def restart(self, report: Callable[[str], None], stop_requested: asyncio.Event) -> None:
        """Replace all ranks by new ones, on other hosts if theirs are lost. The caller calls `build` next.

        If there is no capacity for all data-parallel ranks within `CAPACITY_WAIT_S`, starts as many as fit, at least `train.min_dp`. If not
        even those fit, reports that once and waits. Raises TrainerLost if a stop is requested during the wait.
        """
        assert self.bundles is not None, "ranks without bundles cannot be restarted"
        self.kill()
        train = self._run_recipe.train
        parallel = train.parallel
        # Megatron must be able to divide the experts among the ranks.
        min_dp = train.min_dp or parallel.dp
        smaller_dp_sizes = [dp for dp in range(parallel.dp - 1, min_dp - 1, -1) if dp * parallel.cp % parallel.ep == 0]
        started_at, is_reported = time.monotonic(), False
        all_actors = [name for name in self.bundles.by_actor if name.startswith("trainer-")]
        self.bundles.compact(all_actors)
        with self.bundles.mark_awaited(all_actors):
            while True:
                has_waited = time.monotonic() - started_at > CAPACITY_WAIT_S
                for dp in [parallel.dp, *smaller_dp_sizes] if has_waited else [parallel.dp]:
                    train_config = train.model_copy(update={"parallel": parallel.model_copy(update={"dp": dp})})
                    self.recipe = self._run_recipe.model_copy(update={"train": train_config})
                    bundles = await self.bundles.try_acquire(self.actor_names, per_host=parallel.tp)
                    if bundles is not None:
                        return self._start([bundle.options() for bundle in bundles])
                if has_waited and not is_reported:
                    is_reported = True
                    report("no host has capacity for the trainer's ranks; waiting for a host that joins or becomes free")
                if stop_requested.is_set():
                    raise TrainerLost("trainer: a stop was requested before there was capacity for its ranks")
                await asyncio.sleep(POLL_S)


class TrainerRecovery:
    """Restarts a lost trainer while rollout continues.

    Args:
        folder: the model folder.
        reference: the checkpoint of the policy that RL started from.
    """

    def __init__(
        self, recipe: Recipe, trainer: TrainerGroup, state: RunState, telemetry: Telemetry, waits: Waits, *, folder: Path, reference: Path
    ) -> None:
        self.recipe, self.trainer, self.state, self.telemetry, self.waits = recipe, trainer, state, telemetry, waits
        self.folder, self.reference = folder, reference
        self._loss_times: list[float] = []
        self._parameter_counts: Parameters

    async def __call__(self, error: TrainerLost, *, redraw_prompts: bool = False) -> Path | None:
        """Restart the ranks, and reset the run's state to the newest checkpoint. `redraw_prompts`: see `RecoverTrainer`.

        Returns the checkpoint; None if this stage has none, and therefore begins again. Raises RuntimeFailure after too many
        restarts. Raises `error` if the recipe permits no restarts, or if the newest checkpoint is damaged and `redraw_prompts` is
        false.
        """
        self.state.is_updating, self.state.weights_lost = False, True
        choice = await asyncio.to_thread(prepare_resume, self.state.root)
        for line in choice.lines:
            self.telemetry.event("checkpoint", line)
        if choice.damaged and not redraw_prompts:
            # The buffer retains only the groups since the newest checkpoint, so the run cannot continue from an older one.
            raise error
        path, seconds = await self._restart(error, lambda: self._restore(choice.path, redraw_prompts))
        self.state.weights_lost = False
        source = "the beginning of the stage" if path is None else path.name
        self._report_restart(seconds, f": {self.state.stage} resumes after step {self.state.step}, from {source}")
        return path

    async def recover_start(self, error: TrainerLost) -> Parameters:
        """Restart a trainer that was lost before the first stage. Returns the result of `TrainerGroup.build`."""

        async def restore_nothing() -> None: ...

        _, seconds = await self._restart(error, restore_nothing)
        self._report_restart(seconds, "")
        return self._parameter_counts

    def _report_restart(self, seconds: float, details: str) -> None:
        running, configured = (recipe.train.parallel.world_size for recipe in (self.trainer.recipe, self.recipe))
        reduced_note = f" with {running} of {configured} ranks" if running < configured else ""
        self.telemetry.event("restart", f"trainer back{reduced_note} after {seconds:.0f} s{details}")

    async def _restart[T](self, error: TrainerLost, restore: Callable[[], Awaitable[T]]) -> tuple[T, float]:
        """Restart the ranks and call `restore`. If the trainer is lost again, repeat both. Returns the result, and the total seconds."""
        started_at, count = time.monotonic(), 0
        while True:
            if not count or not isinstance(error, HostLost):
                count = self._count_loss(error)
            self.telemetry.event(
                "restart",
                f"{error}; restarting the trainer: restart {count} of at most {self.recipe.train.max_restarts} (train.max_restarts)",
            )
            try:
                with self.waits.show("trainer: restarting", "trainer rank 0"):
                    await self.trainer.restart(lambda line: self.telemetry.event("restart", line), self.state.stop_requested)
                    self._parameter_counts = await self.trainer.build(self.folder)
                    return await restore(), time.monotonic() - started_at
            except TrainerLost as next_error:
                if self.state.stop_requested.is_set():
                    raise
                error = next_error

    def _count_loss(self, error: TrainerLost) -> int:
        """Count a lost trainer. Returns the number of times within the last hour.

        Raises `error` if restarts are not permitted, and RuntimeFailure after too many.
        """
        train, now = self.recipe.train, time.monotonic()
        self._loss_times = [*(time_of_loss for time_of_loss in self._loss_times if now - time_of_loss < FAILURE_WINDOW_S), now]
        if not train.restarts_trainer or not train.max_restarts:
            raise error
        if len(self._loss_times) > train.max_restarts:
            raise RuntimeFailure(f"{error}; train.max_restarts: the limit of {train.max_restarts} within an hour is reached") from error
        return len(self._loss_times)

    async def _restore(self, checkpoint: Path | None, redraw_prompts: bool) -> Path | None:
        stage = self.state.stage
        within_stage = self.state.reset_to(checkpoint, redraw_prompts=redraw_prompts)
        if checkpoint is not None and not within_stage:
            await self.trainer.restore(checkpoint)
        await self.state.retry_while_disk_full(lambda: self.trainer.begin_stage(stage, self.reference, resumed=within_stage))
        if checkpoint is not None and within_stage:
            await self.trainer.restore(checkpoint)
        return checkpoint if within_stage else None
