"""The trainer's weights to everyone who needs them: one version, all sections, generators and log-prob replicas together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from mtpctl.controller.trainers import TrainerGroup
from mtpctl.logprob.server import LogprobServer
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import PauseMode, Section, SyncError
from mtpctl.sync.session import SyncReport
from mtpctl.sync.transports.base import PUSHED, Sent


class WeightSync:
    """Call it with a version. `last` is the manifest sent last, `sent` what its sender says, `reports` what its receivers say."""

    def __init__(self, recipe: Recipe, trainer: TrainerGroup, rollout: ReplicaPool, server: LogprobServer | None, store: Path) -> None:
        self.recipe, self.trainer, self.rollout, self.server, self.store = recipe, trainer, rollout, server, store
        self.last: Manifest | None = None
        self.sent = Sent()
        self.reports: list[SyncReport] = []
        self._keeping: asyncio.Task[None] | None = None

    async def __call__(self, version: int, *, verify: bool | None = None) -> dict[str, float]:
        """Take every target to `version`. Returns `sync/*`.

        `verify`: compare the checksums of every tensor on both ends; default as `sync.verify` says. Raises SyncError where a
        target refuses: it, and those that had not yet taken the version, go on with the one before.
        """
        began = time.perf_counter()
        options = self.recipe.sync
        if verify is None:
            verify = options.verify == "always" or (options.verify == "first" and self.last is None)
        if options.transport in PUSHED:
            manifest, publishing = await self._push(version, verify)
        else:
            manifest = await self.trainer.call("publish", version, str(self.store), verify, self._sections())
            publishing = time.perf_counter() - began
            async with self._standing():
                ready = time.perf_counter()
                await self._receive(manifest, verify)
                self.sent = Sent(manifest.nbytes, time.perf_counter() - ready)
        self.last = manifest
        seconds = time.perf_counter() - began
        compared = {"sync/verified": float(min((report.verified for report in self.reports), default=0))} if verify else {}
        return compared | {
            "sync/seconds": seconds,
            "sync/publish_seconds": publishing,
            "sync/stall_seconds": max((report.stall_seconds for report in self.reports), default=0.0),
            "sync/gb_per_s": manifest.nbytes / seconds / 1e9,
        }

    def _sections(self) -> tuple[Section, ...]:
        """What the next version moves. An adapter's base goes along once; receivers that come later have it from the model's folder.

        The adapter is first: one that an engine refuses has changed nothing.
        """
        moving = self.recipe.sync.sections
        if "adapter" not in moving:
            return tuple(moving)
        found: list[Section] = ["adapter", "target", "draft"]
        return tuple(name for name in found if name in moving or (name == "target" and self.last is None))

    @property
    def _pause(self) -> PauseMode:
        """Without partial rollouts no response spans two versions: those in flight end before the weights change."""
        return self.recipe.sync.pause if self.recipe.async_.partial_rollout else "wait"

    @contextlib.asynccontextmanager
    async def _standing(self) -> AsyncIterator[None]:
        """No replica comes, so that those who are named are those who meet; that, and responses that have to end, are waited for first.

        The log-prob server has done the passes that were under way, and begins none: what engines pause for must not wait for those.
        """
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.rollout.standing(self._pause))
            if self.server is not None:
                await stack.enter_async_context(self.server.standing(self.recipe.sync.deadline_s))
            yield

    async def _push(self, version: int, verify: bool) -> tuple[Manifest, float]:
        """The manifest, and the seconds that announcing took. The store's copy is made when generation goes on already."""
        await self.kept()
        try:
            return await self._announce_and_send(version, verify)
        except SyncError:
            # Once more, with the receivers that are left: one that died is being replaced meanwhile.
            return await self._announce_and_send(version, verify)

    async def _announce_and_send(self, version: int, verify: bool) -> tuple[Manifest, float]:
        async with self._standing():
            began = time.perf_counter()
            members = self.rollout.members(self.recipe.rollout.tp)
            if self.server is not None:
                members += self.server.members(version, self.recipe.logprob.parallel.world_size)
            manifest = await self.trainer.call("announce", version, str(self.store), members, verify, self._sections())
            announcing = time.perf_counter() - began
            sending = asyncio.create_task(self.trainer.call("send"))
            try:
                await self._receive(manifest, verify)
                self.sent = await sending
            finally:
                await asyncio.gather(sending, return_exceptions=True)
        self._keeping = asyncio.create_task(self.trainer.call("keep"))
        return manifest, announcing

    async def _receive(self, manifest: Manifest, verify: bool) -> None:
        options = self.recipe.sync
        updates = [self.rollout.take_in(manifest, mode=self._pause, verify=verify, deadline_s=options.deadline_s)]
        if self.server is not None:
            updates.append(self.server.take_in(manifest, verify=verify, deadline_s=options.deadline_s))
        # All of them end before any error is told: a transfer that is tried again must find nobody in the one before.
        found = await asyncio.gather(*updates, return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        self.reports = found[0]  # type: ignore[assignment]

    async def kept(self) -> None:
        """Return once the trainer has copied the version sent last for the store. Raises what keeping it raised."""
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            await keeping
