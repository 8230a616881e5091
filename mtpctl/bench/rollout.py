"""`mtpctl bench rollout`: the throughput of mtpctl's pool against vLLM alone, and the gain by speculation.

`path`: the same requests through vLLM's offline `LLM.generate` and through mtpctl's pool and actor, in turns, with the same model,
settings and card; and, at full load with a queue, the share of the engine's slots that were empty.

`speculation`: an engine without speculation against one that drafts 0, 1, … k tokens, and then chooses how many
(`rollout.speculation.auto`), at every batch size; with a drafter that is right on a chosen share of tokens, and with one that never is.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace

from mtpctl.bench.rollout_engines import Bench, Offline, Once, Options, all_of
from mtpctl.bench.rollout_load import Load, Run
from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import settle_heap
from mtpctl.recipe.cluster import ClusterConfig
from mtpctl.rollout.pool import ReplicaPool

PATH_BOUND = 0.95
"""Throughput through mtpctl over vLLM's own, at least."""
IDLE_BOUND = 0.03
AUTO_BOUND = 0.98
"""Throughput of speculation.auto, after its first measurement, over no speculation, at least."""
GAIN_BOUND = 0.9
"""Share of `allowed_gain` that one draft reaches up to `GAIN_BATCH` requests, at least."""
GAIN_BATCH = 64
RUN_S = 300.0
TIMER = (
    "the first request sent to the last answer received, prompts' prefill included; engine start and one round of warming up excluded. "
    "All engines are on the card at once and take turns; a ratio is the median of the rounds' own"
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One row: medians over the rounds of throughput and of its ratio to the baseline, and the bounds that it misses.

    `rates` and `ratios` are those of each round. `draft_s`: seconds of device time that a step spends on all its drafts. `steps` and
    `step_s`: steps of a round, and seconds of a step that only decodes, where the engine reports them. `allowed`: see `allowed_gain`.
    `wrong`: answers that are not the model's.
    """

    what: str
    load: str
    tokens_per_s: float
    rates: tuple[float, ...]
    ratio: float | None = None
    ratios: tuple[float, ...] = ()
    accept_rate: float | None = None
    accept_length: float | None = None
    draft_s: float | None = None
    steps: float | None = None
    step_s: float | None = None
    allowed: float | None = None
    idle: float | None = None
    drafts: int | None = None
    wrong: int = 0
    misses: tuple[str, ...] = ()


def allowed_gain(tokens: float, draft_s: float, step_s: float) -> float:
    """Speed-up if verifying drafts were free: `tokens` a step, over the step's time with `draft_s` relative to `step_s` without."""
    return tokens / (1 + draft_s / step_s)


async def in_turn(load: Load, ways: Mapping[str, Once], rounds: int, *, warm: bool = True) -> dict[str, list[Run]]:
    """Send the load each way `rounds` times, after one round to warm up. Every other round is in reverse order, against drift."""
    found: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(-1 if warm else 0, rounds):
        names = list(ways)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            run = await within(ways[name](load), RUN_S, f"{name}, {load.name}")
            if number >= 0:
                found[name].append(run)
    return found


def row(what: str, load: Load, runs: list[Run], against: list[Run] | None = None, bound: float | None = None) -> Result:
    """A row from its rounds and those of its baseline `against`. `bound`: the least ratio of the two."""
    rates = tuple(run.tokens_per_s for run in runs)
    ratios = tuple(run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, against, strict=True)) if against else ()
    ratio = statistics.median(ratios) if ratios else None
    misses = []
    if ratio is not None and bound is not None and ratio < bound:
        misses.append(f"{ratio:.3f}, bound {bound:.3g}")
    wrong = sum(run.wrong for run in runs)
    if wrong:
        misses.append(f"{wrong} answers are not the model's")
    idles = [run.idle for run in runs if run.idle is not None]
    idle = statistics.median(idles) if idles else None
    if idle is not None and idle > IDLE_BOUND:
        misses.append(f"places empty {idle:.1%} of the time, bound {IDLE_BOUND:.0%}")
    stats = runs[-1].stats
    return Result(
        what,
        load.name,
        statistics.median(rates),
        rates,
        ratio,
        ratios,
        accept_rate=stats.accept_rate if stats.drafted else None,
        accept_length=stats.accept_length if stats.drafted else None,
        idle=idle,
        wrong=wrong,
        misses=tuple(misses),
    )


