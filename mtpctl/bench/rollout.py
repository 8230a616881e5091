"""`mtpctl bench rollout`: the throughput of mtpctl's pool relative to vLLM alone, and the gain from speculation.

`path`: the same requests through vLLM's offline `LLM.generate` and through mtpctl's pool and actor, with the same model, settings and
device. Also measures the share of the engine's slots that are empty while requests are queued.

`speculation`: an engine that drafts 0, 1, … k tokens, and then selects the number itself (`rollout.speculation.auto`), against one without
speculation, at every batch size; with a drafter that is right for a known share of tokens, and with one that is always wrong.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace

from mtpctl.bench.report import number
from mtpctl.bench.rollout_engines import Bench, Load, Offline, Options, Run, Send, enter_all
from mtpctl.cluster.deadlines import within
from mtpctl.cluster.process import freeze_heap
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import SpeculationState

PATH_BOUND = 0.95
"""Minimum throughput of mtpctl's pool relative to vLLM's `LLM.generate`."""
IDLE_BOUND = 0.03
AUTO_BOUND = 0.98
"""Minimum throughput of `speculation.auto`, after its first measurement, relative to no speculation."""
GAIN_BOUND = 0.9
"""Minimum share of `allowed_gain` that one draft token must reach with up to `GAIN_BATCH` requests."""
GAIN_BATCH = 64
RUN_S = 300.0
TIMER = (
    "the first request sent to the last answer received, prefill included; engine start and one warm-up round excluded. "
    "All engines are loaded at the same time and alternate; a ratio is the median of the rounds' ratios"
)
VLLM, POOL, VLLM_BARE = "vLLM LLM.generate", "mtpctl", "vLLM LLM.generate, no log-probs"
OFF = "no speculation"
HEADINGS = (
    "| what | load | tokens/s (least – most) | ratio (least – most) | accepted | tokens a step | steps, ms of one | drafting, ms a step "
    "| allowed | slots empty |"
)
RULE = "|---" * HEADINGS.count(" | ") + "|---|"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One row: throughput and its ratio to the baseline as medians over rounds, and the bounds that it misses.

    rates, ratios: of each round. draft_s: device seconds per step for all drafts. steps, step_s: steps per round, and seconds of a step
    without prefill, if the engine reports them. allowed: see `allowed_gain`. idle: share of empty slots. wrong: number of answers that
    differ from the model's known ones.
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
    """The speed-up if verification were free. tokens: tokens per step; draft_s: seconds of drafting per step; step_s: seconds of a step
    without speculation."""
    return tokens / (1 + draft_s / step_s)


async def alternate(load: Load, ways: Mapping[str, Send], rounds: int, *, warm: bool = True) -> dict[str, list[Run]]:
    """Send the load each way `rounds` times, after a warm-up round. Every other round is in reverse order, to cancel out drift."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for round_number in range(-1 if warm else 0, rounds):
        for name in list(ways)[:: 1 if round_number % 2 == 0 else -1]:
            run = await within(ways[name](load), RUN_S, f"{name}, {load.name}")
            if round_number >= 0:
                runs[name].append(run)
    return runs


def row(what: str, load: Load, runs: list[Run], baseline: list[Run] | None = None, bound: float | None = None) -> Result:
    """Make a row from its rounds and those of its baseline. bound: the minimum ratio of the two."""
    rates = tuple(run.tokens_per_s for run in runs)
    ratios = tuple(run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, baseline, strict=True)) if baseline else ()
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
        misses.append(f"slots empty {idle:.1%} of the time, bound {IDLE_BOUND:.0%}")
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
    """The rows so far. Each is printed as soon as it is measured."""

    def __init__(self, say: Say) -> None:
        self.rows: list[Result] = []
        self.say = say

    def add(self, result: Result) -> None:
        self.rows.append(result)
        self.say(line(result))


async def measure_path(bench: Bench, table: Table, loads: list[Load], offline: Offline, plain: ReplicaPool) -> None:
    """Measure the same loads through vLLM's offline generation and through the pool."""
    both: dict[str, Send] = {VLLM: lambda load: offline(load, True), POOL: bench.through(plain)}
    largest = bench.loads()[-1]
    for load in loads:
        ways = both | ({VLLM_BARE: lambda load: offline(load, False)} if load == largest else {})
        for name, runs in (all_runs := await alternate(load, ways, bench.options.rounds)).items():
            baseline = None if name == VLLM else all_runs[VLLM]
            table.add(row(name, load, runs, baseline, PATH_BOUND if name == POOL else None))


async def measure_speculation(bench: Bench, table: Table, plain: ReplicaPool, drafting: ReplicaPool) -> None:
    """Measure an engine without speculation, and one with 0 to k draft tokens and with the number that it selects."""
    for load in bench.loads():
        await _measure_fixed(bench, table, load, plain, drafting)
    for hopeless in (False, True):
        for load in bench.loads(hopeless=hopeless):
            await _measure_auto(bench, table, load, plain, drafting, "auto, no draft right" if hopeless else "auto")


