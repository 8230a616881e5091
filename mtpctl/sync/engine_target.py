"""An engine as a `WeightTarget`: its update sessions, its adapters, and how it restores the previous version after a fault."""

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
from mtpctl.recipe.sync import PUSH_TRANSPORTS
from mtpctl.sync.checksums import PartialSums, combine_sums
from mtpctl.sync.protocol import Manifest, PlanMismatch, Section, SyncError, TargetDirty, VersionConflict
from mtpctl.sync.receiver import RankSums, UpdateStep, adapter_root, begin_step
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import update_target

ADAPTER = "mtpctl"
ADAPTER_ID = 1
"""One adapter is live at a time. Its id is constant, so that requests in flight continue with the new adapter."""
ZERO_ADAPTER = Path("held")
"""Placeholder for the adapter's folder while the zero-initialized adapter is loaded."""


class EngineClient(Protocol):
    """The calls with which an engine receives weights, in sessions of one section each. Each engine's package implements it."""

    async def start(self, *, draft: bool) -> None:
        """Open a session on the target model, or with `draft` on the drafter."""
        ...

    async def step(self, info: UpdateStep) -> None:
        """Execute one step of the open session on every worker. An error ends the session."""
        ...

    async def finish(self, version: int) -> None:
        """Close the session. Generation continues under `version`."""
        ...

    async def rpc(self, method: str, *args: str) -> list[object]:
        """Call a method of every worker, and return the results."""
        ...

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        """Load the adapter in `folder` under this number, replacing the current one."""
        ...


class WithDeadline(Protocol):
    """Awaits a call to the engine with a deadline; `action` names the call in the error."""

    async def __call__[T](self, step: Awaitable[T], action: str) -> T: ...


@dataclass(frozen=True, slots=True)
class SectionUpdate:
    """The section between `begin_update` and `finish_update`. `discards`: whether its buckets are dropped."""

    manifest: Manifest
    section: Section
    discards: bool

    @property
    def skipped(self) -> bool:
        """Whether the section is not received at all: it would be dropped, and no sender waits for this receiver."""
        return self.discards and self.manifest.transport not in PUSH_TRANSPORTS


@dataclass(slots=True)
class EngineState:
    """The mutable state of an `EngineTarget`.

    Attributes:
        version: the live version.
        complete: the last version with all its sections, which a failed update restores.
        loaded: the version of each section.
        overwritten: sections written to since `complete`.
        active: the section being received.
        session_open: whether the engine has an open session.
        known_plans: names of the plans that the engine's workers have received.
        adapter: the folder of the live adapter, ZERO_ADAPTER before the first one, None if the engine takes no adapters.
        dirty: whether the weights may be a mix of versions.
    """

    version: int
    complete: Manifest | None = None
    loaded: dict[Section, int] = field(default_factory=dict)
    overwritten: set[Section] = field(default_factory=set)
    active: SectionUpdate | None = None
    session_open: bool = False
    known_plans: set[str] = field(default_factory=set)
    adapter: Path | None = None
    dirty: bool = False


