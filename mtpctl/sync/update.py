"""One weight update: the way of a version from the trainer to every generator and log-prob replica.

    state      trainer's side                                   each target's side
    ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
               RlStage.publish
               └ WeightSync: which sections, once more if
                 a receiver failed
                 └ WeightUpdate ───────────────────────────────► ReplicaPool, LogprobServer: quiesce
                   │ Ray, all ranks                              │ Ray, all replicas
                   └ TrainerRank (a WeightSource)                └ Engine, Replica: pause
                     └ Sender (shm: Publisher)                     └ update_target: section after section
                       └ BucketWriter                                └ EngineTarget ► receiver in each worker;
                                                                       ScoreRank
    plan       export once to lay out the buckets;
               say them in a Manifest                   ──────►  begin_update: names, shapes, version; nothing changes
    transfer   export, pack                             ══════►  receive: buckets into live parameters (a log-prob
                                                                 replica's: into its spare set, where it keeps two)
    commit     wait for every target                    ◄──────  finish_update: with its last section a target has the
                                                                 version; verify; resume
    persist    export into host memory, and from there           a replica that starts later takes the same steps,
               to the VersionStore by threads                    from the store

`ipc` and `nccl` push: sender and receivers meet, so receivers are named in the plan, and planning comes after they have quiesced.
With `shm` the plan writes the buckets into the version store, while generation goes on; receivers read them there, and nothing is left
to persist.

A version is atomic in each target. An engine is paused from before its first section until after its last, so no token is sampled
between target n+1 and drafter n; a target that fails returns to the version before, or serves no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mtpctl.recipe.sync import PUSHED
from mtpctl.sync.protocol import Manifest, PauseMode, Section, SyncError, TargetDirty, WeightsDiffer, WeightTarget
from mtpctl.sync.transports.base import Sent, cancel

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one update moved and how long it took: `seconds` in all, `stall_seconds` from pause to resume where one paused."""

    version: int
    nbytes: int
    seconds: float
    stall_seconds: float = 0.0
    verified: int = 0


def check_checksums(manifest: Manifest, found: dict[str, str], holds: Collection[str] = ("target", "draft", "adapter")) -> int:
    """Compare a target's checksums with the sender's, for the sections that it holds. Returns the number of tensors that agree.

    Raises WeightsDiffer that names the tensors that differ or are missing, SyncError where the publisher took no checksums.
    """
    wanted = _published_checksums(manifest, holds)
    differing = [name for name, value in wanted.items() if found.get(name) != value]
    if differing:
        raise WeightsDiffer(f"after the sync to version {manifest.version} these tensors differ from what was sent: {', '.join(differing)}")
    return len(wanted)


def _published_checksums(manifest: Manifest, holds: Collection[str]) -> dict[str, str]:
    wanted = {name: value for place, section in manifest.sections.items() if place in holds for name, value in section.checksums.items()}
    if not wanted:
        raise SyncError(f"version {manifest.version} was published without checksums to compare with")
    return wanted


async def or_cancel[T](manifest: Manifest, update: Awaitable[T]) -> T:
    """The result of a target's update. Where it fails, the others in the same transfer are told, so that they need not wait."""
    try:
        return await update
    except BaseException as error:
        await asyncio.to_thread(cancel, manifest, f"a receiver of the weights gave up: {error}")
        raise