class Table:
    """The rows so far; each is printed as soon as it is measured."""

    def __init__(self, say: Say) -> None:
        self.rows: list[Result] = []
        self.say = say

    def add(self, result: Result) -> None:
        self.rows.append(result)
        self.say(line(result))


THEIRS, OURS, BARE = "vLLM LLM.generate", "mtpctl", "vLLM LLM.generate, no log-probs"
OFF = "no speculation"


async def measure_path(bench: Bench, table: Table, loads: list[Load], offline: Offline, plain: ReplicaPool) -> None:
    """Measure vLLM's offline generation, and the same through the pool."""
    both: dict[str, Once] = {THEIRS: lambda load: offline(load, True), OURS: bench.through(plain)}
    largest = bench.loads()[-1]
    for load in loads:
        ways = both | ({BARE: lambda load: offline(load, False)} if load == largest else {})
        found = await in_turn(load, ways, bench.options.rounds)
        for name, runs in found.items():
            table.add(row(name, load, runs, found[THEIRS] if name != THEIRS else None, PATH_BOUND if name == OURS else None))


async def measure_speculation(bench: Bench, table: Table, plain: ReplicaPool, drafting: ReplicaPool) -> None:
    """Measure an engine without speculation, and another with 0 to k drafts and with a number that it chooses."""
    for load in bench.loads():
        await _fixed(bench, table, load, plain, drafting)
    for hopeless in (False, True):
        for load in bench.loads(hopeless=hopeless):
            await _auto(bench, table, load, plain, drafting, "auto, no draft right" if hopeless else "auto")


@dataclass(frozen=True, slots=True)
class _Steps:
    """What the engine reports about the steps of one round. See `Result`."""

    draft_s: float
    steps: int
    step_s: float


async def _fixed(bench: Bench, table: Table, load: Load, plain: ReplicaPool, drafting: ReplicaPool) -> None:
    numbers = range(bench.options.drafts + 1)
    reported: dict[int, list[_Steps]] = {drafts: [] for drafts in numbers}
    once = bench.through(drafting)

    def with_drafts(drafts: int) -> Once:
        async def send(load: Load) -> Run:
            await drafting.speculate(drafts)
            run = await once(load)
            state = (await drafting.speculate())[0]
            reported[drafts].append(_Steps(state["draft_s"][drafts] if drafts else 0.0, state["steps"][drafts], state["step_s"][drafts]))
            return run

        return send

    named = {drafts: f"{drafts} drafts" for drafts in numbers}
    ways = {OFF: bench.through(plain)} | {named[drafts]: with_drafts(drafts) for drafts in numbers}
    found = await in_turn(load, ways, bench.options.rounds)
    table.add(off := row(OFF, load, found[OFF]))
    for drafts in numbers:
        runs = found[named[drafts]]
        steps = reported[drafts][-len(runs) :]
        draft_s = statistics.median(each.draft_s for each in steps)
        allowed = allowed_gain(runs[-1].stats.accept_length, draft_s, load.batch / off.tokens_per_s)
        bound = GAIN_BOUND * allowed if drafts == 1 and load.batch <= GAIN_BATCH else None
        table.add(
            replace(
                row(named[drafts], load, runs, found[OFF], bound),
                allowed=allowed,
                draft_s=draft_s,
                drafts=drafts,
                steps=statistics.median(each.steps for each in steps),
                step_s=statistics.median(each.step_s for each in steps),
            )
        )