class EngineTarget:
    """Applies updates to one engine.

    `paused()` returns whether generation is paused. Sections that are not in `sections` (`draft` without speculation) are skipped, or
    received and dropped if the transport pushes them. `adapters`: folder for adapters on the engine's host. The default is a folder in the
    version store, which is removed with the store even if the engine was killed.
    """

    def __init__(
        self,
        client: EngineClient,
        version: int,
        *,
        with_deadline: WithDeadline,
        paused: Callable[[], bool],
        sections: Collection[Section] = ("target", "draft", "adapter"),
        adapters: Path | None = None,
    ) -> None:
        self._client, self._with_deadline, self._paused, self._sections = client, with_deadline, paused, sections
        self._adapters = adapters
        self.state = EngineState(version)

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def dirty(self) -> bool:
        """Whether the weights may be a mix of versions."""
        return self.state.dirty

    @property
    def adapter(self) -> Path | None:
        """Folder of the live adapter, `ZERO_ADAPTER` before the first one, None if the engine takes no adapters."""
        return self.state.adapter

    @property
    def updating(self) -> int | None:
        """The version that is being received; None if no update is in progress."""
        return None if self.state.active is None else self.state.active.manifest.version

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """Open a session and let the workers check the section, unless it is skipped. The engine must be paused."""
        state = self.state
        if state.active is not None:
            raise VersionConflict(f"an update to version {self.updating} is under way")
        # A repeated transfer includes receivers that already have the version.
        is_repeated = plan.transport in PUSH_TRANSPORTS and version == state.loaded.get(section)
        if version < state.version or (version <= state.loaded.get(section, -1) and not is_repeated):
            raise VersionConflict(f"weight version {version} ({section}) is not newer than the live {state.version}")
        if plan.base is not None and not is_repeated and state.loaded.get(section) != plan.base:
            loaded = f"version {state.loaded[section]}" if section in state.loaded else "none"
            raise VersionConflict(
                f"weight version {version} ({section}) contains only the changes since version {plan.base}, but this engine has {loaded}"
            )
        if section not in plan.sections:
            raise PlanMismatch(f"version {version} has no section {section}")
        if section == "target" and "adapter" not in plan.sections and state.adapter not in (None, ZERO_ADAPTER):
            raise PlanMismatch("the engine has an adapter loaded, which would be added to merged weights: send the adapter too")
        if not self._paused():
            raise SyncError("weights may change only while generation is paused")
        state.active = SectionUpdate(plan, section, discards=is_repeated or section not in self._sections)
        if state.active.skipped:
            return
        try:
            await self._open(state.active, version)
        except BaseException as error:
            state.active = None
            if isinstance(error, MtpctlError) or not isinstance(error, Exception):
                raise
            raise PlanMismatch(str(error)) from error

    async def _open(self, active: SectionUpdate, version: int) -> None:
        known = set(self.state.known_plans)
        step = begin_step(active.manifest, active.section, version=version, discard=active.discards, known=known)
        await self._in_session(self._client.start(draft=active.section == "draft" and not active.discards), "opening a weight session")
        await self._in_session(self._client.step(step), "a weight update")
        self.state.known_plans = known

    async def receive(self, *buckets: Bucket) -> None:
        active = self.state.active
        if active is None:
            raise SyncError("a bucket was received outside of an update")
        if active.skipped:
            return
        if not active.discards and active.section != "adapter":
            self.state.overwritten.add(active.section)
        first = active.manifest.sections[active.section].wire_buckets.index(buckets[0])
        step = UpdateStep(action="buckets", section=active.section, first=first, count=len(buckets))
        await self._in_session(self._client.step(step), "a weight update")

    async def finish_update(self) -> None:
        """Close the section's session. The last section completes the version. If a later update fails, it restores this version."""
        state, active = self.state, self.state.active
        if active is None:
            raise SyncError("there is no update to finish")
        plan = active.manifest
        loaded = {**state.loaded, active.section: plan.version}
        complete = all(loaded.get(section) == plan.version for section in plan.sections)
        # A dropped section changes no weights, so it does not make the version live, unless it is the version's last section.
        version = plan.version if complete or not active.discards else state.version
        if not active.skipped:
            if active.section == "adapter" and not active.discards:
                # From here on the engine has the new version, but not its adapter yet.
                state.overwritten.add("adapter")
            await self._with_deadline(self._client.finish(version), "closing a weight session")
            state.session_open = False
            if active.section == "adapter" and not active.discards:
                await self._load_adapter(plan.version, plan.store)
            elif active.section != "draft" or active.discards:
                await self._reload_adapter()
        state.active = None
        state.version, state.loaded = version, loaded
        if complete:
            state.complete, state.overwritten = plan, set()

    async def abort_update(self) -> None:
        """Cancel the section. Overwritten weights are restored from the previous version in the store."""
        state = self.state
        state.active = None
        await self._end_session()
        if not state.overwritten:
            # Forget the dropped sections of the failed version: a retry sends them again, with the other sections.
            state.loaded = {section: version for section, version in state.loaded.items() if version <= state.version}
            return
        previous, overwritten, state.overwritten = state.complete, state.overwritten, set()
        state.dirty = True
        if previous is None:
            raise TargetDirty("the update failed before the first published version was loaded: restart this engine")
        if missing := sorted(overwritten - previous.sections.keys()):
            raise TargetDirty(
                f"the update failed, and version {previous.version} has no section {missing[0]} to restore: restart this engine"
            )
        try:
            chain = VersionStore(previous.store).chain(previous.version)
            state.dirty = False
            state.loaded = {}
            state.version, state.complete = chain[0].version, None
            for manifest in chain:
                await update_target(self, manifest)
        except Exception as error:
            state.dirty = True
            raise TargetDirty(f"the update failed, and version {previous.version} could not be restored: {error}") from error

    async def checksums(self, *sections: Section) -> dict[str, str]:
        ranks = cast(list[RankSums], await self._with_deadline(self._client.rpc("mtpctl_sums", *sections), "taking checksums"))
        names = {name for rank in ranks for name in rank}
        return {name: combine_sums(PartialSums(**part) for rank in ranks for part in rank.get(name, [])) for name in names}

    def mark_dirty(self) -> None:
        self.state.dirty = True

    async def probe(self, plan: Manifest, number: int) -> None:
        """Receive a `Sender.probe`: buckets are dropped, and no weight changes."""
        for section, section_plan in plan.sections.items():
            await self._with_deadline(self._client.start(draft=False), "opening a weight session")
            step = begin_step(plan, section, version=-number, discard=True, known=set())
            await self._in_session(self._client.step(step), "a weight update")
            step = UpdateStep(action="buckets", section=section, first=0, count=len(section_plan.wire_buckets))
            await self._in_session(self._client.step(step), "a weight update")
            await self._with_deadline(self._client.finish(self.version), "closing a weight session")
            await self._reload_adapter()

    def close(self) -> None:
        """Delete the adapters' folder. Idempotent."""
        if self._adapters is not None and self._adapters.exists():
            shutil.rmtree(self._adapters)

    async def load_zero_adapter(self) -> None:
        """Load a zero-initialized adapter before the first request of an engine with adapters.

        vLLM fixes the adapter of a request when the request begins. A request that began without one would ignore the first adapter.
        """
        self.state.adapter = ZERO_ADAPTER
        await self._reload_adapter()

    async def _reload_adapter(self) -> None:
        """Reload the live adapter, since vLLM drops all adapters when a session on the target ends.

        vLLM itself would reload it from the folder that was named when a request began. This folder may have been deleted since.
        """
        if self.adapter == ZERO_ADAPTER:
            await self._with_deadline(self._client.rpc("mtpctl_load_zero_adapter"), "loading a zero adapter")
        elif self.adapter is not None:
            await self._with_deadline(self._client.load_adapter(ADAPTER, ADAPTER_ID, str(self.adapter)), "reloading an adapter")

    async def _load_adapter(self, version: int, store: str) -> None:
        """Load the received adapter. If the engine rejects it, restores the previous adapter and version, and raises SyncError."""
        if self._adapters is None:
            self._adapters = adapter_root(store, f"{os.getpid()}-{id(self):x}")
        folder = self._adapters / f"v{version:08d}"
        await self._with_deadline(self._client.rpc("mtpctl_write_adapter", str(folder)), "writing an adapter")
        try:
            await self._with_deadline(self._client.load_adapter(ADAPTER, ADAPTER_ID, str(folder)), "loading an adapter")
        except Exception as error:
            if isinstance(error, MtpctlError) and not isinstance(error, SyncError):
                raise
            # Closing the session has set the new version. Open and close another one with the previous version, which new tokens must have.
            await self._with_deadline(self._client.start(draft=False), "opening a weight session")
            await self._with_deadline(self._client.finish(self.version), "closing a weight session")
            await self._reload_adapter()
            self.state.overwritten.discard("adapter")
            raise SyncError(f"the engine refuses the adapter of version {version}: {error}") from error
        self.state.adapter = folder
        await self._with_deadline(self._client.rpc("mtpctl_drop_adapters", str(folder)), "removing the previous adapter")

    async def _in_session(self, call: Awaitable[None], action: str) -> None:
        """Await a call that opens or continues the engine's session.

        A failed call ends the session. A cancelled call continues in the engine.
        """
        self.state.session_open = True
        try:
            await self._with_deadline(call, action)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.state.session_open = False
            raise

    async def _end_session(self) -> None:
        """Close the engine's open session without applying it, with a step that fails on purpose.

        The step runs after all steps that are queued in the engine. If a queued step has already ended the session, this step fails, too.
        """
        if self.state.session_open:
            with contextlib.suppress(Exception):
                await self._in_session(self._client.step(UpdateStep(action="abort", section="")), "aborting a weight update")