async def update_target(
    target: WeightTarget,
    manifest: Manifest,
    *,
    verify: bool = False,
    deadline_s: float = 120.0,
    holds: Collection[Section] = ("target", "draft", "adapter"),
) -> SyncReport:
    """Have `target` receive all sections of `manifest` and go live with them, or leave it at the version that it had.

    A target that generates has been paused by the caller. A fault at any point aborts the update, and so does `deadline_s`; returning to
    the version before may take as long again. `holds`: the sections whose checksums the target can tell, for `verify`.

    Raises SyncError where the version before is live again, TargetDirty where the target could not return to it, and with `verify`
    WeightsDiffer where the new version is live and is not what was sent: the target serves no more.
    """
    started = time.monotonic()
    if verify:
        _published_checksums(manifest, holds)

    async def within[T](step: Awaitable[T]) -> T:
        return await asyncio.wait_for(step, deadline_s - (time.monotonic() - started))

    try:
        for name, section in manifest.sections.items():
            await within(target.begin_update(manifest, manifest.version, name))
            await within(target.receive(*section.buckets))
            await within(target.finish_update())
    except BaseException as error:
        try:
            await asyncio.wait_for(target.abort_update(), deadline_s)
        except (TimeoutError, asyncio.CancelledError) as late:
            # How far it came on its way back is not known.
            target.distrust()
            if isinstance(late, asyncio.CancelledError):
                raise
            raise TargetDirty(
                f"the sync to version {manifest.version} broke off, and giving it up took longer than {deadline_s:g} s"
            ) from error
        except TargetDirty as dirty:
            raise TargetDirty(f"{dirty}, after {type(error).__name__}: {error}") from error
        if isinstance(error, TimeoutError):
            raise SyncError(f"the sync to version {manifest.version} took longer than sync.deadline_s = {deadline_s}") from error
        raise
    verified = 0
    if verify:
        # The update is complete and live, and cannot be given up any more.
        try:
            verified = check_checksums(manifest, await within(target.checksums()), holds)
        except BaseException as error:
            target.distrust()
            if isinstance(error, TimeoutError):
                raise TargetDirty(f"version {manifest.version} could not be verified within sync.deadline_s = {deadline_s}") from error
            raise
    return SyncReport(manifest.version, manifest.nbytes, time.monotonic() - started, verified=verified)


class State(StrEnum):
    """The states of an update, in their order."""

    PLAN = "plan"
    TRANSFER = "transfer"
    COMMIT = "commit"
    PERSIST = "persist"
    DONE = "done"


class Trainer(Protocol):
    """The trainer ranks: `method` of `WeightSource` on all of them, and rank 0's answer."""

    async def call(self, method: str, *args: object) -> object: ...


class Generators(Protocol):
    """The engines: a `ReplicaPool`, or servers that run already."""

    def quiesce(self, mode: PauseMode) -> AbstractAsyncContextManager[None]:
        """Quiesce: no engine joins while the block runs, and with `wait` no response is under way."""
        ...

    def members(self, ranks: int) -> list[str]:
        """A name for each rank of each engine that serves and has `ranks` of them; `apply_update` calls exactly these."""
        ...

    async def apply_update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        """Pause every engine, apply the update, resume. Raises SyncError where one refuses and still has its old weights."""
        ...


class LogprobReplicas(Protocol):
    """The replicas of a `LogprobServer`."""

    def quiesce(self, deadline_s: float) -> AbstractAsyncContextManager[None]:
        """Quiesce: no pass is under way, and no replica joins, while the block runs."""
        ...

    def members(self, version: int, ranks: int) -> list[str]:
        """A name for each rank of each replica that lacks `version` and has `ranks` of them; `apply_update` calls exactly these."""
        ...

    async def apply_update(self, manifest: Manifest, *, verify: bool, deadline_s: float) -> list[SyncReport]:
        """Apply the update to every replica. Raises SyncError where one refuses and still has its old weights."""
        ...


@dataclass(frozen=True)
class Parties:
    """Who takes part in the updates of a run, and the version store's folder."""

    recipe: Recipe
    trainer: Trainer
    generators: Generators
    logprob: LogprobReplicas | None
    store: Path


