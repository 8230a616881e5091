"""An engine as a `WeightTarget`, whatever it is and wherever it runs: its update sessions, its adapters, its way back after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from mtpctl.errors import MtpctlError
from mtpctl.plan.buckets import Bucket
from mtpctl.recipe.sync import PUSHED
from mtpctl.sync.adapter import adapter_root
from mtpctl.sync.checksums import Part, combined
from mtpctl.sync.protocol import Manifest, PlanMismatch, Section, SyncError, TargetDirty, VersionConflict
from mtpctl.sync.receiver import RankSums, UpdateStep, begin_step
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import update_target

ADAPTER = "mtpctl"
ADAPTER_ID = 1
"""One adapter is live at a time. Its number stays, so that requests in flight go on with the new one."""
HELD = Path("held")
"""In the place of an adapter's folder before the first one comes: what is loaded then are zeros."""


class EngineClient(Protocol):
    """The calls by which an engine receives weights, in sessions of one section each; each engine's package has its own."""

    async def start(self, *, draft: bool) -> None:
        """Open a session on the target, or on the drafter."""
        ...

    async def step(self, info: UpdateStep) -> None:
        """One step of the open session, on every worker. An error ends the session."""
        ...

    async def finish(self, version: int) -> None:
        """Close the session; generation goes on under `version`."""
        ...

    async def rpc(self, method: str, *args: str) -> list[object]:
        """Call a method of every worker. Returns what each returns."""
        ...

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        """Load the adapter in `folder` under this number, in place of one that has it."""
        ...


class Within(Protocol):
    """Puts a deadline on a call to the engine; `what` names it where it is late."""

    async def __call__[T](self, step: Awaitable[T], what: str) -> T: ...


@dataclass(frozen=True, slots=True)
class SectionUnderWay:
    """The section that is between `begin_update` and `finish_update`. `discards`: its buckets are dropped."""

    manifest: Manifest
    section: Section
    discards: bool

    @property
    def skipped(self) -> bool:
        """Whether the section is not received at all: it would be dropped, and no sender waits for it to be received."""
        return self.discards and self.manifest.transport not in PUSHED


@dataclass(slots=True)
class EngineState:
    """All that changes in an `EngineTarget`.

    version: the live one. complete: the last that came with all its sections, to which an update that breaks off returns. loaded: the
    version of each section. overwritten: sections whose weights were written to since `complete`. under_way: the section being
    received. session_open: the engine has a session. known_plans: names of plans that its workers have. adapter: the folder of the live
    adapter, HELD before the first one, None where the engine takes none. dirty: the weights are no version's.
    """

    version: int
    complete: Manifest | None = None
    loaded: dict[Section, int] = field(default_factory=dict)
    overwritten: set[Section] = field(default_factory=set)
    under_way: SectionUnderWay | None = None
    session_open: bool = False
    known_plans: set[str] = field(default_factory=set)
    adapter: Path | None = None
    dirty: bool = False


