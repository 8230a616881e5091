"""Syncs weight versions from the trainer to all targets, one `WeightUpdate` after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Section, SyncError
from mtpctl.sync.update import Generators, LogprobReplicas, Parties, Trainer, WeightUpdate


class WeightSync:
    """Publishes versions of the trainer's weights. `last`: the latest update, None before the first."""

    def __init__(
        self,
        recipe: Recipe,
        trainer: Trainer,
        rollout: Generators,
        server: LogprobReplicas | None,
        store: Path,
        *,
        metrics: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.parties = Parties(recipe, trainer, rollout, server, store)
        self.last: WeightUpdate | None = None
        self._metrics = metrics
        self._persisting: asyncio.Task[None] | None = None

    async def __call__(self, version: int, *, verify: bool | None = None) -> dict[str, float]:
        """Update every target to `version`. Returns `sync/*`, and the result of `metrics`.

        `verify`: compare the checksums of every tensor on both ends; default: as `sync.verify`. Raises as `WeightUpdate.run`, for a pushed
        version after a second attempt.
        """
        began = time.perf_counter()
        if verify is None:
            option = self.parties.recipe.sync.verify
            verify = option == "always" or (option == "first" and self.last is None)
        await self.persisted()
        update = WeightUpdate(self.parties, version, self._sections(), verify=verify)
        try:
            await update.run()
        except SyncError:
            if not update.pushed:
                raise
            # Try again with the remaining receivers, while one that died is replaced.
            update = WeightUpdate(self.parties, version, self._sections(), verify=verify)
            await update.run()
        self._persisting = asyncio.create_task(update.persist())
        self.last = update
        seconds = time.perf_counter() - began
        verified = {"sync/verified": float(min((report.verified for report in update.reports), default=0))} if verify else {}
        return (
            verified
            | {
                "sync/seconds": seconds,
                "sync/publish_seconds": update.plan_seconds,
                "sync/stall_seconds": max((report.stall_seconds for report in update.reports), default=0.0),
                "sync/gb_per_s": update.manifest.nbytes / seconds / 1e9,
            }
            | self._metrics()
        )

    def _sections(self) -> tuple[Section, ...]:
        """The sections of the next version. An adapter's base weights are sent once; later replicas read them from the model's folder.

        The adapter is first: an engine that rejects it is unchanged.
        """
        sections = self.parties.recipe.sync.sections
        if "adapter" not in sections:
            return tuple(sections)
        order: list[Section] = ["adapter", "target", "draft"]
        return tuple(name for name in order if name in sections or (name == "target" and self.last is None))

    async def forget(self) -> None:
        """Forget a lost trainer: the next version is the first of its successor, and has every section."""
        persisting, self._persisting, self.last = self._persisting, None, None
        if persisting is not None:
            persisting.cancel()
            await asyncio.gather(persisting, return_exceptions=True)

    async def persisted(self) -> None:
        """Wait until the trainer has copied the latest version for the store. Raises the error of copying."""
        if self._persisting is not None:
            persisting, self._persisting = self._persisting, None
            await persisting
