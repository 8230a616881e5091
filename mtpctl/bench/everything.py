"""`mtpctl bench all`: every figure of docs/benchmarks on the cards of one machine, as many at a time as there are cards for.

Each measurement is the command that a user types, in a process of its own that sees no other cards than its own. They
start in the order of the plan, each as soon as there are enough free cards: nothing overtakes a measurement that waits for
more cards than are free, so that large ones come to their turn. What would not end before the deadline is left out, by name.
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
    """One measurement: how many cards it takes, for how long at most, after which others.

    `command` is what follows `mtpctl` on the command line; `{out}` in it is the results' folder.
    """

    name: str
    cards: int
    minutes: float
    command: str
    after: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        """Cards, or the processor as one of them."""
        return max(self.cards, 1)

    def words(self, out: Path) -> list[str]:
        """The command's words."""
        return [word.replace("{out}", str(out)) for word in shlex.split(self.command)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one ended: `code` is its exit code, None where it was not run to its end, for the reason that `why` gives."""

    task: Task
    seconds: float = 0.0
    code: int | None = None
    why: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.code is None:
            return self.why
        return {0: "ok", 6: "a bound was missed"}.get(self.code, f"failed ({self.code})")


def cards_of(number: int) -> str:
    """In words."""
    return f"{number} card{'' if number == 1 else 's'}"


def chosen(plan: Sequence[Task], wanted: Sequence[str]) -> list[Task]:
    """The tasks of these names and what they come after, in the plan's order; all where none is named. Raises UserError for a stranger."""
    known = {task.name: task for task in plan}
    if strangers := [name for name in wanted if name not in known]:
        raise UserError(f"--only: there is no {strangers[0]}; there are {', '.join(known)}")
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
    """The command, ended with all that it started once its time is up."""
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
            # Whatever it says: one that stops cleanly when it is told to has measured nothing all the same.
            code, why = None, f"ended after its {task.minutes:g} minutes"
        except asyncio.CancelledError:
            await _end(process)
            raise
    return Outcome(task, time.monotonic() - began, code, why)


async def _end(process: asyncio.subprocess.Process) -> None:
    """A clean stop if it can, and then no process of its session is left."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def table(outcomes: Sequence[Outcome]) -> str:
    """For a terminal."""
    lines = ["| measurement | cards | seconds | |", "|---|---|---|---|"]
    lines += [f"| {o.task.name} | {o.task.cards} | {o.seconds:.0f} | {o.verdict} |" for o in outcomes]
    return "\n".join(lines)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0; 6 where a bound was missed; 5 where one failed or was left out."""
    codes = {outcome.code for outcome in outcomes}
    return 5 if codes - {0, 6} else 6 if 6 in codes else 0