class WeightUpdate:
    """Takes every target to `version`. `run` it, then `persist` it.

    `manifest`: what was planned. `sent`: what the sender says. `reports`: what the engines say.
    """

    manifest: Manifest

    def __init__(self, parties: Parties, version: int, sections: tuple[Section, ...], *, verify: bool) -> None:
        """`verify`: compare the checksums of every tensor on both ends."""
        self.parties, self.version, self.sections, self.verify = parties, version, sections, verify
        self.options = parties.recipe.sync
        self.pushed = self.options.transport in PUSHED
        # Without partial rollouts no response spans two versions: those in flight end before the weights change.
        self.pause: PauseMode = self.options.pause if parties.recipe.async_.partial_rollout else "wait"
        self.state = State.PLAN
        self.sent = Sent()
        self.reports: list[SyncReport] = []
        self.plan_seconds = 0.0

    async def run(self) -> None:
        """Plan, transfer and commit. Raises SyncError where a target refuses: it, and others that had not committed, go on as before."""
        if self.pushed:
            async with self._quiesced():
                await self.plan(self._members())
                await self.transfer()
        else:
            await self.plan([])
            async with self._quiesced():
                await self.transfer()

    @contextlib.asynccontextmanager
    async def _quiesced(self) -> AsyncIterator[None]:
        """No replica joins while the block runs, so that those who are named are those who meet.

        Responses that have to end are waited for first. The log-prob server has ended its passes under way: engines must not be paused
        for those.
        """
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.parties.generators.quiesce(self.pause))
            if self.parties.logprob is not None:
                await stack.enter_async_context(self.parties.logprob.quiesce(self.options.deadline_s))
            yield

    def _members(self) -> list[str]:
        """The receivers of a pushed version, one a rank."""
        recipe, logprob = self.parties.recipe, self.parties.logprob
        members = self.parties.generators.members(recipe.rollout.tp)
        return members if logprob is None else members + logprob.members(self.version, recipe.logprob.parallel.world_size)

    async def plan(self, members: list[str]) -> None:
        """Have the trainer say what comes, to receivers of these names."""
        assert self.state is State.PLAN
        began = time.perf_counter()
        store = str(self.parties.store)
        manifest = await self.parties.trainer.call("plan_weights", self.version, store, members, self.verify, self.sections)
        assert isinstance(manifest, Manifest)
        self.manifest = manifest
        self.plan_seconds = time.perf_counter() - began

    async def transfer(self) -> None:
        """Move the buckets, and return once every target has committed. The first error of a target is raised before the sender's."""
        assert self.state is State.PLAN
        self.state, began = State.TRANSFER, time.perf_counter()
        sending = asyncio.create_task(self._send())
        try:
            self.reports = await self._commit()
            self.sent = await sending or Sent(self.manifest.nbytes, time.perf_counter() - began)
        finally:
            await asyncio.gather(sending, return_exceptions=True)
        self.state = State.PERSIST if self.pushed else State.DONE

    async def _send(self) -> Sent | None:
        """Have the trainer push the buckets; None where they lie in the store already."""
        sent = await self.parties.trainer.call("transfer_weights") if self.pushed else None
        self.state = State.COMMIT
        assert sent is None or isinstance(sent, Sent)
        return sent

    async def _commit(self) -> list[SyncReport]:
        """Have every target receive the sections and go live with them. Returns what the engines report."""
        parties, deadline_s = self.parties, self.options.deadline_s
        targets = [parties.generators.apply_update(self.manifest, mode=self.pause, verify=self.verify, deadline_s=deadline_s)]
        if parties.logprob is not None:
            targets.append(parties.logprob.apply_update(self.manifest, verify=self.verify, deadline_s=deadline_s))
        # All of them end before any error is raised: a transfer that is tried again must find nobody in the one before.
        results = await asyncio.gather(*targets, return_exceptions=True)
        reports = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            reports.append(result)
        return reports[0]

    async def persist(self) -> None:
        """Have the trainer copy the version for the store. Generation goes on meanwhile, the trainer's next update does not begin."""
        if self.state is State.PERSIST:
            await self.parties.trainer.call("persist_weights")
            self.state = State.DONE
