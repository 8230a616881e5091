"""A log-prob replica: its ranks, called together, as a target of weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Protocol, cast

from mtpctl.cluster.bundles import ActorLocation, Options
from mtpctl.cluster.process import make_log_name_variables
from mtpctl.logprob.protocol import Bounds, ReplicaDead, Scored, ScoreRequest
from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import Manifest, Section, TargetDirty

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

RANK_DEADLINE_S = 10.0
"""Deadline for a rank to end, and to answer a ping, in seconds."""


class Ranks(Protocol):
    def call[**P, T](self, method: Callable[Concatenate[Any, P], T], *args: P.args, **_: P.kwargs) -> Awaitable[T]:
        """Call a method of `ScoreRank` on every rank, in the same order on all. Awaiting it returns rank 0's answer.

        Raises ReplicaDead if a rank has died, otherwise the error of a rank.
        """
        ...

    async def locations(self) -> list[ActorLocation]:
        """Location of each rank."""
        ...

    async def end(self) -> None:
        """Kill the processes of all ranks."""
        ...


class Replica:
    """A `WeightTarget` that scores. `versions`: those of its ranks, which are read from them after an abort."""

    def __init__(self, ranks: Ranks, bounds: Bounds, version: int, *, keep_previous: bool, name: str = "log-prob replica") -> None:
        self.ranks, self.bounds, self.name = ranks, bounds, name
        self.keep_previous = keep_previous
        self.versions = [version]
        self._incoming: Manifest | None = None
        self._missing_sections: set[str] = set()
        self._dirty = False

    @property
    def version(self) -> int:
        return self.versions[0]

    def score(self, requests: list[ScoreRequest], version: int) -> Awaitable[list[Scored]]:
        """Score a batch with weight version `version`. Batches run one after another, in the order of the calls.

        Awaiting it raises TargetDirty if the weights differ from those that were sent.
        """
        # Ranks other than 0 return None; `call` returns the scores of rank 0.
        return self._refuse() if self._dirty else cast("Awaitable[list[Scored]]", self.ranks.call(ScoreRank.score, requests, version))

    async def _refuse(self) -> list[Scored]:
        raise TargetDirty(f"{self.name}: its weights differ from those that were sent")

    async def ping(self) -> None:
        """Wait until all earlier calls are done. Raises ReplicaDead if the replica has died."""
        await self.ranks.call(ScoreRank.ping)

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        await self.ranks.call(ScoreRank.begin_update, plan.to_dict(), version, section)
        if self._incoming is None:
            self._incoming, self._missing_sections = plan, set(plan.sections)
            # The ranks write the update into the tensors of the previous version.
            self.versions = self.versions[:1]
        self._section = section

    async def receive(self, *buckets: Bucket) -> None:
        await self.ranks.call(ScoreRank.receive, *(bucket.index for bucket in buckets))

    async def finish_update(self) -> None:
        """See `WeightTarget`. The last section of the manifest makes the version current."""
        await self.ranks.call(ScoreRank.finish_update)
        self._missing_sections.discard(self._section)
        if self._incoming is not None and not self._missing_sections:
            self.versions = [self._incoming.version, *(self.versions if self.keep_previous else [])]
            self._incoming = None

    async def abort_update(self) -> None:
        self._incoming = None
        # A call that was cancelled has continued on the ranks, so they may have completed the version.
        self.versions = await self.ranks.call(ScoreRank.abort_update)

    async def checksums(self, *sections: Section) -> dict[str, str]:
        """Checksums of all tensors by wire name. `sections` is ignored, because an adapter is merged into weights of another section."""
        return await self.ranks.call(ScoreRank.checksums)

    def mark_dirty(self) -> None:
        self._dirty = True

    async def locations(self) -> list[ActorLocation]:
        return await self.ranks.locations()

    async def end(self) -> None:
        await self.ranks.end()


class RayRanks:
    """`ScoreRank`s as Ray actors."""

    def __init__(self, handles: list[ActorHandle[ScoreRank]], name: str) -> None:
        self.handles, self.name = handles, name

    def call[**P, T](self, method: Callable[Concatenate[Any, P], T], *args: P.args, **_: P.kwargs) -> Awaitable[T]:
        # Calls are submitted immediately, not when the result is awaited, so that all ranks get them in the same order.
        refs = [getattr(handle, method.__name__).remote(*args) for handle in self.handles]
        return self._answers(refs)

    async def locations(self) -> list[ActorLocation]:
        return list(await asyncio.gather(*(self._answers([handle.location.remote()]) for handle in self.handles)))

    async def _answers(self, refs: list[ObjectRef[Any]]) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        async def wait_for(ref: ObjectRef[Any]) -> Any:
            return await ref

        try:
            # Raises as soon as one rank has died, even if the calls of the other ranks hang because they wait for it.
            return (await asyncio.gather(*map(wait_for, refs)))[0]
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise ReplicaDead(f"{self.name}: {str(error).strip().splitlines()[0]}") from error

    async def end(self) -> None:
        import ray

        for handle in self.handles:
            ray.kill(handle)


async def start_replica(config: ReplicaConfig, *, name: str, options: Sequence[Options], kind: type[ScoreRank] = ScoreRank) -> Replica:
    """Start a replica's ranks as Ray actors of `kind`, and return once they can score.

    `options`: Ray's options of each rank. Raises the errors of loading the model.
    """
    import ray

    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}

    def start_actor(rank: int) -> ActorHandle[ScoreRank]:
        environment = {"env_vars": threads | make_log_name_variables(f"{name} rank {rank}")}
        actor = ray.remote(kind).options(runtime_env=environment, **options[rank])
        return cast("ActorHandle[ScoreRank]", actor.remote(config, rank))

    handles = [start_actor(rank) for rank in range(config.parallel.world_size)]
    ranks = RayRanks(handles, name)
    try:
        master = await ranks.call(ScoreRank.address)
        bounds = await ranks.call(ScoreRank.build, master)
    except BaseException:
        await ranks.end()
        raise
    return Replica(ranks, bounds, config.version, keep_previous=config.keep_previous, name=name)
