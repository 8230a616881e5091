"""Syncs weight versions from the trainer to all targets, and detects a collapse of draft acceptance after a sync."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from mtpctl.recipe.numerics import sends_unquantized_too
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Sample
from mtpctl.sync.protocol import Manifest, PauseMode, Section, SyncError
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import Generators, LogprobReplicas, Parties, SyncReport, Trainer, WeightUpdate

WINDOW_DRAFTS = 200
MEAN_WINDOWS = 10
COLLAPSE_RATIO = 0.5
MIN_ACCEPTED = 20
"""A collapse is reported only if the running mean amounts to at least this number of accepted drafts per window."""


class WeightSync:
    """Publishes versions of the trainer's weights. `last_update`: the latest update, None before the first."""

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
        # With quantized engines, the log-prob server gets the unquantized weights, in a separate update.
        self._logprob_parties: Parties | None = None
        self._logprob_version = 0
        if server is not None and sends_unquantized_too(recipe):
            self.parties = Parties(recipe, trainer, rollout, None, store)
            self._logprob_parties = Parties(recipe, trainer, _NoEngines(), server, VersionStore(store).for_logprob(recipe).root)
        self.last_update: WeightUpdate | None = None
        self._metrics = metrics
        self._persist_task: asyncio.Task[None] | None = None

    async def __call__(self, version: int, *, verify: bool | None = None) -> dict[str, float]:
        """Update every target to `version`. Returns `sync/*`, and the result of `metrics`. Raises the errors of `WeightUpdate.run`.

        `verify`: compare the checksums of every sent tensor on both ends; by default as `sync.verify` configures. A failed push is retried
        once.
        """
        started_at = time.perf_counter()
        if verify is None:
            verify_option = self.parties.recipe.sync.verify
            verify = verify_option == "always" or (verify_option == "first" and self.last_update is None)
        await self.wait_copied()
        logprob_bytes = 0
        if self._logprob_parties is not None and self._logprob_version != version:
            # The log-prob server is updated before the engines, so that no sample is scored with older weights than it was generated with.
            logprob_update = await self._run(self._logprob_parties, version, verify=verify)
            await logprob_update.persist()
            self._logprob_version, logprob_bytes = version, logprob_update.manifest.nbytes
        update = await self._run(self.parties, version, verify=verify)
        self._persist_task = asyncio.create_task(update.persist())
        self.last_update = update
        seconds = time.perf_counter() - started_at
        verified_metrics = {"sync/verified": float(min((report.verified for report in update.reports), default=0))} if verify else {}
        return (
            verified_metrics
            | {
                "sync/seconds": seconds,
                "sync/publish_seconds": update.plan_seconds,
                "sync/stall_seconds": max((report.stall_seconds for report in update.reports), default=0.0),
                "sync/gb_per_s": (logprob_bytes + update.manifest.nbytes) / seconds / 1e9,
            }
            | _compute_changed_shares(update.manifest)
            | self._metrics()
        )

    async def _run(self, parties: Parties, version: int, *, verify: bool) -> WeightUpdate:
        update = WeightUpdate(parties, version, self._sections(), verify=verify)
        try:
            await update.run()
        except SyncError:
            if not update.is_push:
                raise
            # The retry excludes a receiver that died; it is replaced concurrently.
            update = WeightUpdate(parties, version, self._sections(), verify=verify)
            await update.run()
        return update

    def _sections(self) -> tuple[Section, ...]:
        """The sections of the next version, the adapter first.

        With an adapter, the base weights (`target`) are sent only in the trainer's first version. A replica that starts afterwards reads
        them from the model's folder.
        """
        sections = self.parties.recipe.sync.sections
        if "adapter" not in sections:
            return tuple(sections)
        section_order: list[Section] = ["adapter", "target", "draft"]
        return tuple(name for name in section_order if name in sections or (name == "target" and self.last_update is None))

    async def reset(self) -> None:
        """Reset after the loss of the trainer. The next version is the first of the new trainer, and contains every section."""
        persist_task, self._persist_task, self.last_update, self._logprob_version = self._persist_task, None, None, 0
        if persist_task is not None:
            persist_task.cancel()
            await asyncio.gather(persist_task, return_exceptions=True)

    async def wait_copied(self) -> None:
        """Wait until the trainer has copied the latest pushed version into host memory. A thread of the trainer writes it to the store.

        Raises an error of this copy, or of writing the previous version.
        """
        if self._persist_task is not None:
            persist_task, self._persist_task = self._persist_task, None
            await persist_task


class _NoEngines:
    """Stands in for the engines in an update that only the log-prob server receives."""

    def quiesce(self, mode: PauseMode) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def rank_names(self, num_ranks: int) -> list[str]:
        return []

    async def apply_update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        return []


def _compute_changed_shares(manifest: Manifest) -> dict[str, float]:
    """The share of elements that changed since the previous version, overall and by section; empty if the sender did not compare them."""
    counts = {name: (plan.num_changed, plan.numel) for name, plan in manifest.sections.items() if plan.num_changed is not None}
    if not counts:
        return {}
    all_changed, all_elements = (sum(column) for column in zip(*counts.values(), strict=True))
    return {"sync/changed_share": all_changed / all_elements} | {
        f"sync/changed_share_{name}": num_changed / num_elements for name, (num_changed, num_elements) in counts.items()
    }


@dataclass(frozen=True, slots=True)
class Collapse:
    """A collapse of draft acceptance: the acceptance in the first window of `version`, and the running mean before it."""

    version: int
    acceptance: float
    earlier_mean: float

    def __str__(self) -> str:
        return (
            f"draft acceptance fell to {self.acceptance:.1%} over the {WINDOW_DRAFTS} drafts after the sync of version {self.version}, "
            f"from {self.earlier_mean:.1%} before: the drafter's weights may not be the trainer's; set sync.verify: always to compare them"
        )


class AcceptanceWatch:
    """Compares the first window of `WINDOW_DRAFTS` drafts after each sync with the mean of the last `MEAN_WINDOWS` windows.

    A collapse is a first window with an acceptance below half of the mean. Drafts of wrong weights (such as mixed-up tensors) are almost
    always rejected, but a drafter that is one version old may lose too little to be detected.
    """

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=MEAN_WINDOWS)
        self._version = 0
        self._is_checked = True
        self._drafted = self._accepted = 0

    @property
    def mean(self) -> float:
        """The running mean; 0 before the first window."""
        return sum(self._windows) / len(self._windows) if self._windows else 0.0

    def begin_version(self, version: int) -> None:
        """Start the first window of `version`, which is now live."""
        self._version, self._is_checked = version, False
        self._drafted = self._accepted = 0

    def observe(self, sample: Sample) -> Collapse | None:
        """Count a sample if the live version generated most of its tokens. Returns a collapse at the end of a version's first window."""
        new_tokens = sum(span.end - span.start for span in sample.version_spans if span.version >= self._version)
        if 2 * new_tokens <= len(sample.response_ids):
            return None
        self._drafted += sample.speculation.drafted
        self._accepted += sample.speculation.accepted
        if self._drafted < WINDOW_DRAFTS:
            return None
        acceptance, earlier_mean = self._accepted / self._drafted, self.mean
        was_checked, self._is_checked = self._is_checked, True
        self._drafted = self._accepted = 0
        if not was_checked and earlier_mean * WINDOW_DRAFTS >= MIN_ACCEPTED and acceptance < COLLAPSE_RATIO * earlier_mean:
            return Collapse(self._version, acceptance, earlier_mean)
        self._windows.append(acceptance)
        return None
