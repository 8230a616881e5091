"""One weight update: transfers a version from the trainer to every generator and log-prob replica.

    state      trainer's side                                   each target's side
    ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
               RlStage.publish
               └ WeightSync: selects the sections,
                 retries after a receiver failed
                 └ WeightUpdate ───────────────────────────────► ReplicaPool, LogprobServer: quiesce
                   │ Ray, all ranks                              │ Ray, all replicas
                   └ TrainerRank (a WeightExporter)                └ Engine, Replica: pause
                     └ Sender or Publisher                         └ update_target: section after section
                       └ BucketWriter                                ├ EngineTarget ► receiver in each worker (engine)
                                                                     └ ScoreRank in each rank (log-prob)
    plan       export once to plan the buckets;
               describe them in a Manifest              ──────►  begin_update: check names, shapes, version
    transfer   export, pack                             ══════►  receive: buckets into live parameters (log-prob
                                                                 replicas with two weight sets: into the spare one)
    commit     wait for every target                    ◄──────  finish_update: the last section makes the version
                                                                 live; verify; resume
    persist    export into host memory; threads write            a replica that starts later is updated from the
               that copy to the VersionStore                     store in the same way

`ipc` and `nccl` push: the plan names the receivers, so it is made after they have quiesced. With `shm` and `storage` the plan stores or
uploads the buckets while generation continues, receivers read them later, and nothing is left to persist.

A version is atomic in each target. An engine is paused from before its first section until after its last, so no token is sampled between
target n+1 and drafter n. A target that fails returns to the previous version, or stops serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mtpctl.recipe.sync import PUSH_TRANSPORTS
from mtpctl.sync.protocol import Manifest, PauseMode, Section, SyncError, TargetDirty, WeightsDiffer, WeightTarget
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import TransferStats, cancel

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of an update of one target.

    `seconds`: total; `stall_seconds`: from pause to resume; `verified`: compared tensors; `phases`: seconds of each phase, in order.
    """

    version: int
    nbytes: int
    seconds: float
    stall_seconds: float = 0.0
    verified: int = 0
    phases: dict[str, float] = field(default_factory=dict)


def check_checksums(manifest: Manifest, actual: dict[str, str], sections: Collection[str] = ("target", "draft", "adapter")) -> int:
    """Compare a target's checksums with the sender's, for these sections. Returns the number of tensors.

    Raises WeightsDiffer with the tensors that differ or are missing, and SyncError if the publisher computed no checksums.
    """
    published = _published_checksums(manifest, sections)
    differing = [name for name, value in published.items() if actual.get(name) != value]
    if differing:
        raise WeightsDiffer(f"after the sync to version {manifest.version} these tensors differ from what was sent: {', '.join(differing)}")
    return len(published)


def _published_checksums(manifest: Manifest, sections: Collection[str]) -> dict[str, str]:
    sums = {name: value for section, plan in manifest.sections.items() if section in sections for name, value in plan.checksums.items()}
    if not sums:
        raise SyncError(f"version {manifest.version} was published without checksums to compare with")
    return sums


async def cancel_on_error[T](manifest: Manifest, update: Awaitable[T]) -> T:
    """Await a target's update. If it fails, the transfer is cancelled for all receivers, which would otherwise wait."""
    try:
        return await update
    except BaseException as error:
        await asyncio.to_thread(cancel, manifest, f"a receiver of the weights gave up: {error}")
        raise


def manifests_to(manifest: Manifest, live: int) -> list[Manifest]:
    """The versions to apply to a target with version `live`: this one, preceded by the base versions that it needs."""
    if manifest.base is None or live in (manifest.base, manifest.version) or manifest.transport in PUSH_TRANSPORTS:
        return [manifest]
    return VersionStore(manifest.store).chain(manifest.version, live)


