"""An engine as a Ray actor, and the handle that a pool routes to.

A call to an actor and its answer cost about half a millisecond, which at hundreds of short responses a second is time that the engine
misses. So requests that are sent in the same turn of the event loop go in one call, and answers come back as many as there are at once:
one call waits in the actor for the next ones. Nothing is told of in two places: a request is answered, or its replica is dead.
"""

from __future__ import annotations

import asyncio
import os
import re
import traceback
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from mtpctl.cluster.heap import settle_heap
from mtpctl.errors import MtpctlError
from mtpctl.rollout.protocol import EngineDead, Health, SpecStats
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.rollout.vllm.settings import VllmSettings
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
        self._answers: list[tuple[int, Sample | Exception]] = []
        self._answered = asyncio.Event()
        self._working: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> Health:
        """Load the engine that the settings are for: neither is imported elsewhere."""
        if isinstance(self._settings, SglangSettings):
            from mtpctl.rollout.sglang.engine import SglangEngine

            self._engine = await SglangEngine.start(self._settings, version=self._version)
        else:
            from mtpctl.rollout.vllm.engine import VllmEngine

            self._engine = await VllmEngine.start(self._settings, version=self._version)
        settle_heap()
        return await self.health()

    async def submit(self, requests: list[tuple[int, GenerationRequest]]) -> None:
        """Begin with these, each under a number. `collect` hands the answers out."""
        for number, request in requests:
            self._working[number] = task = asyncio.ensure_future(self._generate(number, request))
            task.add_done_callback(lambda _, number=number: self._working.pop(number))  # type: ignore[misc]

    async def drop(self, numbers: list[int]) -> None:
        """Nobody waits for these requests any more: end those that are under way, so that their places are free."""
        for number in numbers:
            if (task := self._working.get(number)) is not None:
                task.cancel()

    async def _generate(self, number: int, request: GenerationRequest) -> None:
        answer: Sample | Exception
        try:
            answer = await self._engine.generate(request)
        except Exception as error:
            answer = _portable(error)
        self._answers.append((number, answer))
        self._answered.set()

    async def collect(self) -> list[tuple[int, Sample | Exception]]:
        """The answers since the last call, at least one: what `Engine.generate` returned or raised, by the request's number."""
        await self._answered.wait()
        self._answered.clear()
        found, self._answers = self._answers, []
        return found

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


def _portable(error: Exception) -> Exception:
    """The error as the caller's process can read it, which has not all of the engine's packages: of another's type, its words.

    Where it came from goes along as a note.
    """
    ours = type(error).__module__.partition(".")[0] in ("builtins", "mtpctl")
    found = error if ours else RuntimeError(f"{type(error).__name__}: {error}")
    found.add_note("".join(traceback.format_exception(error)))
    return found


def _last_seen(error: Exception) -> str:
    """Ray's news of a dead actor in one line: it takes paragraphs for causes that it does not know. What the engine said is in its log."""
    news = str(error).strip()
    pid = re.search(r"^\s*pid: (\d+)$", news, re.MULTILINE)
    return news.partition("\n")[0] + (f" Its last words are in Ray's logs on its host, worker-*-{pid[1]}.err" if pid else "")


class RayReplica:
    """A `Replica` that is a `RolloutActor` somewhere on the cluster, and its only handle: it takes all answers."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self.name = name
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Sample]] = {}
        self._unsent: list[tuple[int, GenerationRequest]] = []
        self._left: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting = False

    async def _call(self, call: Awaitable[Any]) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await call
        except RayActorError as error:
            raise EngineDead(f"{self.name}: {_last_seen(error)}") from error
        except RayTaskError as error:
            # Ray's own instance of the cause has the actor's traceback in its message.
            raise error.cause if isinstance(error.cause, MtpctlError) else error.as_instanceof_cause() from error

    async def generate(self, request: GenerationRequest) -> Sample:
        """See `Engine.generate`. Where the caller gives up, the engine does too."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._unsent.append((number, request))
        if len(self._unsent) == 1:
            self._begin(self._send())
        if not self._collecting:
            self._collecting = True
            self._begin(self._collect())
        try:
            return await self._waiting[number]
        except asyncio.CancelledError:
            self._left.append(number)
            if len(self._left) == 1:
                self._begin(self._drop())
            raise
        finally:
            del self._waiting[number]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Everything that was asked for before this task got its turn, in one call."""
        requests, self._unsent = self._unsent, []
        try:
            await self._call(self._handle.submit.remote(requests))
        except Exception as error:
            self._fail(error, [number for number, _ in requests])

    async def _drop(self) -> None:
        """Everything that was given up before this task got its turn, in one call."""
        numbers, self._left = self._left, []
        with suppress(EngineDead):
            await self._call(self._handle.drop.remote(numbers))

    async def _collect(self) -> None:
        """Hand answers out for as long as any is awaited."""
        try:
            while self._waiting:
                for number, answer in await self._call(self._handle.collect.remote()):
                    if (waiting := self._waiting.get(number)) is None or waiting.done():
                        continue
                    if isinstance(answer, Exception):
                        waiting.set_exception(answer)
                    else:
                        waiting.set_result(answer)
                # Those who were answered leave before the next look.
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error, list(self._waiting))
        finally:
            self._collecting = False

    def _fail(self, error: Exception, numbers: list[int]) -> None:
        for number in numbers:
            if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                waiting.set_exception(error)

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
        finally:
            # Also where it hangs and its caller gives up: what it holds is needed by the one that takes its place.
            ray.kill(self._handle)


async def start_replica(settings: EngineSettings, *, name: str, version: int = 0, options: dict[str, Any] | None = None) -> RayReplica:
    """Start an engine as a Ray actor, and return once it can serve.

    `options` go to Ray (`num_cpus`, `num_gpus`, `scheduling_strategy`, …). Raises what loading the engine raises.
    """
    import ray

    environment: dict[str, Any] = {"env_vars": settings.environment}
    if isinstance(settings, SglangSettings) and settings.python is not None:
        environment["py_executable"] = settings.python
    actor = ray.remote(RolloutActor).options(max_concurrency=CONCURRENCY, runtime_env=environment, **(options or {}))
    replica = RayReplica(actor.remote(settings, version), name)
    try:
        await replica._call(replica._handle.start.remote())
    except BaseException:
        ray.kill(replica._handle)
        raise
    return replica
