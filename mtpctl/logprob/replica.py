"""A log-prob replica as the server sees it: its ranks, called together, and the way in for new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from mtpctl.logprob.protocol import Bounds, ReplicaDead, Scored, ScoreRequest
from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import Section, TargetDirty

END_S = 10.0
"""Seconds in which a rank that was told to end must be gone."""


class Ranks(Protocol):
    """The ranks of one replica."""

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """Send `method` of `ScoreRank` to every rank, at once and in the order of calls; awaited, it gives rank 0's answer.

        Raises ReplicaDead where a rank is gone, else what a rank raises.
        """
        ...

    async def end(self) -> None:
        """End every rank's process, whatever it does."""
        ...


class Replica:
    """A `WeightTarget` that scores. Versions are kept here as well, so that the server need not ask for them."""

    def __init__(self, ranks: Ranks, bounds: Bounds, version: int, *, keep_previous: bool, name: str = "log-prob replica") -> None:
        self.ranks, self.bounds, self.name = ranks, bounds, name
        self.keep_previous = keep_previous
        self.versions = [version]
        self._incoming: Manifest | None = None
        self._left: set[str] = set()
        self._distrusted = False

    @property
    def version(self) -> int:
        """The current version."""
        return self.versions[0]

    def score(self, requests: list[ScoreRequest], version: int) -> Awaitable[list[Scored]]:
        """See `ScoreRank.score`. Calls run one after another, in the order in which they are made.

        Awaited, raises TargetDirty where its weights are not what was sent.
        """
        return self._untrusted() if self._distrusted else self.ranks.call("score", requests, version)

    async def _untrusted(self) -> list[Scored]:
        raise TargetDirty(f"{self.name}: its weights are not what was sent")

    async def ping(self) -> None:
        """Return once the replica has nothing before this to do. Raises ReplicaDead where it is gone."""
        await self.ranks.call("ping")

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """See `WeightTarget`."""
        await self.ranks.call("begin_update", plan.to_dict(), version, section)
        if self._incoming is None:
            self._incoming, self._left = plan, set(plan.sections)
            self.versions = self.versions[:1]
        self._section = section

    async def receive(self, *buckets: Bucket) -> None:
        """See `WeightTarget`."""
        await self.ranks.call("receive", *(bucket.index for bucket in buckets))

    async def finish_update(self) -> None:
        """See `WeightTarget`. The last section makes the version current."""
        await self.ranks.call("finish_update")
        self._left.discard(self._section)
        if self._incoming is not None and not self._left:
            self.versions = [self._incoming.version, *(self.versions if self.keep_previous else [])]
            self._incoming = None

    async def abort_update(self) -> None:
        """See `WeightTarget`."""
        self._incoming = None
        await self.ranks.call("abort_update")

    async def checksums(self) -> dict[str, str]:
        """See `WeightTarget`: of every tensor, also those that no update brought."""
        found: dict[str, str] = await self.ranks.call("checksums")
        return found

    def distrust(self) -> None:
        """See `WeightTarget`."""
        self._distrusted = True

    async def end(self) -> None:
        """End the replica's processes."""
        await self.ranks.end()


class RayRanks:
    """`ScoreRank`s as Ray actors."""

    def __init__(self, handles: list[Any], name: str) -> None:
        self.handles, self.name = handles, name

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """See `Ranks.call`."""
        # Submitted here and not when awaited: every rank sees the calls of this process in one order.
        refs = [getattr(handle, method).remote(*args) for handle in self.handles]
        return self._answers(refs)

    async def _answers(self, refs: list[Any]) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        async def one(ref: Any) -> Any:
            return await ref

        try:
            # Not gathered with its exceptions: one rank's death is known while the others still wait for it.
            return (await asyncio.gather(*map(one, refs)))[0]
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise ReplicaDead(f"{self.name}: {str(error).strip().splitlines()[0]}") from error

    async def end(self) -> None:
        """See `Ranks.end`."""
        import ray

        for handle in self.handles:
            ray.kill(handle)


async def start_replica(config: ReplicaConfig, *, name: str, cpus: float, gpus: float, kind: type[ScoreRank] = ScoreRank) -> Replica:
    """Start a replica's ranks as Ray actors of `kind`, each with `cpus` and `gpus`, and return once they can score.

    Raises what loading the model raises.
    """
    import ray

    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    actor = ray.remote(kind).options(num_cpus=cpus, num_gpus=gpus, runtime_env={"env_vars": threads})
    handles = [actor.remote(config, rank) for rank in range(config.parallel.world_size)]
    ranks = RayRanks(handles, name)
    try:
        master = await ranks.call("address")
        bounds = await ranks.call("build", master)
    except BaseException:
        await ranks.end()
        raise
    return Replica(ranks, bounds, config.version, keep_previous=config.keep_previous, name=name)