async def _measure_fixed(bench: Bench, table: Table, load: Load, plain: ReplicaPool, drafting: ReplicaPool) -> None:
    counts = range(bench.options.drafts + 1)
    states: dict[int, list[SpeculationState]] = {drafts: [] for drafts in counts}
    send = bench.through(drafting)

    def with_drafts(drafts: int) -> Send:
        async def send_drafting(load: Load) -> Run:
            await drafting.speculate(drafts)
            run = await send(load)
            states[drafts].append((await drafting.speculate())[0])
            return run

        return send_drafting

    names = {drafts: f"{drafts} drafts" for drafts in counts}
    all_runs = await alternate(load, {OFF: bench.through(plain)} | {names[n]: with_drafts(n) for n in counts}, bench.options.rounds)
    table.add(off := row(OFF, load, all_runs[OFF]))
    for drafts in counts:
        runs = all_runs[names[drafts]]
        measured = states[drafts][-len(runs) :]
        draft_s = statistics.median(state["draft_s"][drafts] for state in measured) if drafts else 0.0
        allowed = allowed_gain(runs[-1].stats.accept_length, draft_s, load.batch / off.tokens_per_s)
        bound = GAIN_BOUND * allowed if drafts == 1 and load.batch <= GAIN_BATCH else None
        table.add(
            replace(
                row(names[drafts], load, runs, all_runs[OFF], bound),
                allowed=allowed,
                draft_s=draft_s,
                drafts=drafts,
                steps=statistics.median(state["steps"][drafts] for state in measured),
                step_s=statistics.median(state["step_s"][drafts] for state in measured),
            )
        )


async def _measure_auto(bench: Bench, table: Table, load: Load, plain: ReplicaPool, drafting: ReplicaPool, what: str) -> None:
    """Measure `speculation.auto`: one round in which the engine compares numbers of drafts, then rounds with the selected number."""
    ways = {OFF: bench.through(plain), what: bench.through(drafting)}
    await drafting.speculate(-1)
    looking = await alternate(load, ways, 1, warm=False)
    table.add(row(f"{what}, looking", load, looking[what], looking[OFF]))
    await drafting.speculate()
    rounds = bench.options.rounds
    runs = await alternate(load, ways, rounds, warm=False)
    state = (await drafting.speculate())[0]
    steps: dict[int, int] = state["steps"]
    usual = max(steps, key=lambda drafts: steps[drafts])
    measured = row(what, load, runs[what], runs[OFF], AUTO_BOUND)
    table.add(replace(measured, drafts=state["drafts"], steps=sum(steps.values()) / rounds, step_s=state["step_s"].get(usual)))
    counts = ", ".join(f"{count} with {drafts}" for drafts, count in sorted(steps.items()))
    table.say(f"  steps by their drafts: {counts}; {state['message'] or 'no measurement was completed'}")


def run(options: Options, parts: list[str], say: Say) -> list[Result]:
    """Run the named parts of the benchmark. Every row is printed as soon as it is measured."""
    path, speculation = "path" in parts, "speculation" in parts
    bench = Bench(options, say, at_once=1 + path + speculation)
    table = Table(say)

    async def measure() -> None:
        managers: list[AbstractAsyncContextManager[ReplicaPool | Offline]] = [bench.pool(0)]
        managers += [bench.offline()] if path else []
        managers += [bench.pool(options.drafts)] if speculation else []
        async with enter_all(*managers) as engines:
            freeze_heap()
            pools = [engine for engine in engines if isinstance(engine, ReplicaPool)]
            offlines = [engine for engine in engines if not isinstance(engine, ReplicaPool)]
            for offline in offlines:
                await measure_path(bench, table, bench.loads(), offline, pools[0])
            if speculation:
                await measure_speculation(bench, table, pools[0], pools[1])
            for offline in offlines:
                # Last, because it takes longest.
                await measure_path(bench, table, [bench.queued()], offline, pools[0])

    with bench.cluster():
        asyncio.run(measure())
    return table.rows


def line(result: Result) -> str:
    """Format a result as a row of the table."""
    r = result
    selected = f" → {r.drafts} drafts" if r.what.startswith("auto") and r.drafts is not None else ""
    steps = "–" if r.steps is None else f"{r.steps:.0f}, {number(r.step_s and r.step_s * 1e3, '.2f')}"
    spread = f" ({min(r.ratios):.3f} – {max(r.ratios):.3f})" if r.ratios else ""
    return (
        f"| {r.what}{selected} | {r.load} | {r.tokens_per_s:,.0f} ({min(r.rates):,.0f} – {max(r.rates):,.0f}) "
        f"| {number(r.ratio, '.3f')}{spread} | {number(r.accept_rate, '.1%')} | {number(r.accept_length, '.2f')} | {steps} "
        f"| {number(r.draft_s and r.draft_s * 1e3, '.2f')} | {number(r.allowed, '.2f')} | {number(r.idle, '.2%')} |"
    )


def verdict(results: list[Result]) -> list[str]:
    """The best number of drafts for each load, and all missed bounds."""
    lines = []
    drafting = [r for r in results if r.what.endswith(" drafts")]
    for load in dict.fromkeys(r.load for r in drafting):
        best = max((r for r in drafting if r.load == load), key=lambda r: r.ratio or 0.0)
        lines.append(f"{load}: best with {best.what}, {best.ratio:.2f} of no speculation")
    return lines + [f"MISSED {r.what}, {r.load}: {'; '.join(r.misses)}" for r in results if r.misses]


def as_dict(options: Options, results: list[Result]) -> dict[str, object]:
    return {"options": {**asdict(options), "folder": str(options.folder)}, "timer": TIMER, "results": [asdict(r) for r in results]}
