"""The log-prob server: one queue, replicas that score its requests, and weight updates.

The queue is in the callers' process, so a failed replica loses no request. Weights are updated between batches: the server stops sending
batches, waits for those in flight, lets the replicas apply the update, and continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mtpctl.cluster.bundles import Bundles, Options
from mtpctl.cluster.deadlines import await_start
from mtpctl.cluster.replicas import Lifecycle, Log, Replicas, no_log, start_all
from mtpctl.logprob.dispatch import Dispatcher, QueuedRequest, ServerLimits
from mtpctl.logprob.protocol import Bounds, DeadlineExceeded, QueueFull, ReplicaDead, Scored, ScoreRequest
from mtpctl.logprob.rank import ReplicaConfig
from mtpctl.logprob.replica import RANK_DEADLINE_S, Replica, start_replica
from mtpctl.recipe.schema import ClusterConfig, Recipe
from mtpctl.sync.protocol import Manifest, PublishedVersions, TargetDirty
from mtpctl.sync.update import SyncReport, cancel_on_error, update_target

Starter = Callable[[int], Awaitable[Replica]]


class LogprobServer:
    """Replicas behind one queue. Create with `await LogprobServer.start(…)`, and end with `await server.close()`."""

    def __init__(
        self, replicas: list[Replica], start: Starter, store: PublishedVersions | None, limits: ServerLimits, log: Log = no_log
    ) -> None:
        self.bounds: Bounds = replicas[0].bounds
        self.version = max(replica.version for replica in replicas)
        lifecycle = Lifecycle(
            start=start,
            catch_up=self._catch_up,
            end=Replica.end,
            on_change=lambda: self.dispatcher.dispatch_ready(),
            fatal_errors=(ReplicaDead, TargetDirty),
            max_restarts=limits.max_restarts,
            end_timeout_s=RANK_DEADLINE_S,
            # A replica may apply two versions, and a failed update may take as long again to restore the old weights.
            catch_up_timeout_s=3 * limits.sync_deadline_s,
            log=log,
        )
        self.replicas = Replicas(replicas, lifecycle)
        self._store = store
        self.dispatcher = Dispatcher(self.replicas, limits)
        self.limits = limits
        self.queue, self.counters = self.dispatcher.queue, self.dispatcher.counters

    @classmethod
    async def start(
        cls, start: Starter, count: int, limits: ServerLimits, *, store: PublishedVersions | None = None, log: Log = no_log
    ) -> LogprobServer:
        """Start `count` replicas concurrently with `start(index)`.

        `store`: the published versions, to which restarted replicas are updated. `log`: receives a line for each failure and each restart.
        """
        replicas = await start_all(start, Replica.end, count, fatal_errors=(ReplicaDead,), max_restarts=limits.max_restarts)
        return cls(replicas, start, store, limits, log)

    # ------------------------------------------------------------------------------------------------------- requests

    async def score(self, request: ScoreRequest, *, wait: bool = True) -> Scored:
        """Score one request, across failures of replicas.

        If the queue is full, waits for room, or with `wait=False` raises QueueFull. Raises RequestRefused for a request that the model
        cannot score, VersionGone if no replica has its weights, DeadlineExceeded after its deadline, and RuntimeFailure if no replica is
        left.
        """
        self.bounds.check(request)
        if not wait:
            self.check_room([request])
        started_at = time.monotonic()
        answer: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(request.deadline_s):
                if wait:
                    await self.queue.wait_for_room(request.tokens)
                self.queue.put(QueuedRequest(request, answer))
                self.dispatcher.dispatch_ready()
                result = await answer
        except TimeoutError as error:
            self.counters.failed += 1
            newest = f"; the newest weights are {self.version}" if not request.allows(self.version) else ""
            raise DeadlineExceeded(f"no answer within {request.deadline_s:g} s{newest}") from error
        except Exception:
            self.counters.failed += 1
            raise
        finally:
            if not answer.done() or answer.cancelled():
                answer.cancel()
                self.queue.remove(lambda item: item.answer is answer)
                self.queue.admit_waiters()
        self.counters.requests += 1
        self.counters.wait_s += time.monotonic() - started_at
        return result

    def check_room(self, requests: Sequence[ScoreRequest]) -> None:
        """Raise QueueFull, and count these requests as rejected, if the queue has no room for all of them."""
        try:
            self.queue.check_capacity(sum(request.tokens for request in requests))
        except QueueFull:
            self.counters.queue_full += len(requests)
            raise

    async def stream(self, requests: Iterable[ScoreRequest], *, wait: bool = True) -> AsyncIterator[tuple[int, Scored]]:
        """Yield answers as they finish, each with the index of its request."""
        request_list = list(requests)

        async def score(index: int) -> tuple[int, Scored]:
            return index, await self.score(request_list[index], wait=wait)

        tasks = [asyncio.create_task(score(index)) for index in range(len(request_list))]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for started in tasks:
                started.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------------------------- control

    async def _catch_up(self, replica: Replica) -> bool:
        """Update a restarted replica to the versions of the other replicas. Returns False while the store does not have them yet.

        A newer version may already be published. It is not applied here, because the update in progress will apply it.
        """
        store = self._store
        versions = store.versions() if store is not None else []
        if store is not None and self.counters.updates and max(versions, default=0) < self.version:
            return False
        for version in [v for v in versions if replica.version < v <= self.version][-1 - replica.keep_previous :]:
            assert store is not None
            await update_target(replica, store.open(version), deadline_s=self.limits.sync_deadline_s)
        return True

    @asynccontextmanager
    async def quiesce(self, deadline_s: float = 120.0) -> AsyncIterator[None]:
        """Pause batches until `apply_update` has finished or the block ends. No replica is started until the block ends.

        A replica whose pass does not end within `deadline_s` counts as dead, and its requests go to another one.
        """
        async with self.replicas.fixed_members():
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.dispatcher.pause(), deadline_s)
                timeout_error = ReplicaDead(f"its pass did not end within {deadline_s:g} s before a weight update")
                for slot, replica in self.replicas.live():
                    if slot.num_requests:
                        self.replicas.report_failure(slot, replica, timeout_error)
                yield
            finally:
                self.dispatcher.resume()

    async def apply_update(self, manifest: Manifest, *, verify: bool = False, deadline_s: float = 120.0) -> list[SyncReport]:
        """Update all replicas with an older version to the version of `manifest`, and resume serving. Call it in `quiesce`.

        A replica that dies is restarted with that version. Raises SyncError if a replica refuses the update and keeps its old weights.
        """
        try:
            reports = await self.replicas.apply_update(
                lambda replica: cancel_on_error(manifest, update_target(replica, manifest, verify=verify, deadline_s=deadline_s)),
                condition=lambda replica: replica.version < manifest.version,
            )
            self.version = manifest.version
            self.counters.updates += 1
        finally:
            stall = self.dispatcher.resume()
        return [replace(report, stall_seconds=stall) for report in reports]

    async def update(self, manifest: Manifest, *, verify: bool = False, deadline_s: float = 120.0) -> list[SyncReport]:
        """`quiesce` and `apply_update`."""
        async with self.quiesce(deadline_s):
            return await self.apply_update(manifest, verify=verify, deadline_s=deadline_s)

    def rank_names(self, version: int, num_ranks: int) -> list[str]:
        """Unique names of all ranks that need `version`, `num_ranks` per live replica.

        Within a `quiesce` block, `apply_update` updates exactly these replicas.
        """
        return self.replicas.rank_names("log-prob", num_ranks, lambda replica: replica.version < version)

    def health(self) -> list[dict[str, object]]:
        """One entry per replica: whether it serves, its weight versions, and the reason if it does not serve."""
        return [
            {
                "replica": slot.index,
                "alive": slot.replica is not None,
                "versions": slot.replica.versions if slot.replica is not None else [],
                "state": slot.state,
                "reason": slot.reason if slot.replica is None else "",
            }
            for slot in self.replicas.slots
        ]

    async def watch(self, every_s: float = 5.0) -> None:
        """Ping idle replicas, so that a dead one is replaced before it is needed. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            for slot, replica in self.replicas.live():
                if slot.num_requests == 0 and not self.replicas.updating.locked():
                    await self.dispatcher.check_alive(slot, replica)

    async def close(self) -> None:
        """End all replicas, and fail queued requests."""
        self.dispatcher.close()
        await self.replicas.close()


