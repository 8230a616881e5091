"""An engine as a Ray actor, and the replica handle that a pool calls.

A Ray call takes about 0.5 ms, too long for one call per request at hundreds of short responses per second. So requests submitted in the
same iteration of the event loop are sent in one call. Answers are collected by one pending call at a time, which returns all answers that
are available. Every request is answered unless it is cancelled, or its replica dies.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Concatenate, Protocol

from mtpctl.cluster.bundles import ActorLocation, get_current_location
from mtpctl.cluster.process import freeze_heap, make_log_name_variables, redirect_output
from mtpctl.errors import MtpctlError
from mtpctl.rollout.protocol import EngineDead, Health, SpeculationState
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PauseMode
from mtpctl.sync.update import SyncReport

if TYPE_CHECKING:
    from mtpctl.rollout.engine import Engine

EngineSettings = VllmSettings | SglangSettings
Answer = tuple[int, Sample | Exception]
"""The number of a request, and the sample or error of `Engine.generate`."""

CONCURRENCY = 10_000
"""Maximum concurrent calls per actor. It is high because Ray queues further calls, and control calls must not wait behind pending ones."""
MIN_COLLECT_INTERVAL_S = 0.01
"""Minimum seconds between two calls of `collect`. Each call returns all answers of the interval, which saves CPU time in the controller."""


class EngineControl(Protocol):
    """The calls by which a pool controls an engine."""

    async def update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> SyncReport: ...

    async def serve_relay(self, url: str) -> str: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def control_speculation(self, drafts: int | None = None) -> SpeculationState: ...

    async def set_immediate_admission(self, enabled: bool) -> None: ...

    async def health(self) -> Health: ...


class Replica(EngineControl, Protocol):
    """One engine of a pool. Every call raises EngineDead once the engine is lost."""

    async def generate(self, request: GenerationRequest) -> Sample: ...

    async def pid(self) -> int: ...

    async def shutdown(self) -> None: ...


class RolloutActor:
    """Runs an `Engine` in a separate process; `start_replica` makes it a Ray actor. Call `start` first."""

    _engine: Engine

    def __init__(self, settings: EngineSettings) -> None:
        redirect_output()
        self._settings = settings
        self._answers: list[Answer] = []
        self._has_answers = asyncio.Event()
        self._collected_at = float("-inf")
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Load the engine. Only this process imports the engine's package."""
        if isinstance(self._settings, SglangSettings):
            from mtpctl.rollout.sglang.engine import SglangEngine

            self._engine = await SglangEngine.start(self._settings)
        else:
            from mtpctl.rollout.vllm.engine import VllmEngine

            self._engine = await VllmEngine.start(self._settings)
        freeze_heap()

    async def submit(self, requests: list[tuple[int, GenerationRequest]]) -> None:
        """Start generating for these numbered requests. `collect` returns the answers."""
        for number, request in requests:
            self._tasks[number] = task = asyncio.ensure_future(self._generate(number, request))
            task.add_done_callback(lambda _, number=number: self._tasks.pop(number))  # type: ignore[misc]

    async def cancel_requests(self, numbers: list[int]) -> None:
        """Cancel those of these requests that are still in progress, which frees their slots. They get no answer."""
        for number in numbers:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()

    async def _generate(self, number: int, request: GenerationRequest) -> None:
        answer: Sample | Exception
        try:
            answer = await self._engine.generate(request)
        except Exception as error:
            answer = _make_picklable(error)
        self._answers.append((number, answer))
        self._has_answers.set()

    async def collect(self) -> list[Answer]:
        """Wait for an answer, and return all answers since the last call."""
        await self._has_answers.wait()
        if (remaining := self._collected_at + MIN_COLLECT_INTERVAL_S - time.monotonic()) > 0:
            await asyncio.sleep(remaining)
        self._collected_at = time.monotonic()
        self._has_answers.clear()
        answers, self._answers = self._answers, []
        return answers

    async def control(self, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call a method of `EngineControl`."""
        return await getattr(self._engine, method)(*args, **kwargs)

    async def pid(self) -> int:
        return os.getpid()

    async def location(self) -> ActorLocation:
        return get_current_location()

    async def shutdown(self) -> None:
        """End the engine; the owner ends the actor."""
        if hasattr(self, "_engine"):
            await self._engine.shutdown()


def _make_picklable(error: Exception) -> Exception:
    """Return an error that the caller can unpickle without the engine's packages, with the traceback as a note.

    Errors from other packages become a RuntimeError that names the type.
    """
    is_importable = type(error).__module__.partition(".")[0] in ("builtins", "mtpctl")
    picklable_error = error if is_importable else RuntimeError(f"{type(error).__name__}: {error}")
    picklable_error.add_note("".join(traceback.format_exception(error)))
    return picklable_error


def _describe_death(error: Exception) -> str:
    """The first line of Ray's error for a dead actor, with the name of the actor's log. Ray's full message can be long."""
    message = str(error).strip()
    pid = re.search(r"^\s*pid: (\d+)$", message, re.MULTILINE)
    return message.partition("\n")[0] + (f" Its last output is in Ray's logs on its host, worker-*-{pid[1]}.err" if pid else "")


def _forward_to_engine[**P, T](
    method: Callable[Concatenate[EngineControl, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RayReplica, P], Coroutine[Any, Any, T]]:
    """Create a method of `RayReplica` that calls the engine's method of the same name in the actor."""

    async def call(self: RayReplica, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._call(RolloutActor.control, method.__name__, args, kwargs)  # type: ignore[arg-type,assignment]
        return result

    return call


class RayReplica:
    """A `Replica` whose engine is a `RolloutActor`. Nothing else may call the actor's `collect`."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self.name = name
        self._numbers = count()
        self._futures: dict[int, asyncio.Future[Sample]] = {}
        self._unsent_requests: list[tuple[int, GenerationRequest]] = []
        self._cancelled_numbers: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_collecting = False

    update = _forward_to_engine(EngineControl.update)
    serve_relay = _forward_to_engine(EngineControl.serve_relay)
    pause = _forward_to_engine(EngineControl.pause)
    control_speculation = _forward_to_engine(EngineControl.control_speculation)
    set_immediate_admission = _forward_to_engine(EngineControl.set_immediate_admission)
    health = _forward_to_engine(EngineControl.health)

    async def _call[**P, T](self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self._handle, method.__name__).remote(*args, **kwargs)  # type: ignore[no-any-return]
        except RayActorError as error:
            raise EngineDead(f"{self.name}: {_describe_death(error)}") from error
        except RayTaskError as error:
            # Errors of mtpctl are raised unchanged, because `as_instanceof_cause` adds the actor's traceback to the message.
            raise error.cause if isinstance(error.cause, MtpctlError) else error.as_instanceof_cause() from error

    async def generate(self, request: GenerationRequest) -> Sample:
        """See `Engine.generate`. If the caller is cancelled, the engine cancels the request."""
        number = next(self._numbers)
        self._futures[number] = asyncio.get_running_loop().create_future()
        self._unsent_requests.append((number, request))
        if len(self._unsent_requests) == 1:
            self._start_task(self._send())
        if not self._is_collecting:
            self._is_collecting = True
            self._start_task(self._collect())
        try:
            return await self._futures[number]
        except asyncio.CancelledError:
            self._cancelled_numbers.append(number)
            if len(self._cancelled_numbers) == 1:
                self._start_task(self._cancel_requests())
            raise
        finally:
            del self._futures[number]

    def _start_task(self, coroutine: Coroutine[object, None, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(coroutine))
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Submit all requests that were added until this task runs, in one call."""
        requests, self._unsent_requests = self._unsent_requests, []
        try:
            await self._call(RolloutActor.submit, requests)
        except Exception as error:
            self._fail(error, [number for number, _ in requests])

    async def _cancel_requests(self) -> None:
        """Cancel all cancelled requests in the actor, in one call."""
        numbers, self._cancelled_numbers = self._cancelled_numbers, []
        with suppress(EngineDead):
            await self._call(RolloutActor.cancel_requests, numbers)

    async def _collect(self) -> None:
        """Pass answers to their callers while any caller waits."""
        try:
            while self._futures:
                for number, answer in await self._call(RolloutActor.collect):
                    if (future := self._futures.get(number)) is None or future.done():
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        if answer.routes is not None:
                            # Ray's array is a view into its object store, which would keep all answers of this call alive.
                            answer.routes = answer.routes.copy()
                        future.set_result(answer)
                # The callers remove their futures when they run next.
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error, list(self._futures))
        finally:
            self._is_collecting = False

    def _fail(self, error: Exception, numbers: list[int]) -> None:
        for number in numbers:
            if (future := self._futures.get(number)) is not None and not future.done():
                future.set_exception(error)

    async def pid(self) -> int:
        return await self._call(RolloutActor.pid)

    async def location(self) -> ActorLocation:
        return await self._call(RolloutActor.location)

    async def shutdown(self) -> None:
        """End the engine and its process."""
        import ray

        try:
            await self._call(RolloutActor.shutdown)
        except EngineDead:
            return
        finally:
            # The actor is killed even if the call hangs and is cancelled, because its replacement needs the resources.
            ray.kill(self._handle)


async def start_replica(settings: EngineSettings, *, name: str, options: Mapping[str, object] | None = None) -> RayReplica:
    """Start an engine as a Ray actor, and return once it can serve.

    `options` are Ray's (`num_cpus`, `num_gpus`, `scheduling_strategy`, …). Raises the errors of loading the engine.
    """
    import ray

    runtime_env: dict[str, object] = {"env_vars": settings.environment | make_log_name_variables(name)}
    if isinstance(settings, SglangSettings) and settings.python is not None:
        runtime_env["py_executable"] = settings.python
    actor_class = ray.remote(RolloutActor).options(max_concurrency=CONCURRENCY, runtime_env=runtime_env, **(options or {}))
    replica = RayReplica(actor_class.remote(settings), name)
    try:
        await replica._call(RolloutActor.start)
    except BaseException:
        ray.kill(replica._handle)
        raise
    return replica
