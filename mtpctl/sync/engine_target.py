"""An engine as a `WeightTarget`, whatever it is and wherever it runs: its update sessions, its adapters, its way back after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from mtpctl.errors import MtpctlError
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.adapter import adapter_root
from mtpctl.sync.checksums import Part, combined
from mtpctl.sync.manifest import Manifest, layout
from mtpctl.sync.protocol import PlanMismatch, Section, SyncError, TargetDirty, VersionConflict
from mtpctl.sync.session import update_target
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import PUSHED

ADAPTER = "mtpctl"
ADAPTER_ID = 1
"""One adapter is live at a time. Its number stays, so that requests in flight go on with the new one."""
HELD = Path("held")
"""In the place of an adapter's folder before the first one comes: what is loaded then are zeros."""


class EngineClient(Protocol):
    """The calls by which an engine takes in weights; each engine's package has its own."""

    async def start(self, *, draft: bool) -> None:
        """Open a session on the target, or on the drafter."""
        ...

    async def step(self, info: dict[str, Any]) -> None:
        """One update of the open session. An error ends the session."""
        ...

    async def finish(self, version: int) -> None:
        """Close the session; generation goes on under `version`."""
        ...

    async def rpc(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker."""
        ...

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        """Load the adapter in `folder` under this number, in place of one that has it."""
        ...


class EngineTarget:
    """The state of one engine's updates.

    `within(step, what)` puts a deadline on a call, `paused()` says whether generation stands. Of sections that the engine does not
    hold (`draft` without speculation) it takes nothing in; where they are pushed to it, it lets them pass. `adapters`: folder of the
    engine's host that it keeps adapters in; by default one beside the versions, which goes when they go, whatever became of the engine.
    """

    def __init__(
        self,
        client: EngineClient,
        version: int,
        *,
        within: Callable[[Awaitable[Any], str], Awaitable[Any]],
        paused: Callable[[], bool],
        holds: Collection[Section] = ("target", "draft", "adapter"),
        adapters: Path | None = None,
    ) -> None:
        self._client, self._version, self._within, self._paused, self._holds = client, version, within, paused, holds
        self.dirty = False
        self.adapter: Path | None = None
        self._root = adapters
        self._manifest: Manifest | None = None
        self._updating: tuple[Manifest, Section] | None = None
        self._session_open = False
        self._discarding = False
        self._touched: set[Section] = set()
        self._loaded: dict[Section, int] = {}
        self._told: set[str] = set()

    @property
    def version(self) -> int:
        """See `WeightTarget`."""
        return self._version

    @property
    def updating(self) -> int | None:
        """The version that is on its way in."""
        return None if self._updating is None else self._updating[0].version

    async def hold_adapter(self) -> None:
        """Load an adapter of zeros, before the first request of an engine that takes adapters.

        vLLM ties a request to an adapter, or to none, for good: one that began without would go on without the first that comes.
        """
        self.adapter = HELD
        await self._load_again()

    async def _load_again(self) -> None:
        """vLLM drops all adapters when a session on the target ends.

        It would read one again when a request asks for it, from the folder that the request began with, which may be gone.
        """
        if self.adapter == HELD:
            await self._within(self._client.rpc("mtpctl_hold_adapter"), "making room for an adapter")
        elif self.adapter is not None:
            await self._within(self._client.load_adapter(ADAPTER, ADAPTER_ID, str(self.adapter)), "loading an adapter again")

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """See `WeightTarget`. The engine must be paused."""
        if self._updating is not None:
            raise VersionConflict(f"an update to version {self.updating} is under way")
        # A transfer that is tried again goes to those too that have the version already.
        repeated = plan.transport in PUSHED and version == self._loaded.get(section)
        if version < self._version or (version <= self._loaded.get(section, -1) and not repeated):
            raise VersionConflict(f"weight version {version} ({section}) is not newer than the live {self._version}")
        if section not in plan.sections:
            raise PlanMismatch(f"version {version} has no section {section}")
        if section == "target" and "adapter" not in plan.sections and self.adapter not in (None, HELD):
            raise PlanMismatch("the engine has an adapter loaded, which would come on top of weights that hold one already: send it along")
        if not self._paused():
            raise SyncError("weights may change only while generation is paused")
        self._updating = (plan, section)
        self._discarding = repeated or section not in self._holds
        if self._absent(plan):
            return
        try:
            await self._open(plan, version, section)
        except BaseException:
            self._updating = None
            raise

    def _absent(self, plan: Manifest) -> bool:
        """Whether there is nothing to do about the section."""
        return self._discarding and plan.transport not in PUSHED

    async def _open(self, plan: Manifest, version: int, section: Section) -> None:
        buckets, config = plan.sections[section].buckets, plan.sections[section].config
        text, name = layout(buckets)
        step: dict[str, Any] = {
            "action": "begin",
            "section": section,
            "version": version,
            "transport": plan.transport,
            "address": plan.address,
        }
        step |= {"plan_name": name, "plan": "" if name in self._told else text, "config": config, "discard": self._discarding}
        try:
            await self._in_session(self._client.start(draft=section == "draft" and not self._discarding), "opening a weight session")
            await self._in_session(self._client.step(step), "a weight update")
        except MtpctlError:
            raise
        except Exception as error:
            raise PlanMismatch(str(error)) from error
        self._told.add(name)

    async def receive(self, *buckets: Bucket) -> None:
        """See `WeightTarget`."""
        if self._updating is None:
            raise SyncError("a bucket came outside of an update")
        plan, section = self._updating
        if self._absent(plan):
            return
        if not self._discarding and section != "adapter":
            self._touched.add(section)
        first = plan.sections[section].buckets.index(buckets[0])
        step = {"action": "buckets", "section": section, "first": first, "count": len(buckets)}
        await self._in_session(self._client.step(step), "a weight update")

    async def finish_update(self) -> None:
        """See `WeightTarget`."""
        if self._updating is None:
            raise SyncError("there is no update to finish")
        plan, section = self._updating
        loaded = {**self._loaded, section: plan.version}
        whole = all(loaded.get(name) == plan.version for name in plan.sections)  # type: ignore[call-overload]
        # A section that passed by makes no version of what is live.
        version = plan.version if whole or not self._discarding else self._version
        if not self._absent(plan):
            await self._within(self._client.finish(version), "closing a weight session")
            self._session_open = False
            if section == "adapter" and not self._discarding:
                await self._load_adapter(plan.version, plan.store)
            elif section != "draft" or self._discarding:
                await self._load_again()
        self._updating = None
        self._version, self._loaded = version, loaded
        if whole:
            self._manifest, self._touched = plan, set()

    async def probe(self, plan: Manifest, number: int) -> None:
        """Take part in `Sender.probe`: buckets go to scratch memory, and no weight changes."""
        for section, part in plan.sections.items():
            text, name = layout(part.buckets)
            await self._within(self._client.start(draft=False), "opening a weight session")
            step: dict[str, Any] = {"action": "begin", "section": section, "version": -number, "discard": True}
            step |= {"transport": plan.transport, "address": plan.address, "plan_name": name, "plan": text}
            await self._in_session(self._client.step(step), "a weight update")
            step = {"action": "buckets", "section": section, "first": 0, "count": len(part.buckets)}
            await self._in_session(self._client.step(step), "a weight update")
            await self._within(self._client.finish(self._version), "closing a weight session")
            await self._load_again()

    async def _load_adapter(self, version: int, store: str) -> None:
        """Hand over the adapter that came, once. Where vLLM refuses it, the one before is live again, under its own version."""
        if self._root is None:
            self._root = adapter_root(store, f"{os.getpid()}-{id(self):x}")
        folder = self._root / f"v{version:08d}"
        await self._within(self._client.rpc("mtpctl_write_adapter", str(folder)), "writing an adapter")
        try:
            await self._within(self._client.load_adapter(ADAPTER, ADAPTER_ID, str(folder)), "loading an adapter")
        except MtpctlError:
            raise
        except Exception as error:
            # The session that brought it was closed under its version, which every token would be named after.
            await self._within(self._client.start(draft=False), "opening a weight session")
            await self._within(self._client.finish(self._version), "closing a weight session")
            await self._load_again()
            raise SyncError(f"the engine refuses the adapter of version {version}: {error}") from error
        self._touched.add("adapter")
        self.adapter = folder
        await self._within(self._client.rpc("mtpctl_drop_adapters", str(folder)), "removing the adapter before")

    async def abort_update(self) -> None:
        """See `WeightTarget`. Weights already overwritten are taken again from the version before, where it is kept."""
        self._updating = None
        await self._end_session()
        if not self._touched:
            # Sections that passed by come again with the rest.
            self._loaded = {section: version for section, version in self._loaded.items() if version <= self._version}
            return
        before, touched, self._touched = self._manifest, self._touched, set()
        self.dirty = True
        if before is None:
            raise TargetDirty("the update broke off before the first published version was in: restart this engine")
        if lost := sorted(touched - before.sections.keys()):
            raise TargetDirty(
                f"the update broke off, and version {before.version} has no section {lost[0]} to restore: restart this engine"
            )
        try:
            kept = VersionStore(before.store).open(before.version)
            self.dirty = False
            self._loaded = {}
            self._version, self._manifest = before.version, None
            await update_target(self, kept)
        except Exception as error:
            self.dirty = True
            raise TargetDirty(f"the update broke off, and version {before.version} could not be restored: {error}") from error

    async def checksums(self) -> dict[str, str]:
        """See `WeightTarget`: of the parts of all ranks together."""
        ranks = await self._within(self._client.rpc("mtpctl_sums"), "taking checksums")
        names = {name for rank in ranks for name in rank}
        return {name: combined(Part(**part) for rank in ranks for part in rank.get(name, [])) for name in names}

    def distrust(self) -> None:
        """See `WeightTarget`."""
        self.dirty = True

    def close(self) -> None:
        """Remove what the adapters left. May be called again."""
        if self._root is not None and self._root.exists():
            shutil.rmtree(self._root)

    async def _in_session(self, call: Awaitable[Any], what: str) -> None:
        """A call that opens vLLM's session or goes on with it. One that fails ends the session; one that is left goes on in vLLM."""
        self._session_open = True
        try:
            await self._within(call, what)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._session_open = False
            raise

    async def _end_session(self) -> None:
        """Close vLLM's session, if one is open, without making it count: with an update that fails on purpose.

        It comes behind whatever vLLM has not done yet. Where that ended the session, this fails too, for another reason: either way
        there is none any more.
        """
        if self._session_open:
            with contextlib.suppress(Exception):
                await self._in_session(self._client.step({"action": "abort", "section": ""}), "giving up a weight update")