class EngineTarget:
    """One engine's updates. What changes is in `state`.

    `paused()` says whether generation is paused. Sections that the engine does not hold (`draft` without speculation) are
    skipped; where they are pushed to it, they are received and dropped. `adapters`: folder on the engine's host for its adapters; by
    default one beside the versions, which is removed with them even if the engine was killed.
    """

    def __init__(
        self,
        client: EngineClient,
        version: int,
        *,
        within: Within,
        paused: Callable[[], bool],
        holds: Collection[Section] = ("target", "draft", "adapter"),
        adapters: Path | None = None,
    ) -> None:
        self._client, self._within, self._paused, self._holds = client, within, paused, holds
        self._adapters = adapters
        self.state = EngineState(version)

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def dirty(self) -> bool:
        """Whether the weights are no version's, or not known to be."""
        return self.state.dirty

    @property
    def adapter(self) -> Path | None:
        """Folder of the live adapter, `HELD` before the first one; None where the engine takes no adapters."""
        return self.state.adapter

    @property
    def updating(self) -> int | None:
        """The version that is being received."""
        return None if self.state.under_way is None else self.state.under_way.manifest.version

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """Open a session and have the workers check the section. The engine must be paused."""
        state = self.state
        if state.under_way is not None:
            raise VersionConflict(f"an update to version {self.updating} is under way")
        # A transfer that is tried again goes to those too that have the version already.
        repeated = plan.transport in PUSHED and version == state.loaded.get(section)
        if version < state.version or (version <= state.loaded.get(section, -1) and not repeated):
            raise VersionConflict(f"weight version {version} ({section}) is not newer than the live {state.version}")
        if section not in plan.sections:
            raise PlanMismatch(f"version {version} has no section {section}")
        if section == "target" and "adapter" not in plan.sections and state.adapter not in (None, HELD):
            raise PlanMismatch("the engine has an adapter loaded, which would come on top of weights that hold one already: send it along")
        if not self._paused():
            raise SyncError("weights may change only while generation is paused")
        state.under_way = SectionUnderWay(plan, section, discards=repeated or section not in self._holds)
        if state.under_way.skipped:
            return
        try:
            await self._open(state.under_way, version)
        except BaseException as error:
            state.under_way = None
            if isinstance(error, MtpctlError) or not isinstance(error, Exception):
                raise
            raise PlanMismatch(str(error)) from error

    async def _open(self, now: SectionUnderWay, version: int) -> None:
        known = set(self.state.known_plans)
        step = begin_step(now.manifest, now.section, version=version, discard=now.discards, known=known)
        await self._in_session(self._client.start(draft=now.section == "draft" and not now.discards), "opening a weight session")
        await self._in_session(self._client.step(step), "a weight update")
        self.state.known_plans = known

    async def receive(self, *buckets: Bucket) -> None:
        now = self.state.under_way
        if now is None:
            raise SyncError("a bucket came outside of an update")
        if now.skipped:
            return
        if not now.discards and now.section != "adapter":
            self.state.overwritten.add(now.section)
        first = now.manifest.sections[now.section].buckets.index(buckets[0])
        step = UpdateStep(action="buckets", section=now.section, first=first, count=len(buckets))
        await self._in_session(self._client.step(step), "a weight update")

    async def finish_update(self) -> None:
        """Close the section's session. With the last section the version is complete: an update that breaks off will return to it."""
        state, now = self.state, self.state.under_way
        if now is None:
            raise SyncError("there is no update to finish")
        plan = now.manifest
        loaded = {**state.loaded, now.section: plan.version}
        complete = all(loaded.get(section) == plan.version for section in plan.sections)
        # A section that was dropped makes no version of what is live.
        version = plan.version if complete or not now.discards else state.version
        if not now.skipped:
            await self._within(self._client.finish(version), "closing a weight session")
            state.session_open = False
            if now.section == "adapter" and not now.discards:
                await self._load_adapter(plan.version, plan.store)
            elif now.section != "draft" or now.discards:
                await self._reload_adapter()
        state.under_way = None
        state.version, state.loaded = version, loaded
        if complete:
            state.complete, state.overwritten = plan, set()

    async def abort_update(self) -> None:
        """Give up the section. Weights already overwritten are received again from the version before, where it is persisted."""
        state = self.state
        state.under_way = None
        await self._end_session()
        if not state.overwritten:
            # Sections that were dropped come again with the rest.
            state.loaded = {section: version for section, version in state.loaded.items() if version <= state.version}
            return
        before, overwritten, state.overwritten = state.complete, state.overwritten, set()
        state.dirty = True
        if before is None:
            raise TargetDirty("the update broke off before the first published version was in: restart this engine")
        if lost := sorted(overwritten - before.sections.keys()):
            raise TargetDirty(
                f"the update broke off, and version {before.version} has no section {lost[0]} to restore: restart this engine"
            )
        try:
            persisted = VersionStore(before.store).open(before.version)
            state.dirty = False
            state.loaded = {}
            state.version, state.complete = before.version, None
            await update_target(self, persisted)
        except Exception as error:
            state.dirty = True
            raise TargetDirty(f"the update broke off, and version {before.version} could not be restored: {error}") from error

    async def checksums(self) -> dict[str, str]:
        """Of the parts of all ranks together."""
        ranks = cast(list[RankSums], await self._within(self._client.rpc("mtpctl_sums"), "taking checksums"))
        names = {name for rank in ranks for name in rank}
        return {name: combined(Part(**part) for rank in ranks for part in rank.get(name, [])) for name in names}

    def distrust(self) -> None:
        self.state.dirty = True

    async def probe(self, plan: Manifest, number: int) -> None:
        """Take part in `Sender.probe`: buckets are dropped, and no weight changes."""
        for section, part in plan.sections.items():
            await self._within(self._client.start(draft=False), "opening a weight session")
            step = begin_step(plan, section, version=-number, discard=True, known=set())
            await self._in_session(self._client.step(step), "a weight update")
            step = UpdateStep(action="buckets", section=section, first=0, count=len(part.buckets))
            await self._in_session(self._client.step(step), "a weight update")
            await self._within(self._client.finish(self.version), "closing a weight session")
            await self._reload_adapter()

    def close(self) -> None:
        """Remove what the adapters left. May be called again."""
        if self._adapters is not None and self._adapters.exists():
            shutil.rmtree(self._adapters)

    # --------------------------------------------------------------------------------------------------- adapters

    async def hold_adapter(self) -> None:
        """Load an adapter of zeros, before the first request of an engine that takes adapters.

        vLLM ties a request to an adapter, or to none, for good: one that began without would go on without the first that comes.
        """
        self.state.adapter = HELD
        await self._reload_adapter()

    async def _reload_adapter(self) -> None:
        """Load the live adapter again: vLLM drops all adapters when a session on the target ends.

        It would read one again when a request asks for it, from the folder that the request began with, which may be gone.
        """
        if self.adapter == HELD:
            await self._within(self._client.rpc("mtpctl_hold_adapter"), "making room for an adapter")
        elif self.adapter is not None:
            await self._within(self._client.load_adapter(ADAPTER, ADAPTER_ID, str(self.adapter)), "loading an adapter again")

    async def _load_adapter(self, version: int, store: str) -> None:
        """Load the adapter that was received. Where vLLM refuses it, the one before is live again, under its own version."""
        if self._adapters is None:
            self._adapters = adapter_root(store, f"{os.getpid()}-{id(self):x}")
        folder = self._adapters / f"v{version:08d}"
        await self._within(self._client.rpc("mtpctl_write_adapter", str(folder)), "writing an adapter")
        try:
            await self._within(self._client.load_adapter(ADAPTER, ADAPTER_ID, str(folder)), "loading an adapter")
        except MtpctlError:
            raise
        except Exception as error:
            # The session that brought it was closed under its version, which every token would be named after.
            await self._within(self._client.start(draft=False), "opening a weight session")
            await self._within(self._client.finish(self.version), "closing a weight session")
            await self._reload_adapter()
            raise SyncError(f"the engine refuses the adapter of version {version}: {error}") from error
        self.state.overwritten.add("adapter")
        self.state.adapter = folder
        await self._within(self._client.rpc("mtpctl_drop_adapters", str(folder)), "removing the adapter before")

    # --------------------------------------------------------------------------------------------------- sessions

    async def _in_session(self, call: Awaitable[None], what: str) -> None:
        """A call that opens the engine's session or goes on with it.

        One that fails ends the session; one that is cancelled goes on in the engine.
        """
        self.state.session_open = True
        try:
            await self._within(call, what)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.state.session_open = False
            raise

    async def _end_session(self) -> None:
        """Close the engine's session, if one is open, without applying it: by a step that fails on purpose.

        The step follows all steps that the engine has not done yet. If one of those has ended the session, this step fails for that
        reason. Either way no session is open afterwards.
        """
        if self.state.session_open:
            with contextlib.suppress(Exception):
                await self._in_session(self._client.step(UpdateStep(action="abort", section="")), "giving up a weight update")
