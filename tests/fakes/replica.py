"""A replica without an engine: one token a tick, counted up from the last one, under the live version."""

from __future__ import annotations

import asyncio
from typing import Any

from mtpctl.recipe.sync import PUSH_TRANSPORTS
from mtpctl.rollout.protocol import ABORTED, DEADLINE, EngineDead, Health
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PauseMode, VersionConflict
from mtpctl.sync.transports.base import Address, join
from mtpctl.sync.update import SyncReport

VOCABULARY = 50


def next_token(sample: Sample) -> int:
    """What a fake engine answers: one more than the last token."""
    return ((sample.response_ids or sample.prompt_ids)[-1] + 1) % VOCABULARY


class FakeReplica:
    """Behaves like an engine, and dies or hangs on request."""

    def __init__(self, version: int = 0, tick_s: float = 0.0005) -> None:
        self.version = version
        self.tick_s = tick_s
        self.served: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.closed = False
        self._dead = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._aborts = 0
        self._accepting = True

    def die(self) -> None:
        """From now on every call fails, those under way included."""
        self._dead.set()

    def _check(self) -> None:
        if self._dead.is_set():
            raise EngineDead("the fake was killed")

    async def _tick(self) -> None:
        """One step's time; over at once when the replica dies."""
        dead = asyncio.ensure_future(self._dead.wait())
        await asyncio.wait([dead], timeout=self.tick_s)
        dead.cancel()
        self._check()

    async def generate(self, request: GenerationRequest) -> Sample:
        self._check()
        sample = request.sample
        clock = asyncio.get_running_loop().time
        began = clock()
        until = began + request.deadline_s
        aborts = self._aborts
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.served.append(sample.prompt_id)
        try:
            while True:
                await self._tick()
                if aborts != self._aborts:
                    sample.finish_reason = ABORTED
                elif clock() >= until:
                    sample.finish_reason = DEADLINE
                elif not self._running.is_set():
                    continue
                else:
                    sample.append([next_token(sample)], [-1.0], self.version)
                    if sample.response_ids[-1] in request.stop_token_ids:
                        sample.finish_reason = "stop"
                    elif len(sample.response_ids) == request.max_tokens:
                        sample.finish_reason = "length"
                    else:
                        continue
                return sample
        finally:
            self.in_flight -= 1
            sample.spent_s += clock() - began

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport:
        if manifest.version <= self.version and manifest.transport not in PUSH_TRANSPORTS:
            raise VersionConflict(f"weight version {manifest.version} is not newer than the live {self.version}")
        stood = not self._running.is_set()
        await self.pause(mode)
        if manifest.transport in PUSH_TRANSPORTS:
            # As a transport does: nothing moves before all who are expected have met.
            await asyncio.to_thread(join, Address.parse(manifest.address))
            self._check()
        self.version = manifest.version
        if not stood:
            await self.resume()
        return SyncReport(manifest.version, manifest.nbytes, 0.0)

    async def pause(self, mode: PauseMode) -> None:
        self._check()
        if mode == "abort":
            self._aborts += 1
        if mode == "wait":
            while self.in_flight:
                await self._tick()
        self._running.clear()

    async def resume(self) -> None:
        self._check()
        self._running.set()

    async def control_speculation(self, drafts: int | None = None) -> dict[str, Any]:
        self._check()
        return {"drafts": drafts}

    async def health(self) -> Health:
        self._check()
        return Health(alive=True, version=self.version, in_flight=self.in_flight)

    async def shutdown(self) -> None:
        self.closed = True