async def update_target(
    target: WeightTarget,
    manifest: Manifest,
    *,
    verify: bool = False,
    deadline_s: float = 120.0,
    sections: Collection[Section] = ("target", "draft", "adapter"),
) -> SyncReport:
    """Update `target` to the version of `manifest`, or restore its previous version.

    If the target generates, the caller must pause it first. Any error aborts the update, as does a duration above `deadline_s`. Restoring
    the previous version may take another `deadline_s`. `sections`: the sections whose checksums the target returns, for `verify`.

    If `manifest` is a delta whose base is not live, earlier versions are applied first, from the store: the deltas since the live version,
    or a complete version and the deltas after it. If the delta is pushed, the target refuses it instead.

    Raises:
        SyncError: the previous version is live again.
        TargetDirty: the previous version could not be restored.
        WeightsDiffer: with `verify`, the new version is live but differs from what was sent. The target stops serving.
    """
    started = time.monotonic()
    if verify:
        _published_checksums(manifest, sections)

    *earlier_versions, manifest = manifests_to(manifest, target.version)
    for earlier in earlier_versions:
        await update_target(target, earlier, deadline_s=deadline_s, sections=sections)

    async def before_deadline[T](step: Awaitable[T]) -> T:
        return await asyncio.wait_for(step, deadline_s - (time.monotonic() - started))

    phases: dict[str, float] = {}

    async def timed(phase: str, step: Awaitable[None]) -> None:
        began = time.monotonic()
        await before_deadline(step)
        phases[phase] = time.monotonic() - began

    try:
        for name, section in manifest.sections.items():
            await timed(f"begin {name}", target.begin_update(manifest, manifest.version, name))
            if section.wire_buckets:
                await timed(f"receive {name}", target.receive(*section.wire_buckets))
            await timed(f"finish {name}", target.finish_update())
    except BaseException as error:
        try:
            await asyncio.wait_for(target.abort_update(), deadline_s)
        except (TimeoutError, asyncio.CancelledError) as abort_error:
            # The weights of the target may be a mix of two versions.
            target.mark_dirty()
            if isinstance(abort_error, asyncio.CancelledError):
                raise
            raise TargetDirty(
                f"the sync to version {manifest.version} failed, and aborting it took longer than {deadline_s:g} s"
            ) from error
        except TargetDirty as dirty:
            raise TargetDirty(f"{dirty}, after {type(error).__name__}: {error}") from error
        if isinstance(error, TimeoutError):
            raise SyncError(f"the sync to version {manifest.version} took longer than sync.deadline_s = {deadline_s}") from error
        raise
    verified = 0
    if verify:
        # The update is live and can no longer be aborted.
        try:
            verified = check_checksums(manifest, await before_deadline(target.checksums(*manifest.sections)), sections)
        except BaseException as error:
            target.mark_dirty()
            if isinstance(error, TimeoutError):
                raise TargetDirty(f"version {manifest.version} could not be verified within sync.deadline_s = {deadline_s}") from error
            raise
    return SyncReport(manifest.version, manifest.nbytes, time.monotonic() - started, verified=verified, phases=phases)


class State(StrEnum):
    """The states of an update, in order."""

    PLAN = "plan"
    TRANSFER = "transfer"
    COMMIT = "commit"
    PERSIST = "persist"
    DONE = "done"


class Trainer(Protocol):
    """The trainer ranks. Each method calls the same method of `WeightExporter` on all ranks, and returns the result of rank 0."""

    async def plan_weights(
        self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]
    ) -> Manifest | None: ...

    async def transfer_weights(self) -> TransferStats | None: ...

    async def persist_weights(self) -> None: ...


class Generators(Protocol):
    """The engines: a `ReplicaPool`, or servers that are already running."""

    def quiesce(self, mode: PauseMode) -> AbstractAsyncContextManager[None]:
        """While the block runs, no engine joins, and with `wait` no response is in progress."""
        ...

    def rank_names(self, num_ranks: int) -> list[str]:
        """A name for each rank of each serving engine, which has `num_ranks` ranks; `apply_update` calls exactly these engines."""
        ...

    async def apply_update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        """Pause every engine, apply the update, resume. Raises SyncError if an engine refuses it and keeps its old weights."""
        ...


class LogprobReplicas(Protocol):
    """The replicas of a `LogprobServer`."""

    def quiesce(self, deadline_s: float) -> AbstractAsyncContextManager[None]:
        """While the block runs, no forward pass is in progress, and no replica joins."""
        ...

    def rank_names(self, version: int, num_ranks: int) -> list[str]:
        """A name for each rank of each replica without `version`. A replica has `num_ranks` ranks.

        `apply_update` calls exactly these replicas.
        """
        ...

    async def apply_update(self, manifest: Manifest, *, verify: bool, deadline_s: float) -> list[SyncReport]:
        """Apply the update to every replica without the version. Raises SyncError if a replica refuses it and keeps its old weights."""
        ...


@dataclass(frozen=True)
class Parties:
    """The participants in the updates of a run, and the version store's folder."""

    recipe: Recipe
    trainer: Trainer
    generators: Generators
    logprob: LogprobReplicas | None
    store: Path