ATTEMPTS = 2
"""Maximum number of times that a run sends a sample to the server. A sample is sent again if its answer is late."""
MAX_ANSWER_S = 600.0


def answer_deadline(cluster: ClusterConfig) -> float:
    """Deadline of one answer in a run, in seconds. All attempts of a sample end before the run stops waiting for its batch.

    A replica that takes longer for one batch counts as hanging, because its answers would be too late and it would delay weight updates.
    """
    return min(MAX_ANSWER_S, cluster.step_deadline_s / (ATTEMPTS + 1))


ROLE_NAMES = {"logprob": "log-prob", "teacher": "teacher"}
"""Names of replicas by role."""


async def start_server(
    recipe: Recipe,
    model: Path,
    *,
    device: Literal["cpu", "cuda"],
    cpus: float,
    gpus: float,
    bundles: Bundles | None = None,
    store: PublishedVersions | None = None,
    checkpoint: Path | None = None,
    version: int = 0,
    role: Literal["logprob", "teacher"] = "logprob",
    log: Log = no_log,
) -> LogprobServer:
    """Start the replicas of `recipe.logprob` with version `version` of the weights, from the folder `model` or a checkpoint of the model.

    `cpus`, `gpus`: per rank. `bundles`: the reserved bundles of the ranks; if None, Ray chooses. `store`, `log`: see
    `LogprobServer.start`. Log lines begin with the replicas' role.
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
        # Only a checkpoint has separate adapters: weights that are sent are merged by the sender or on arrival.
        lora=None if checkpoint is None else recipe.train.lora,
        version=version,
        numerics=recipe.numerics if role == "logprob" else "default",
    )

    async def start(index: int) -> Replica:
        # The deadline also applies to restarts: after the loss of a host, the cluster may lack the resources for them.
        name = f"{ROLE_NAMES[role]} replica {index}"
        return await await_start(start_ranks(index, name), recipe.cluster.actor_deadline_s, name)

    async def start_ranks(index: int, name: str) -> Replica:
        default_options: Options = {"num_cpus": cpus, "num_gpus": gpus}
        ranks = [f"{role}-{index}" + (f".{rank}" if rank else "") for rank in range(options.parallel.world_size)]
        reserved = None if bundles is None else await bundles.acquire(*ranks)
        replica = await start_replica(
            config, name=name, options=[bundle.options() for bundle in reserved] if reserved else [default_options] * len(ranks)
        )
        if bundles is not None:
            for rank, location in zip(ranks, await replica.locations(), strict=True):
                bundles.check(rank, location)
        return replica

    limits = ServerLimits(
        options.tokens_per_batch,
        options.queue_tokens,
        batch_deadline_s=answer_deadline(recipe.cluster),
        max_restarts=options.max_restarts,
        sync_deadline_s=recipe.sync.deadline_s,
    )
    return await LogprobServer.start(start, options.replicas, limits, store=store, log=lambda line: log(f"{ROLE_NAMES[role]} {line}"))
