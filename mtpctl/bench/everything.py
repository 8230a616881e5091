"""`mtpctl bench all`: the measurements of docs/benchmarks on the cards of one machine, several at a time.

Each measurement is a command as a user would type it, in a process that sees its own cards only. They start in the order of the plan, as
soon as enough cards are free; none overtakes one that waits for cards. Those that would not end before the deadline are left out and named.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtpctl.bench.machine import visible_cards
from mtpctl.errors import UserError

Say = Callable[[str], None]
GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: the number of cards it takes, the minutes it may take, and the measurements that must come before it.

    `command` is what follows `mtpctl` on the command line; `{out}` in it is the results' folder.
    """

    name: str
    cards: int
    minutes: float
    command: str
    after: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        """Cards that it occupies; 1 on a processor."""
        return max(self.cards, 1)

    def words(self, out: Path) -> list[str]:
        return [word.replace("{out}", str(out)) for word in shlex.split(self.command)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a measurement ended: its exit code, or None and the reason `why` where it did not run to its end."""

    task: Task
    seconds: float = 0.0
    code: int | None = None
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.code is None:
            return self.why
        return {0: "ok", 6: "a bound was missed"}.get(self.code, f"failed ({self.code})")


def cards_of(number: int) -> str:
    """`1 card`, `2 cards`."""
    return f"{number} card{'' if number == 1 else 's'}"


def chosen(plan: Sequence[Task], wanted: Sequence[str]) -> list[Task]:
    """The named tasks and those that they depend on, in the plan's order; all where none is named.

    Raises UserError for an unknown name.
    """
    known = {task.name: task for task in plan}
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"--only: there is no {unknown[0]}; there are {', '.join(known)}")
    keep = set(wanted or known)
    for task in reversed(plan):
        if task.name in keep:
            keep.update(task.after)
    return [task for task in plan if task.name in keep]


async def run_all(plan: Sequence[Task], *, cards: int, out: Path, minutes: float | None, say: Say) -> list[Outcome]:
    """Run the plan on `cards` cards (0: one at a time on the processor), logs and JSON to `out`. Outcomes in the plan's order."""
    out.mkdir(parents=True, exist_ok=True)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    free = set(range(max(cards, 1)))
    waiting = list(plan)
    running: dict[asyncio.Task[Outcome], list[int]] = {}
    ended: dict[str, Outcome] = {}
    try:
        while waiting or running:
            for task in list(waiting):
                if (why := _left_out(task, cards, end, ended)) is not None:
                    waiting.remove(task)
                    ended[task.name] = Outcome(task, why=why)
                    say(f"{task.name}: {why}")
                    continue
                if not ended.keys() >= set(task.after):
                    continue
                if task.places > len(free):
                    break
                waiting.remove(task)
                own = sorted(free)[: task.places]
                free.difference_update(own)
                where = f" on {'cards' if len(own) > 1 else 'card'} {', '.join(map(str, own))}" if cards else ""
                say(f"{task.name}: begins{where}")
                running[asyncio.create_task(_run(task, own if cards else [], out))] = own
            if not running:
                continue
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                free.update(running.pop(finished))
                outcome = finished.result()
                ended[outcome.task.name] = outcome
                say(f"{outcome.task.name}: {outcome.verdict} after {outcome.seconds:.0f} s")
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return [ended[task.name] for task in plan]


def _left_out(task: Task, cards: int, end: float | None, ended: dict[str, Outcome]) -> str | None:
    if task.cards > cards:
        return f"needs {cards_of(task.cards)}"
    if failed := [name for name in task.after if name in ended and ended[name].code not in (0, 6)]:
        return f"comes after {failed[0]}"
    if end is not None and time.monotonic() + 60 * task.minutes > end:
        return f"its {task.minutes:g} minutes do not fit any more"
    return None


async def _run(task: Task, cards: list[int], out: Path) -> Outcome:
    """Run the command; once its time is up, end it and all that it started."""
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    if cards:
        environment["CUDA_VISIBLE_DEVICES"] = visible_cards(cards)
    began = time.monotonic()
    with (out / f"{task.name}.json").open("wb") as result, (out / f"{task.name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "mtpctl",
            *task.words(out),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=result,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        why = ""
        try:
            async with asyncio.timeout(60 * task.minutes):
                code: int | None = await process.wait()
        except TimeoutError:
            await _end(process)
            # Whatever its exit code, it has not measured everything.
            code, why = None, f"ended after its {task.minutes:g} minutes"
        except asyncio.CancelledError:
            await _end(process)
            raise
    return Outcome(task, time.monotonic() - began, code, why)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the process to stop, then kill what is left of its session."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| measurement | cards | seconds | |", "|---|---|---|---|"]
    lines += [f"| {o.task.name} | {o.task.cards} | {o.seconds:.0f} | {o.verdict} |" for o in outcomes]
    return "\n".join(lines)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Exit code of all: 0; 6 where a bound was missed; 5 where one failed or was left out."""
    codes = {outcome.code for outcome in outcomes}
    return 5 if codes - {0, 6} else 6 if 6 in codes else 0