async def _auto(bench: Bench, table: Table, load: Load, plain: ReplicaPool, drafting: ReplicaPool, what: str) -> None:
    """Measure the engine's own choice: a round in which it compares numbers of drafts, then rounds with the number that it settles on."""
    ways = {OFF: bench.through(plain), what: bench.through(drafting)}
    await drafting.speculate(-1)
    looking = await in_turn(load, ways, 1, warm=False)
    table.add(row(f"{what}, looking", load, looking[what], looking[OFF]))
    await drafting.speculate()
    rounds = bench.options.rounds
    found = await in_turn(load, ways, rounds, warm=False)
    state = (await drafting.speculate())[0]
    steps: dict[int, int] = state["steps"]
    most = max(steps, key=lambda drafts: steps[drafts])
    measured = row(what, load, found[what], found[OFF], AUTO_BOUND)
    table.add(replace(measured, drafts=state["drafts"], steps=sum(steps.values()) / rounds, step_s=state["step_s"].get(most)))
    numbers = ", ".join(f"{count} with {drafts}" for drafts, count in sorted(steps.items()))
    table.say(f"  steps by their drafts: {numbers}; {state['told'] or 'no look came to its end'}")


def run(options: Options, parts: list[str], say: Say) -> list[Result]:
    """Measure the named parts. Every row is printed as soon as it is measured."""
    path, speculation = "path" in parts, "speculation" in parts
    bench = Bench(options, say, at_once=1 + path + speculation)
    table = Table(say)

    async def measure() -> None:
        wanted: list[AbstractAsyncContextManager[ReplicaPool | Offline]] = [bench.pool(0)]
        wanted += [bench.offline()] if path else []
        wanted += [bench.pool(options.drafts)] if speculation else []
        async with all_of(*wanted) as engines:
            settle_heap()
            pools = [engine for engine in engines if isinstance(engine, ReplicaPool)]
            offlines = [engine for engine in engines if not isinstance(engine, ReplicaPool)]
            for offline in offlines:
                await measure_path(bench, table, bench.loads(), offline, pools[0])
            if speculation:
                await measure_speculation(bench, table, pools[0], pools[1])
            for offline in offlines:
                # The longest measurement is last.
                await measure_path(bench, table, [bench.queued()], offline, pools[0])

    gpus = 1 if options.device == "cuda" else 0
    config = ClusterConfig(device=options.device, num_cpus=None if gpus else bench.at_once + 1)
    with cluster(config, cpus=bench.at_once, gpus=gpus):
        asyncio.run(measure())
    return table.rows


HEAD = (
    "| what | load | tokens/s (least – most) | ratio (least – most) | accepted | tokens a step | steps, ms of one | drafting, ms a step "
    "| allowed | places empty |"
)
RULE = "|---" * HEAD.count(" | ") + "|---|"


def line(result: Result) -> str:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    r = result
    chosen = f" → {r.drafts} drafts" if r.what.startswith("auto") and r.drafts is not None else ""
    steps = "–" if r.steps is None else f"{r.steps:.0f}, {number(r.step_s and r.step_s * 1e3, '.2f')}"
    spread = f" ({min(r.ratios):.3f} – {max(r.ratios):.3f})" if r.ratios else ""
    return (
        f"| {r.what}{chosen} | {r.load} | {r.tokens_per_s:,.0f} ({min(r.rates):,.0f} – {max(r.rates):,.0f}) "
        f"| {number(r.ratio, '.3f')}{spread} "
        f"| {number(r.accept_rate, '.1%')} | {number(r.accept_length, '.2f')} "
        f"| {steps} "
        f"| {number(r.draft_s and r.draft_s * 1e3, '.2f')} | {number(r.allowed, '.2f')} | {number(r.idle, '.2%')} |"
    )


def verdict(results: list[Result]) -> list[str]:
    """The best number of drafts at each load, and every bound that was missed."""
    lines = []
    for load in dict.fromkeys(r.load for r in results if r.what.endswith(" drafts")):
        best = max((r for r in results if r.load == load and r.what.endswith(" drafts")), key=lambda r: r.ratio or 0.0)
        lines.append(f"{load}: best with {best.what}, {best.ratio:.2f} of no speculation")
    lines += [f"MISSED {r.what}, {r.load}: {'; '.join(r.misses)}" for r in results if r.misses]
    return lines


def as_dict(options: Options, results: list[Result]) -> dict[str, object]:
    return {"options": {**asdict(options), "folder": str(options.folder)}, "timer": TIMER, "results": [asdict(r) for r in results]}
