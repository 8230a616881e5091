"""An engine as a Ray actor, and the handle that a pool routes to.

A call to an actor and its answer take about half a millisecond, and at hundreds of short responses a second the engine would lack that
time. So requests that are submitted in the same turn of the event loop go in one call, and one call at a time waits in the actor for
answers and returns all that there are. Every request is answered, or its replica is dead.
"""

from __future__ import annotations

import asyncio
import os
import re
import traceback
from collections.abc import Awaitable, Coroutine, Mapping
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Protocol, cast

from mtpctl.cluster.bundles import ActorLocation, current_location
from mtpctl.cluster.process import name_for_one, settle_heap, write_to_run
from mtpctl.errors import MtpctlError
from mtpctl.rollout.protocol import EngineDead, Health, SpecStats, SpeculationState
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PauseMode
from mtpctl.sync.update import SyncReport

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from mtpctl.rollout.engine import Engine

EngineSettings = VllmSettings | SglangSettings
Answer = tuple[int, Sample | Exception]
"""The number of a request, and what `Engine.generate` returned or raised for it."""

CONCURRENCY = 10_000
"""Calls that one actor may run at once. Control calls must not wait for the call that collects answers."""


class Replica(Protocol):
    """One engine as a pool sees it. Any call raises EngineDead once the engine is gone."""

    async def generate(self, request: GenerationRequest) -> Sample: ...

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def spec_stats(self) -> SpecStats: ...

    async def speculate(self, drafts: int | None = None) -> SpeculationState: ...

    async def health(self) -> Health: ...

    async def shutdown(self) -> None: ...


