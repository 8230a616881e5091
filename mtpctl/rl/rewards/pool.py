"""Runs a reward function in worker processes: `Pool` schedules calls, and `Rewarder` applies the recipe.

A plain function runs in up to `workers` processes, one call each, and in more while calls hang. A coroutine runs in one process, up to
`workers` calls at once. A coroutine that exceeds its time limit while it awaits is cancelled. Any other call that exceeds the limit is
computing or blocking: its process is killed and replaced, and the other calls of that process are restarted.

A hung call must not delay other calls, even before its time limit. A call that takes much longer than usual no longer counts against the
number of processes, and a call that uses much more CPU time than usual runs at idle priority. After the first such call, a spare process is
kept ready.

Existing executors do not provide this. With pebble 5.2 and a time limit of 3 s, 200 calls after 3 hung calls take 3.2 s instead of 0.2 s.
Its errors do not name the line that hangs, and child processes of hung calls survive. loky has no time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import cast

from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.reward import RewardConfig, code_reference
from mtpctl.rl.rewards.function import Answered, Outcome, Result, Role
from mtpctl.rl.rewards.watch import (
    RecentDurations,
    cpu_seconds,
    has_free_memory,
    is_running,
    restore_priority,
    trace_location,
    use_idle_priority,
)
from mtpctl.rl.rewards.worker import REPORT_BLOCKING, TRACE, BlockingCall, Channel, Job, LateCall, Ready, Request, Template, descendants
from mtpctl.samples import Sample

MAX_WORKERS = 16
MAX_COROUTINES = 256
"""Defaults of `reward.workers`: maximum number of processes for a plain function, if there are as many CPUs, and of concurrent calls of a
coroutine."""
MAX_EXTRA_WORKERS = 256
"""Maximum number of additional processes, which start because of long or waiting calls."""

_TICK_S = 0.01
_IDLE_CHECK_S = 0.1  # age of a call after which the pool checks whether it computes or only waits
_GRACE_S = 1.0  # for a worker to report the location of a late call; for a coroutine worker to report a late call by itself
_CONCURRENT_STARTS, _MAX_FAILED_STARTS = 8, 5


@dataclass(slots=True, eq=False)
class _Call:
    request: Request
    result: asyncio.Future[Outcome]
    submitted: float
    started: float = 0.0


@dataclass(slots=True, eq=False)
class _Worker:
    """A process and its calls.

    Attributes:
        trace: see `Ready`.
        reader: task that reads its messages.
        is_long: the current call takes much longer than usual, so another process may start in its place.
        is_waiting: the current call only waits, so two more processes may start.
        is_deprioritized: the current call uses much more CPU time than usual and runs at idle priority.
        cpu_before: CPU seconds of the process when the call started.
        next_check: time of the next check of `is_waiting` and `is_deprioritized`.
        trace_requested: time at which the pool requested the location of a late call; 0 before.
    """

    channel: Channel
    pid: int
    trace: int
    reader: asyncio.Task[None] | None = None
    calls: dict[int, _Call] = field(default_factory=dict)
    completed: int = 0
    is_long: bool = False
    is_waiting: bool = False
    is_deprioritized: bool = False
    cpu_before: float = 0.0
    next_check: float = 0.0
    trace_requested: float = 0.0


class Pool:
    """Runs a function in worker processes. Call `start` before the first `call`, and `close` at the end, all on one event loop."""

    def __init__(
        self,
        reference: str,
        args: Mapping[str, object],
        *,
        workers: int | None,
        timeout_s: float,
        log: Path | None = None,
        role: Role | None = None,
    ) -> None:
        """`workers`: maximum number of processes, or of concurrent calls of a coroutine; None: the default, and more
        processes while calls only wait. `log`: file for the output of processes; default: standard error.

        `role`: the purpose of the function; default: the run's reward.
        """
        self._job = Job(reference, args, timeout_s, role or Role.reward())
        self._reference, self._timeout_s, self._log = reference, timeout_s, log
        self._configured_workers = workers
        self._max_workers = workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self._calls_per_worker = 1
        self._template: Template | None = None
        self._unforked: list[subprocess.Popen[bytes]] = []  # workers that are not forks, each of which loaded the function
        self._workers: list[_Worker] = []
        self._available: list[_Worker] = []
        self._queue: deque[_Call] = deque()
        self._request_numbers = itertools.count()
        self._durations = RecentDurations()
        self._spare: _Worker | None = None
        self._wants_spare = False  # True after the first long call
        self._starting: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._timer: asyncio.TimerHandle | None = None
        self._forking = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Load the function in a first process. Raises UserError if it cannot be loaded or called."""
        self._template = await Template.start(self._job, self._log)
        if self._template.loaded.coroutine:
            self._calls_per_worker, self._max_workers = self._configured_workers or MAX_COROUTINES, 1

    async def call(self, response: str, problem: Answered, sample: Sample) -> Outcome:
        """Run the function on one response. Raises the last error if no process can be started."""
        request = Request(next(self._request_numbers), response, problem, sample)
        call = _Call(request, asyncio.get_running_loop().create_future(), submitted=time.monotonic())
        self._queue.append(call)
        self._dispatch()
        return await call.result

    async def close(self) -> None:
        """Kill all processes and cancel pending calls."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for call in [*self._queue, *(call for worker in self._workers for call in worker.calls.values())]:
            call.result.cancel()
        for worker in [*self._workers, *([self._spare] if self._spare else [])]:
            self._kill(worker)
        if self._template is not None:
            self._template.close()
        for process in self._unforked:
            process.wait()

    # ---------------------------------------------------------------------------------------------- starting processes

    def _start_workers(self) -> None:
        """Start a process for each queued call, within the limits."""
        allowed = self._allowed_workers()
        while len(self._starting) < min(len(self._queue), _CONCURRENT_STARTS):
            count = len(self._workers) + len(self._starting)
            if count >= allowed or (count >= self._max_workers and not has_free_memory()):
                return
            if self._spare is not None:
                spare, self._spare = self._spare, None
                self._add_worker(spare)
                return
            self._schedule_start()

    def _allowed_workers(self) -> int:
        """Number of processes allowed now: the maximum, plus one for each long call and two for each waiting call."""
        if self._calls_per_worker > 1:
            return self._max_workers
        long, waiting = sum(w.is_long for w in self._workers), sum(w.is_waiting for w in self._workers)
        # Two processes for each waiting call, so that their number doubles with each round until it is sufficient.
        return self._max_workers + min(long + 2 * waiting, MAX_EXTRA_WORKERS)

    def _keep_spare(self) -> None:
        """Keep a spare worker process, so a hung call can be replaced without startup delay."""
        forkable = self._template is not None and self._template.loaded.forkable
        missing = self._wants_spare and self._spare is None and not self._starting and not self._failed_starts
        if missing and forkable and has_free_memory():
            self._schedule_start()

    def _schedule_start(self) -> None:
        task = asyncio.create_task(self._start_worker())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_worker(self) -> None:
        channel: Channel | None = None
        try:
            async with self._forking:
                if self._template is None or not self._template.is_alive:
                    self._template = await Template.start(self._job, self._log)
                connection, template = self._template.start_worker(), self._template
                if not template.loaded.forkable:
                    self._unforked = [process for process in self._unforked if process.poll() is None] + [template.process]
                    self._template = None
            channel = await Channel.open(connection)
            ready = cast(Ready, await channel.receive())
        except asyncio.CancelledError:
            if channel is not None:
                channel.close()
            raise
        except Exception as error:
            self._failed_starts += 1
            if self._failed_starts < _MAX_FAILED_STARTS:
                self._keep_ticking()  # retries
                return
            if isinstance(error, EOFError):
                error = RuntimeFailure(f"{self._job.role.function}: no process for {self._reference} could be started; see its output")
            while self._queue:
                if not (call := self._queue.popleft()).result.done():
                    call.result.set_exception(error)
            return
        self._failed_starts = 0
        worker = _Worker(channel, ready.pid, ready.trace)
        worker.reader = asyncio.create_task(self._read(worker))
        if self._wants_spare and self._spare is None and len(self._workers) >= self._allowed_workers():
            self._spare = worker
        else:
            self._add_worker(worker)

    def _add_worker(self, worker: _Worker) -> None:
        self._workers.append(worker)
        self._available.append(worker)
        self._dispatch()

    # --------------------------------------------------------------------------------------------------- running calls

    def _dispatch(self) -> None:
        while self._queue and self._available:
            call = self._queue.popleft()
            if call.result.done():  # cancelled
                continue
            worker = self._available[-1]
            worker.calls[call.request.number] = call
            if len(worker.calls) == self._calls_per_worker:
                self._available.pop()
            call.started = worker.next_check = time.monotonic()
            worker.cpu_before = cpu_seconds([worker.pid]) if self._calls_per_worker == 1 else 0.0
            try:
                worker.channel.send(call.request)
            except Exception as error:  # a problem that cannot be pickled
                self._finish(worker, call, None, {}, f"{call.request.problem.prompt_id} cannot be sent to a process: {error}")
        if self._queue:
            self._start_workers()
        self._keep_spare()
        self._keep_ticking()

    async def _read(self, worker: _Worker) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._handle_message(worker, await worker.channel.receive())
        self._handle_exit(worker)

    def _handle_message(self, worker: _Worker, message: object) -> None:
        if isinstance(message, BlockingCall):
            blocking = None if message.number is None else worker.calls.get(message.number)
            self._kill_for_timeout(
                worker, [blocking] if blocking is not None else self._overdue_calls(worker, time.monotonic()), message.location
            )
            return
        timed_out = isinstance(message, LateCall)
        if isinstance(message, LateCall):
            message = (message.number, None, {}, self._timeout_error(message.location))
        number, reward, parts, error = cast(tuple[int, *Result], message)
        if (call := worker.calls.get(number)) is None:
            return
        self._finish(worker, call, reward, parts, error, late=timed_out)
        worker.completed += 1
        self._dispatch()

    def _finish(
        self, worker: _Worker, call: _Call, reward: float | None, parts: dict[str, float], error: str, *, late: bool = False
    ) -> None:
        """Remove the call from its worker, and set its result."""
        now, was_full = time.monotonic(), len(worker.calls) == self._calls_per_worker
        del worker.calls[call.request.number]
        if self._calls_per_worker == 1:
            self._durations.add(now - call.started, max(cpu_seconds([worker.pid]) - worker.cpu_before, 0.0), worker.completed)
        if not call.result.done():
            call.result.set_result(Outcome(reward, parts, error, late, now - call.submitted))
        if worker not in self._workers:
            return
        # If a stack was requested, the worker's trace file contains the stack of this call, so the next call cannot use it.
        has_old_trace = worker.trace_requested and self._calls_per_worker == 1
        if has_old_trace or (worker.is_deprioritized and not restore_priority(worker.pid)):
            self._kill(worker)
            return
        worker.is_long = worker.is_waiting = worker.is_deprioritized = False
        if was_full:
            self._available.append(worker)

    def _handle_exit(self, worker: _Worker) -> None:
        self._remove_worker(worker)
        for call in list(worker.calls.values()):
            self._finish(worker, call, None, {}, f"{self._short_reference()}: the process that ran it died; see its output")
        self._dispatch()

    def _kill_for_timeout(self, worker: _Worker, late: list[_Call], location: str = "") -> None:
        """Kill a worker because of its `late` calls. Its other calls are put back at the front of the queue."""
        self._kill(worker)
        for call in late:
            self._finish(worker, call, None, {}, self._timeout_error(location), late=True)
        self._queue.extendleft(reversed(worker.calls.values()))
        worker.calls.clear()
        self._dispatch()

    def _kill(self, worker: _Worker) -> None:
        self._remove_worker(worker)
        children = descendants(worker.pid)
        if worker.reader is not None:
            worker.reader.cancel()
        worker.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        for pid in children:  # including those in other sessions
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _remove_worker(self, worker: _Worker) -> None:
        if worker is self._spare:
            self._spare = None
            return
        self._workers.remove(worker)
        if worker in self._available:
            self._available.remove(worker)

    def _timeout_error(self, location: str) -> str:
        """`judge.py:12: score took more than 30 s (reward.timeout_s)`; `location` may be empty."""
        function = f"{location}: {self._reference.rpartition(':')[2]}" if location else self._short_reference()
        return f"{function} took more than {self._timeout_s:g} s ({self._job.role.seconds})"

    def _short_reference(self) -> str:
        source, _, name = self._reference.rpartition(":")
        return f"{Path(source).name if source.endswith('.py') else source}:{name}"

    # ------------------------------------------------------------------------------------------------- watching calls

    def _keep_ticking(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        busy = [worker for worker in self._workers if worker.calls]
        for worker in busy:
            if overdue := self._overdue_calls(worker, now):
                if not worker.trace_requested:
                    worker.trace_requested = now
                    self._request_location(worker)
                    continue
                location = trace_location(worker.pid, worker.trace) if self._calls_per_worker == 1 else ""
                if location or now - worker.trace_requested > _GRACE_S:
                    self._kill_for_timeout(worker, overdue, location)
            elif self._calls_per_worker == 1:
                self._check_usage(worker, now)
        if self._queue:
            self._start_workers()
        self._keep_spare()
        if busy or self._queue:
            self._keep_ticking()

    def _request_location(self, worker: _Worker) -> None:
        """Make the worker report which call is late, and where it is."""
        if self._calls_per_worker > 1:
            worker.channel.send(REPORT_BLOCKING)
            return
        if worker.is_deprioritized:
            restore_priority(worker.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, TRACE)

    def _overdue_calls(self, worker: _Worker, now: float) -> list[_Call]:
        limit = self._timeout_s + (_GRACE_S if self._calls_per_worker > 1 else 0.0)
        return [call for call in worker.calls.values() if now - call.started > limit]

    def _check_usage(self, worker: _Worker, now: float) -> None:
        """Compare the duration and CPU time of the worker's call with recent calls, and update the worker's flags."""
        (call,) = worker.calls.values()
        age = now - call.started
        worker.is_long = worker.is_long or age > self._durations.max_seconds(worker.completed)
        if not worker.is_deprioritized and now >= worker.next_check:
            pids = [worker.pid]
            if age > _IDLE_CHECK_S:
                pids, worker.next_check = [worker.pid, *descendants(worker.pid)], now + _IDLE_CHECK_S / 2
                worker.is_waiting = self._configured_workers is None and not worker.is_long and not any(map(is_running, pids))
            if cpu_seconds(pids) - worker.cpu_before > self._durations.max_cpu_seconds(worker.completed):
                worker.is_long = worker.is_deprioritized = True
                use_idle_priority(pids)
        self._wants_spare = self._wants_spare or worker.is_long


class Rewarder:
    """Rewards responses with the function that the recipe names: `async with Rewarder(recipe.reward) as reward: await reward(…)`.

    `report` receives one line for the first failure at each location of the function; metrics count all failures. `log`: file for the
    output of the function.
    """

    def __init__(self, config: RewardConfig, *, report: Callable[[str], None] = lambda line: None, log: Path | None = None) -> None:
        self.config, self._report = config, report
        self._reported: set[str] = set()
        self._pool = Pool(code_reference(config.function), config.args, workers=config.workers, timeout_s=config.timeout_s, log=log)

    async def __aenter__(self) -> Rewarder:
        """Load the function. Raises UserError if it cannot be loaded, or called with the recipe's arguments."""
        try:
            await self._pool.start()
        except BaseException:
            await self._pool.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pool.close()

    async def attempt(self, response: str, problem: Answered, sample: Sample) -> Outcome:
        """Reward one response. Ignores `reward.on_error`."""
        return await self._pool.call(response, problem, sample)

    async def __call__(self, response: str, problem: Answered, sample: Sample) -> Outcome:
        """Reward one response. After a failure, `reward.on_error` selects reward 0, no reward, or RuntimeFailure."""
        outcome = await self.attempt(response, problem, sample)
        if not outcome.error:
            return outcome
        on_error, failure = self.config.on_error, f"{outcome.error} ({problem.prompt_id})"
        if on_error == "stop":
            raise RuntimeFailure(f"reward.function: {failure}; fix it, or set reward.on_error: zero or drop")
        if (location := outcome.error.partition(": ")[0]) not in self._reported:
            self._reported.add(location)
            effect = "its group is left out" if on_error == "drop" else "the response counts as 0"
            self._report(f"{failure}: {effect} (reward.on_error: {on_error}); further failures are counted in reward/errors")
        return outcome if on_error == "drop" else replace(outcome, reward=0.0)
