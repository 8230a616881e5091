"""When and what the trainer sends: one version after the other, each by a `WeightUpdate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Section, SyncError
from mtpctl.sync.update import Generators, LogprobReplicas, Parties, Trainer, WeightUpdate


class WeightSync:
    """Call it with a version. `last` is the update made last, None before the first.

    `metrics`: called after each update, for metrics of what stood beside it.
    """

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
        """Take every target to `version`. Returns `sync/*`.

        `verify`: compare the checksums of every tensor on both ends; default as `sync.verify` says. Raises what `WeightUpdate.run`
        raises; a pushed version is tried twice before.
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
            # Once more, with the receivers that are left: one that died is being replaced meanwhile.
            update = WeightUpdate(self.parties, version, self._sections(), verify=verify)
            await update.run()
        self._persisting = asyncio.create_task(update.persist())
        self.last = update
        seconds = time.perf_counter() - began
        compared = {"sync/verified": float(min((report.verified for report in update.reports), default=0))} if verify else {}
        return (
            compared
            | {
                "sync/seconds": seconds,
                "sync/publish_seconds": update.plan_seconds,
                "sync/stall_seconds": max((report.stall_seconds for report in update.reports), default=0.0),
                "sync/gb_per_s": update.manifest.nbytes / seconds / 1e9,
            }
            | self._metrics()
        )

    def _sections(self) -> tuple[Section, ...]:
        """What the next version moves. An adapter's base weights go along once; later replicas read them from the model's folder.

        The adapter is first: an engine that refuses it has changed nothing.
        """
        wanted = self.parties.recipe.sync.sections
        if "adapter" not in wanted:
            return tuple(wanted)
        order: list[Section] = ["adapter", "target", "draft"]
        return tuple(name for name in order if name in wanted or (name == "target" and self.last is None))

    async def forget(self) -> None:
        """Forget the trainer that was lost: the next version is the first of another one, and has every section."""
        persisting, self._persisting, self.last = self._persisting, None, None
        if persisting is not None:
            persisting.cancel()
            await asyncio.gather(persisting, return_exceptions=True)

    async def persisted(self) -> None:
        """Return once the trainer has copied the last version for the store. Raises what copying it raised."""
        if self._persisting is not None:
            persisting, self._persisting = self._persisting, None
            await persisting