class RolloutActor:
    """Holds an `Engine` in a process of its own; `start_replica` makes it a Ray actor. Call `start` before anything else.

    Control calls do what the engine's method of the same name does.
    """

    _engine: Engine

    def __init__(self, settings: EngineSettings) -> None:
        write_to_run()
        self._settings = settings
        self._answers: list[Answer] = []
        self._answered = asyncio.Event()
        self._working: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> Health:
        """Load the engine. Neither engine's package is imported in another process."""
        if isinstance(self._settings, SglangSettings):
            from mtpctl.rollout.sglang.engine import SglangEngine

            self._engine = await SglangEngine.start(self._settings)
        else:
            from mtpctl.rollout.vllm.engine import VllmEngine

            self._engine = await VllmEngine.start(self._settings)
        settle_heap()
        return await self.health()

    async def submit(self, requests: list[tuple[int, GenerationRequest]]) -> None:
        """Start generating for these requests, each of which has a number. `collect` returns the answers."""
        for number, request in requests:
            self._working[number] = task = asyncio.ensure_future(self._generate(number, request))
            task.add_done_callback(lambda _, number=number: self._working.pop(number))  # type: ignore[misc]

    async def drop(self, numbers: list[int]) -> None:
        """Cancel those of these requests that are under way, so that their places are free: nobody waits for them any more."""
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

    async def collect(self) -> list[Answer]:
        """Wait for an answer, and return all answers since the last call."""
        await self._answered.wait()
        self._answered.clear()
        answers, self._answers = self._answers, []
        return answers

    async def update(self, manifest: Manifest, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport:
        return await self._engine.update(manifest, mode=mode, verify=verify, deadline_s=deadline_s)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def spec_stats(self) -> SpecStats:
        return await self._engine.spec_stats()

    async def speculate(self, drafts: int | None = None) -> SpeculationState:
        return await self._engine.speculate(drafts)

    async def health(self) -> Health:
        return await self._engine.health()

    async def pid(self) -> int:
        return os.getpid()

    async def here(self) -> ActorLocation:
        """Where the actor is."""
        return current_location()

    async def shutdown(self) -> None:
        """End the engine; the owner ends the actor."""
        if hasattr(self, "_engine"):
            await self._engine.shutdown()


def _portable(error: Exception) -> Exception:
    """An error that the caller's process can unpickle, which may lack the engine's packages; the traceback goes along as a note.

    An error of another package's type becomes a RuntimeError that names the type.
    """
    ours = type(error).__module__.partition(".")[0] in ("builtins", "mtpctl")
    found = error if ours else RuntimeError(f"{type(error).__name__}: {error}")
    found.add_note("".join(traceback.format_exception(error)))
    return found


def _last_seen(error: Exception) -> str:
    """Ray's error for a dead actor in one line, with the name of the actor's log; Ray writes paragraphs where it knows no cause."""
    message = str(error).strip()
    pid = re.search(r"^\s*pid: (\d+)$", message, re.MULTILINE)
    return message.partition("\n")[0] + (f" Its last words are in Ray's logs on its host, worker-*-{pid[1]}.err" if pid else "")


class _Remote[**P, T](Protocol):
    """A method of a Ray actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...


class RolloutHandle(Protocol):
    """Ray's handle of a `RolloutActor`."""

    start: _Remote[[], Health]
    submit: _Remote[[list[tuple[int, GenerationRequest]]], None]
    drop: _Remote[[list[int]], None]
    collect: _Remote[[], list[Answer]]
    update: _Remote[[Manifest, PauseMode, bool, float], SyncReport]
    pause: _Remote[[PauseMode], None]
    resume: _Remote[[], None]
    spec_stats: _Remote[[], SpecStats]
    speculate: _Remote[[int | None], SpeculationState]
    health: _Remote[[], Health]
    pid: _Remote[[], int]
    here: _Remote[[], ActorLocation]
    shutdown: _Remote[[], None]


class RayReplica:
    """A `Replica` that is a `RolloutActor` somewhere on the cluster. Nothing else may call the actor's `collect`."""

    def __init__(self, handle: RolloutHandle, name: str) -> None:
        self._handle = handle
        self.name = name
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Sample]] = {}
        self._unsent: list[tuple[int, GenerationRequest]] = []
        self._given_up: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting = False

    async def _call[T](self, call: Awaitable[T]) -> T:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await call
        except RayActorError as error:
            raise EngineDead(f"{self.name}: {_last_seen(error)}") from error
        except RayTaskError as error:
            # Ray's own instance of the cause has the actor's traceback in its message.
            raise error.cause if isinstance(error.cause, MtpctlError) else error.as_instanceof_cause() from error

    async def generate(self, request: GenerationRequest) -> Sample:
        """Generate as `Engine.generate` does. If the caller is cancelled, the engine gives the request up too."""
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
            self._given_up.append(number)
            if len(self._given_up) == 1:
                self._begin(self._drop())
            raise
        finally:
            del self._waiting[number]

    def _begin(self, work: Coroutine[object, None, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Submit all requests that were made before this task got its turn, in one call."""
        requests, self._unsent = self._unsent, []
        try:
            await self._call(self._handle.submit.remote(requests))
        except Exception as error:
            self._fail(error, [number for number, _ in requests])

    async def _drop(self) -> None:
        """Drop all requests that were given up before this task got its turn, in one call."""
        numbers, self._given_up = self._given_up, []
        with suppress(EngineDead):
            await self._call(self._handle.drop.remote(numbers))

    async def _collect(self) -> None:
        """Pass answers to their callers for as long as any caller waits."""
        try:
            while self._waiting:
                for number, answer in await self._call(self._handle.collect.remote()):
                    if (waiting := self._waiting.get(number)) is None or waiting.done():
                        continue
                    if isinstance(answer, Exception):
                        waiting.set_exception(answer)
                    else:
                        if answer.routes is not None:
                            # Ray's array is a view into its object store, where it would keep all answers of this call for as long.
                            answer.routes = answer.routes.copy()
                        waiting.set_result(answer)
                # Callers that have their answer leave `_waiting` before the next check.
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
        return await self._call(self._handle.update.remote(manifest, mode, verify, deadline_s))

    async def pause(self, mode: PauseMode) -> None:
        await self._call(self._handle.pause.remote(mode))

    async def resume(self) -> None:
        await self._call(self._handle.resume.remote())

    async def spec_stats(self) -> SpecStats:
        return await self._call(self._handle.spec_stats.remote())

    async def speculate(self, drafts: int | None = None) -> SpeculationState:
        return await self._call(self._handle.speculate.remote(drafts))

    async def health(self) -> Health:
        return await self._call(self._handle.health.remote())

    async def pid(self) -> int:
        return await self._call(self._handle.pid.remote())

    async def here(self) -> ActorLocation:
        return await self._call(self._handle.here.remote())

    async def shutdown(self) -> None:
        """End the engine and its process."""
        import ray

        try:
            await self._call(self._handle.shutdown.remote())
        except EngineDead:
            return
        finally:
            # Also where it hangs and the caller gives up: the replica that replaces it needs its resources.
            ray.kill(cast("ActorHandle[RolloutActor]", self._handle))


async def start_replica(settings: EngineSettings, *, name: str, options: Mapping[str, object] | None = None) -> RayReplica:
    """Start an engine as a Ray actor, and return once it can serve.

    `options` go to Ray (`num_cpus`, `num_gpus`, `scheduling_strategy`, …). Raises what loading the engine raises.
    """
    import ray

    environment: dict[str, object] = {"env_vars": settings.environment | name_for_one(name)}
    if isinstance(settings, SglangSettings) and settings.python is not None:
        environment["py_executable"] = settings.python
    remote = ray.remote(RolloutActor).options(max_concurrency=CONCURRENCY, runtime_env=environment, **(options or {}))
    actor = cast("ActorHandle[RolloutActor]", remote.remote(settings))
    replica = RayReplica(cast(RolloutHandle, actor), name)
    try:
        await replica._call(replica._handle.start.remote())
    except BaseException:
        ray.kill(actor)
        raise
    return replica
