"""An engine as a Ray actor, and the handle that a pool routes to."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from mtpctl.rollout.protocol import EngineDead, Health, SpecStats
from mtpctl.rollout.sglang_settings import SglangSettings
from mtpctl.rollout.vllm_settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import PauseMode
from mtpctl.sync.session import SyncReport

EngineSettings = VllmSettings | SglangSettings

CONCURRENCY = 10_000
"""Calls that one actor may hold at once: one for each response in flight, and control calls that must not queue behind."""


class Replica(Protocol):
    """One engine as a pool sees it. Any call raises EngineDead once the engine is gone."""

    async def generate(self, request: GenerationRequest) -> Sample: ...

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def spec_stats(self) -> SpecStats: ...

    async def speculate(self, drafts: int | None = None) -> dict[str, Any]: ...

    async def health(self) -> Health: ...

    async def shutdown(self) -> None: ...


class RolloutActor:
    """Holds an `Engine` in a process of its own; `start` first. Made a Ray actor by `start_replica`."""

    def __init__(self, settings: EngineSettings, version: int = 0) -> None:
        self._settings = settings
        self._version = version
        self._engine: Any = None

    async def start(self) -> Health:
        """Load the engine that the settings are for: neither is imported elsewhere."""
        if isinstance(self._settings, SglangSettings):
            from mtpctl.rollout.sglang_engine import SglangEngine

            self._engine = await SglangEngine.start(self._settings, version=self._version)
        else:
            from mtpctl.rollout.vllm_engine import VllmEngine

            self._engine = await VllmEngine.start(self._settings, version=self._version)
        return await self.health()

    async def generate(self, request: GenerationRequest) -> Sample:
        """See `Engine.generate`."""
        sample: Sample = await self._engine.generate(request)
        return sample

    async def update(self, manifest: Manifest, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport:
        """See `Engine.update`."""
        report: SyncReport = await self._engine.update(manifest, mode=mode, verify=verify, deadline_s=deadline_s)
        return report

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._engine.resume()

    async def spec_stats(self) -> SpecStats:
        """See `Engine.spec_stats`."""
        stats: SpecStats = await self._engine.spec_stats()
        return stats

    async def speculate(self, drafts: int | None = None) -> dict[str, Any]:
        """See `Engine.speculate`."""
        state: dict[str, Any] = await self._engine.speculate(drafts)
        return state

    async def health(self) -> Health:
        """See `Engine.health`."""
        health: Health = await self._engine.health()
        return health

    async def checksums(self) -> dict[str, str]:
        """See `Engine.checksums`."""
        found: dict[str, str] = await self._engine.checksums()
        return found

    async def pid(self) -> int:
        """Process of the actor."""
        return os.getpid()

    async def shutdown(self) -> None:
        """End the engine; the actor itself is ended by its owner."""
        if self._engine is not None:
            await self._engine.shutdown()


class RayReplica:
    """A `Replica` that is a `RolloutActor` somewhere on the cluster."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self.name = name

    async def _call(self, call: Awaitable[Any]) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await call
        except RayActorError as error:
            raise EngineDead(f"{self.name}: {error}") from error
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None

    async def generate(self, request: GenerationRequest) -> Sample:
        """See `RolloutActor.generate`."""
        sample: Sample = await self._call(self._handle.generate.remote(request))
        return sample

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport:
        """See `RolloutActor.update`."""
        report: SyncReport = await self._call(self._handle.update.remote(manifest, mode, verify, deadline_s))
        return report

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutActor.pause`."""
        await self._call(self._handle.pause.remote(mode))

    async def resume(self) -> None:
        """See `RolloutActor.resume`."""
        await self._call(self._handle.resume.remote())

    async def spec_stats(self) -> SpecStats:
        """See `RolloutActor.spec_stats`."""
        stats: SpecStats = await self._call(self._handle.spec_stats.remote())
        return stats

    async def speculate(self, drafts: int | None = None) -> dict[str, Any]:
        """See `RolloutActor.speculate`."""
        state: dict[str, Any] = await self._call(self._handle.speculate.remote(drafts))
        return state

    async def health(self) -> Health:
        """See `RolloutActor.health`."""
        health: Health = await self._call(self._handle.health.remote())
        return health

    async def checksums(self) -> dict[str, str]:
        """See `RolloutActor.checksums`."""
        found: dict[str, str] = await self._call(self._handle.checksums.remote())
        return found

    async def pid(self) -> int:
        """See `RolloutActor.pid`."""
        return int(await self._call(self._handle.pid.remote()))

    async def shutdown(self) -> None:
        """End the engine and its process."""
        import ray

        try:
            await self._call(self._handle.shutdown.remote())
        except EngineDead:
            return
        ray.kill(self._handle)


async def start_replica(settings: EngineSettings, *, name: str, version: int = 0, options: dict[str, Any] | None = None) -> RayReplica:
    """Start an engine as a Ray actor, and return once it can serve.

    `options` go to Ray (`num_cpus`, `num_gpus`, `scheduling_strategy`, …). Raises what loading the engine raises.
    """
    import ray

    environment: dict[str, Any] = {"env_vars": settings.environment}
    if isinstance(settings, SglangSettings) and settings.python is not None:
        environment["py_executable"] = str(Path(settings.python).expanduser())
    actor = ray.remote(RolloutActor).options(max_concurrency=CONCURRENCY, runtime_env=environment, **(options or {}))
    replica = RayReplica(actor.remote(settings, version), name)
    await replica._call(replica._handle.start.remote())
    return replica
