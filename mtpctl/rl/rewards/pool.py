"""The processes of one reward function, and which call runs in which of them.

A plain function runs in up to `workers` processes, one call each; a coroutine in one process, up to `workers` calls at once. A call that
takes longer than it may is ended with its process, which is replaced; other calls of the same process are begun again. Before that, a call
that takes far longer than most gives its place to another process, and one that computes far longer than most yields the CPU to others, so
that hanging ones hold up nobody. Once one has, a spare process stands ready for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import cast

from mtpctl.errors import RuntimeFailure
from mtpctl.rl.rewards.descendants import started_by
from mtpctl.rl.rewards.frames import Channel
from mtpctl.rl.rewards.function import Result, Role
from mtpctl.rl.rewards.outcome import Answered, Outcome
from mtpctl.rl.rewards.template import Template
from mtpctl.rl.rewards.watch import Usual, computes, cpu_seconds, memory_left, place_of, restored, yield_cpu
from mtpctl.rl.rewards.worker import WHERE, WHO, Asked, Blocking, Job, Late, Ready
from mtpctl.samples import Sample

MOST_WORKERS = 16
COROUTINES = 256
"""What `reward.workers` comes to by default: at most so many processes of a plain function, and calls of a coroutine at once."""
MOST_BESIDE = 256
"""At most so many processes beside them, in the place of those that hang or only wait."""

_TICK_S = 0.01
_WAITS_S = 0.1  # after which a call is looked at: whether it computes, or waits for something else
_GRACE_S = 1.0  # for a worker to say where a late call is; for one of coroutines before that, to say by itself that a call is late
_STARTS_AT_ONCE, _FAILED_STARTS = 8, 5


@dataclass(slots=True, eq=False)
class _Call:
    asked: Asked
    done: asyncio.Future[Outcome]
    submitted: float
    began: float = 0.0


@dataclass(slots=True, eq=False)
class _Worker:
    """`lent`: its call is so long that another process may work in its place; `waits`: it does not compute meanwhile.

    `yields`: the call computes for so long that its priority was lowered; `spent`: the process's CPU seconds when it began; `next_look`:
    when that is looked at again. `asked`: when the worker was asked where a late call is, 0 before; `trace`: see `Ready`.
    """

    channel: Channel
    pid: int = 0
    trace: int = 0
    calls: dict[int, _Call] = field(default_factory=dict)
    answered: int = 0
    lent: bool = False
    waits: bool = False
    yields: bool = False
    spent: float = 0.0
    next_look: float = 0.0
    asked: float = 0.0


class Pool:
    """Runs a reward function in processes of its own. `start` before the first `ask`, `close` at the end, all on one event loop."""

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
        """`workers`: None for a number that follows need. `log`: where processes write what they print; default: standard error.

        `role`: what the function is for; default: the run's reward.
        """
        self._job = Job(reference, args, timeout_s, role or Role.reward())
        self._reference, self._timeout_s, self._log = reference, timeout_s, log
        self._wished = workers
        self._places = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._slots = 1  # calls at once of one worker
        self._template: Template | None = None
        self._alone: list[Popen[bytes]] = []  # workers that were not forked
        self._workers: list[_Worker] = []
        self._free: list[_Worker] = []
        self._waiting: deque[_Call] = deque()
        self._numbers = itertools.count()
        self._usual = Usual()
        self._spare: _Worker | None = None
        self._keeps_spare = False  # once a call has hung
        self._starting: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._ticking: asyncio.TimerHandle | None = None
        self._forking = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Load the function in a first process. Raises UserError where it cannot be loaded or called."""
        self._template = await self._load()
        if self._template.loaded.coroutine:
            self._slots, self._places = self._wished or COROUTINES, 1

    async def ask(self, response: str, problem: Answered, sample: Sample) -> Outcome:
        """Run the function on one response. Raises RuntimeFailure where no process can be started."""
        call = _Call(
            Asked(next(self._numbers), response, problem, sample), asyncio.get_running_loop().create_future(), submitted=time.monotonic()
        )
        self._waiting.append(call)
        self._dispatch()
        return await call.done

    async def close(self) -> None:
        """End all processes. Calls that are under way are cancelled."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for call in [*self._waiting, *(call for worker in self._workers for call in worker.calls.values())]:
            call.done.cancel()
        for worker in [*self._workers, *([self._spare] if self._spare else [])]:
            self._end(worker)
        if self._template is not None:
            self._template.close()
        for process in self._alone:
            process.wait()

    # ------------------------------------------------------------------------------------------------------- starting

    async def _load(self) -> Template:
        return await Template.start(self._job, self._log)

    def _allowed(self) -> int:
        """How many processes there may be: as many as there are places, and others for those whose calls are long."""
        if self._slots > 1:
            return self._places
        lent, waiting = sum(w.lent for w in self._workers), sum(w.waits for w in self._workers)
        # Twice as many as only wait: then there are enough within a second, however few there were.
        return self._places + min(lent + 2 * waiting, MOST_BESIDE)

    def _start_workers(self) -> None:
        """Start as many processes as there are calls without one, and places."""
        allowed = self._allowed()
        while len(self._starting) < min(len(self._waiting), _STARTS_AT_ONCE):
            count = len(self._workers) + len(self._starting)
            if count >= allowed or (count >= self._places and not memory_left()):
                return
            if self._spare is not None:
                spare, self._spare = self._spare, None
                self._add(spare)
                return
            self._begin_start()

    def _keep_spare(self) -> None:
        """Have a process ready for the next call that hangs."""
        forkable = self._template is not None and self._template.loaded.forkable
        wanted = self._keeps_spare and self._spare is None and not self._starting and not self._failed_starts
        if wanted and forkable and memory_left():
            self._begin_start()

    def _begin_start(self) -> None:
        task = asyncio.create_task(self._start_worker())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_worker(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        worker = _Worker(Channel(lambda message: None, lambda: None))

        def received(message: object) -> None:
            if not ready.done():
                ready.set_result(message)
            else:
                self._received(worker, message)

        def ended() -> None:
            if not ready.done():
                ready.set_result(None)
            else:
                self._died(worker)

        worker.channel = Channel(received, ended)
        try:
            async with self._forking:
                if self._template is None or not self._template.alive:
                    self._template = await self._load()
                end, template = self._template.worker(), self._template
                if not template.loaded.forkable:
                    self._alone = [process for process in self._alone if process.poll() is None] + [template.process]
                    self._template = None
            await worker.channel.open(end)
            message = await ready
            if not isinstance(message, Ready):
                raise RuntimeFailure(f"{self._job.role.function}: no process for {self._reference} could be started; see what it wrote")
        except asyncio.CancelledError:
            worker.channel.close()
            raise
        except Exception as error:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                while self._waiting:
                    if not (call := self._waiting.popleft()).done.done():
                        call.done.set_exception(error)
            else:
                self._keep_ticking()  # which tries again
            return
        self._failed_starts = 0
        worker.pid, worker.trace = message.pid, message.trace
        if self._keeps_spare and self._spare is None and len(self._workers) >= self._allowed():
            self._spare = worker
        else:
            self._add(worker)

    def _add(self, worker: _Worker) -> None:
        self._workers.append(worker)
        self._free.append(worker)
        self._dispatch()

    # -------------------------------------------------------------------------------------------------------- calling

    def _dispatch(self) -> None:
        while self._waiting and self._free:
            call = self._waiting.popleft()
            if call.done.done():  # cancelled
                continue
            worker = self._free[-1]
            worker.calls[call.asked.number] = call
            if len(worker.calls) == self._slots:
                self._free.pop()
            call.began = worker.next_look = time.monotonic()
            worker.spent = cpu_seconds([worker.pid]) if self._slots == 1 else 0.0
            try:
                worker.channel.send(call.asked)
            except Exception as error:  # a problem of the data that cannot be pickled
                self._settle(worker, call, None, {}, f"{call.asked.problem.prompt_id} cannot be sent to a process: {error}")
        if self._waiting:
            self._start_workers()
        self._keep_spare()
        self._keep_ticking()

    def _received(self, worker: _Worker, message: object) -> None:
        if isinstance(message, Blocking):
            guilty = None if message.number is None else worker.calls.get(message.number)
            self._expel(worker, [guilty] if guilty is not None else self._overdue(worker, time.monotonic()), message.place)
            return
        late = isinstance(message, Late)
        if isinstance(message, Late):
            message = (message.number, None, {}, self._too_long(message.place))
        number, reward, parts, error = cast(tuple[int, *Result], message)
        if (call := worker.calls.get(number)) is None:
            return
        self._settle(worker, call, reward, parts, error, late=late)
        worker.answered += 1
        self._dispatch()

    def _settle(
        self, worker: _Worker, call: _Call, reward: float | None, parts: dict[str, float], error: str, *, late: bool = False
    ) -> None:
        """Take the call off the worker, and tell its result."""
        now, was_full = time.monotonic(), len(worker.calls) == self._slots
        del worker.calls[call.asked.number]
        if self._slots == 1:
            self._usual.add(now - call.began, max(cpu_seconds([worker.pid]) - worker.spent, 0.0), worker.answered)
        if not call.done.done():
            call.done.set_result(Outcome(reward, parts, error, late, now - call.submitted))
        if worker not in self._workers:
            return
        if (worker.asked and self._slots == 1) or (worker.yields and not restored(worker.pid)):
            self._end(worker)
            return
        worker.lent, worker.waits, worker.yields = False, False, False
        if was_full:
            self._free.append(worker)

    def _died(self, worker: _Worker) -> None:
        self._forget(worker)
        for call in list(worker.calls.values()):
            self._settle(worker, call, None, {}, f"{self._reference_shown()}: the process that ran it died; see what it wrote")
        self._dispatch()

    def _expel(self, worker: _Worker, guilty: list[_Call], place: str = "") -> None:
        """End a worker for the calls that took too long, at this `place`; its other calls are the next to be begun again."""
        self._end(worker)
        for call in guilty:
            self._settle(worker, call, None, {}, self._too_long(place), late=True)
        self._waiting.extendleft(reversed(worker.calls.values()))
        worker.calls.clear()
        self._dispatch()

    def _end(self, worker: _Worker) -> None:
        self._forget(worker)
        started = started_by(worker.pid)
        worker.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        for pid in started:  # also what left its group, as programs do that are started in a session of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _forget(self, worker: _Worker) -> None:
        if worker is self._spare:
            self._spare = None
            return
        self._workers.remove(worker)
        if worker in self._free:
            self._free.remove(worker)

    def _too_long(self, place: str) -> str:
        """`judge.py:12: score took more than 30 s (reward.timeout_s)`: `place` is where it was then, if that is known."""
        what = f"{place}: {self._reference.rpartition(':')[2]}" if place else self._reference_shown()
        return f"{what} took more than {self._timeout_s:g} s ({self._job.role.seconds})"

    def _reference_shown(self) -> str:
        source, _, name = self._reference.rpartition(":")
        return f"{Path(source).name if source.endswith('.py') else source}:{name}"

    # -------------------------------------------------------------------------------------------------------- watching

    def _keep_ticking(self) -> None:
        if self._ticking is None and not self._closed:
            self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        now = time.monotonic()
        busy = [worker for worker in self._workers if worker.calls]
        for worker in busy:
            if overdue := self._overdue(worker, now):
                if not worker.asked:
                    worker.asked = now
                    self._ask_where(worker)
                elif (place := place_of(worker.pid, worker.trace) if self._slots == 1 else "") or now - worker.asked > _GRACE_S:
                    self._expel(worker, overdue, place)
            elif self._slots == 1:
                self._look_at(worker, now)
        if self._waiting:
            self._start_workers()
        self._keep_spare()
        if busy or self._waiting:
            self._keep_ticking()

    def _ask_where(self, worker: _Worker) -> None:
        """Have a worker say which call takes too long, and where."""
        if self._slots > 1:
            worker.channel.send(WHO)
            return
        if worker.yields:
            restored(worker.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, WHERE)

    def _overdue(self, worker: _Worker, now: float) -> list[_Call]:
        limit = self._timeout_s + (_GRACE_S if self._slots > 1 else 0.0)
        return [call for call in worker.calls.values() if now - call.began > limit]

    def _look_at(self, worker: _Worker, now: float) -> None:
        """Note what the worker's call, which is under way, comes to beside most calls: see `_Worker`."""
        (call,) = worker.calls.values()
        age = now - call.began
        worker.lent = worker.lent or age > self._usual.long_s(worker.answered)
        if not worker.yields and now >= worker.next_look:
            started: list[int] = []
            if age > _WAITS_S:
                started, worker.next_look = started_by(worker.pid), now + _WAITS_S / 2
                worker.waits = self._wished is None and not worker.lent and not any(map(computes, [worker.pid, *started]))
            if cpu_seconds([worker.pid, *started]) - worker.spent > self._usual.burnt_s(worker.answered):
                worker.lent = worker.yields = True
                yield_cpu([worker.pid, *started])
        self._keeps_spare = self._keeps_spare or worker.lent