class WeightUpdate:
    """Updates every target to `version`: first `run`, then `persist`.

    `manifest`: the plan. `sent`: the sender's result. `reports`: the engines' results.
    """

    manifest: Manifest

    def __init__(self, parties: Parties, version: int, sections: tuple[Section, ...], *, verify: bool) -> None:
        """`verify`: compare the checksums of every tensor on both ends."""
        self.parties, self.version, self.sections, self.verify = parties, version, sections, verify
        self.options = parties.recipe.sync
        self.is_push = self.options.transport in PUSH_TRANSPORTS
        # Without partial rollouts no response spans two versions: responses in flight end before the weights change.
        self.pause: PauseMode = self.options.pause if parties.recipe.async_.partial_rollout else "wait"
        self.state = State.PLAN
        self.sent = TransferStats()
        self.reports: list[SyncReport] = []
        self.plan_seconds = 0.0

    async def run(self) -> None:
        """Plan, transfer and commit. Raises SyncError if a target refuses; targets that did not commit keep the previous version."""
        if self.is_push:
            async with self._quiesced():
                await self.plan(self._rank_names())
                await self.transfer()
        else:
            await self.plan([])
            async with self._quiesced():
                await self.transfer()

    @contextlib.asynccontextmanager
    async def _quiesced(self) -> AsyncIterator[None]:
        """Keep the set of receivers fixed while the block runs.

        Generators quiesce first: with `wait` this can take long, and the log-prob server continues meanwhile.
        """
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.parties.generators.quiesce(self.pause))
            if self.parties.logprob is not None:
                await stack.enter_async_context(self.parties.logprob.quiesce(self.options.deadline_s))
            yield

    def _rank_names(self) -> list[str]:
        """The names of the receivers of a pushed version, one per rank."""
        recipe, logprob = self.parties.recipe, self.parties.logprob
        names = self.parties.generators.rank_names(recipe.rollout.tp)
        return names if logprob is None else names + logprob.rank_names(self.version, recipe.logprob.parallel.world_size)

    async def plan(self, members: list[str]) -> None:
        """Let the trainer plan the version for receivers of these names."""
        assert self.state is State.PLAN
        started_at = time.perf_counter()
        store = str(self.parties.store)
        manifest = await self.parties.trainer.plan_weights(self.version, store, members, self.verify, self.sections)
        assert manifest is not None, "rank 0 returns the manifest"
        self.manifest = manifest
        self.plan_seconds = time.perf_counter() - started_at

    async def transfer(self) -> None:
        """Transfer the buckets, and wait until every target has committed.

        Raises the error of a target. If the sender failed with an error other than SyncError, such as weights that are not finite, raises
        that error: it caused the targets' errors, and a second transfer would fail too.
        """
        assert self.state is State.PLAN
        self.state, started_at = State.TRANSFER, time.perf_counter()
        send_task = asyncio.create_task(self._send())
        try:
            self.reports = await self._commit()
            self.sent = await send_task or TransferStats(self.manifest.nbytes, time.perf_counter() - started_at)
        except SyncError as error:
            (send_error,) = await asyncio.gather(send_task, return_exceptions=True)
            if isinstance(send_error, Exception) and not isinstance(send_error, SyncError):
                raise send_error from error
            raise
        finally:
            await asyncio.gather(send_task, return_exceptions=True)
        self.state = State.PERSIST if self.is_push else State.DONE

    async def _send(self) -> TransferStats | None:
        """Let the trainer push the buckets. Returns None if they are in the store already."""
        sent = await self.parties.trainer.transfer_weights() if self.is_push else None
        self.state = State.COMMIT
        return sent

    async def _commit(self) -> list[SyncReport]:
        """Update every target. Returns the reports of the engines."""
        parties, deadline_s = self.parties, self.options.deadline_s
        targets = [parties.generators.apply_update(self.manifest, mode=self.pause, verify=self.verify, deadline_s=deadline_s)]
        if parties.logprob is not None:
            targets.append(parties.logprob.apply_update(self.manifest, verify=self.verify, deadline_s=deadline_s))
        # Wait for all of them before raising an error, so that no target is still in this transfer when it is retried.
        results = await asyncio.gather(*targets, return_exceptions=True)
        reports = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            reports.append(result)
        return reports[0]

    async def persist(self) -> None:
        """Let the trainer copy the version for the store. Generation continues meanwhile; the trainer's next optimizer step must wait."""
        if self.state is State.PERSIST:
            await self.parties.trainer.persist_weights()
            self.state = State.DONE
