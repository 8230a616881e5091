"""`mtpctl bench rollout`: the throughput of mtpctl's pool relative to vLLM alone, and the gain from speculation.

`path`: the same requests through vLLM's offline `LLM.generate` and through mtpctl's pool and actor, with the same model, settings and
device. Also measures the share of the engine's slots that are empty while requests are queued.

`speculation`: an engine that drafts 0, 1, … k tokens per step, and then selects the number itself (`rollout.speculation.auto`), against an
engine without speculation, at every batch size. The drafter predicts a known share of tokens correctly. `auto` is also measured with
requests for which every draft is wrong.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from mtpctl.bench.report import format_number
from mtpctl.bench.rollout_engines import (
    Run,
    Workload,
    cycle_config,
    engine_pool,
    engine_recipe,
    enter_all,
    make_workload,
    offline_actor,
    send_workload,
    write_cycle_model,
)
from mtpctl.cluster.deadlines import await_within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import freeze_heap
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.recipe.schema import ClusterConfig, Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import SpeculationState

MIN_PATH_RATIO = 0.95
"""Minimum throughput of mtpctl's pool relative to vLLM's `LLM.generate`."""
MAX_IDLE = 0.03
MIN_AUTO_RATIO = 0.98
"""Minimum throughput of `speculation.auto`, after its first measurement, relative to no speculation."""
MIN_GAIN_SHARE = 0.9
"""With one draft token and at most `MAX_GAIN_BATCH` requests, the speed-up must be at least this share of `gain_with_free_verification`."""
MAX_GAIN_BATCH = 64
RUN_TIMEOUT_S = 300.0
TIMED_WORK = (
    "from sending the first request to receiving the last answer, prefill included; engine start and one warm-up round excluded. "
    "All engines are loaded at the same time and alternate; a ratio is the median of the rounds' ratios"
)
VLLM, POOL, VLLM_BARE = "vLLM LLM.generate", "mtpctl", "vLLM LLM.generate, no log-probs"
OFF = "no speculation"
HEADINGS = (
    "| what | load | tokens/s (least – most) | ratio (least – most) | accepted | tokens a step | steps, ms each | drafting, ms a step "
    "| gain if verification were free | slots empty |"
)
RULE = "|---" * HEADINGS.count(" | ") + "|---|"

Report = Callable[[str], None]
Send = Callable[[Workload], Awaitable[Run]]
"""Sends a workload and waits for its answers."""
Offline = Callable[[Workload, bool], Awaitable[Run]]
"""Sends a workload through vLLM's offline generation, with or without log-probs."""
GPU_MEMORY_FRACTION = 0.9
"""Share of GPU memory for all engines together."""


@dataclass(frozen=True, slots=True)
class Options:
    """prompt, tokens: tokens of a request's prompt and answer. drafts: maximum number of draft tokens per step."""

    shape: Literal["mimo7b", "tiny"]
    folder: Path
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    drafts: int
    acceptance: float
    rounds: int
    device: Literal["cpu", "cuda"]
    eager: bool = False


def parse_shape(text: str) -> Literal["mimo7b", "tiny"]:
    """Check the name of a shape. Raises UserError if it is unknown."""
    if text == "mimo7b":
        return "mimo7b"
    if text == "tiny":
        return "tiny"
    raise UserError(f"--shape: must be mimo7b or tiny, got {text}")


class Bench:
    """Creates the model, its workloads and its engines. num_engines: number of engines that share the GPU."""

    def __init__(self, options: Options, report: Callable[[str], None], num_engines: int) -> None:
        self.options, self.num_engines = options, num_engines
        config = cycle_config(options.shape)
        self.shape = shape_of(config)
        longest = self.shape.vocab // 4 - 1
        if options.tokens > longest:
            raise UserError(f"--tokens: {options.tokens} is too long for a vocabulary of {self.shape.vocab}; at most {longest}")
        if self.context > self.shape.max_positions:
            raise UserError(
                f"--prompt: {options.prompt} tokens and answers of up to {2 * options.tokens} need {self.context} positions, but "
                f"the model has {self.shape.max_positions}; reduce --prompt or --tokens"
            )
        write_cycle_model(options.folder, config, acceptance=options.acceptance, device=options.device)
        report(f"model: {options.folder}, {count_parameters(self.shape)['total']:,} parameters")

    def workloads(self, *, wrong_drafts: bool = False) -> list[Workload]:
        """One workload for each batch size. All requests of a workload are sent at once."""
        return [self._workload(f"batch {batch}", batch, batch, 0.0, wrong_drafts) for batch in self.options.batches]

    def queued(self) -> Workload:
        """A workload with four times the largest batch, and answers of different lengths, so that slots are refilled continuously."""
        max_batch = max(self.options.batches)
        return self._workload(f"{max_batch} in flight, {4 * max_batch} in all", max_batch, 4 * max_batch, 0.5, False)

    def _workload(self, name: str, batch: int, count: int, spread: float, wrong_drafts: bool) -> Workload:
        options = self.options
        return make_workload(
            name,
            batch,
            count,
            prompt_length=options.prompt,
            mean_answer_length=options.tokens,
            spread=spread,
            vocab=self.shape.vocab,
            wrong_drafts=wrong_drafts,
        )

    def recipe(self, drafts: int) -> Recipe:
        """The recipe of an engine for the largest batch.

        CUDA graphs are captured for the batch sizes of the workloads, for smaller batches (when requests end), and for steps with prefill.
        """
        options = self.options
        max_batch = max(options.batches)
        rollout: dict[str, object] = {
            "engine": "vllm",
            "max_in_flight": max_batch,
            "max_tokens": 2 * options.tokens,
            "threads": 1 if options.device == "cpu" else 0,
            "eager": options.eager,
            "speculation": {"num_tokens": drafts, "auto": drafts > 0},
        }
        if options.device == "cuda":
            cache_tokens = max_batch * (options.prompt + options.tokens + 32)
            rollout["kv_cache_bytes"] = cache_tokens * kv_bytes_per_token(self.shape, 1, 2, drafting=True)
            rollout["gpu_memory"] = GPU_MEMORY_FRACTION / self.num_engines
            if not options.eager:
                batch_sizes = sorted({1, 2, 4, *options.batches, *range(32, max_batch + 1, 32)})
                mixed_sizes = range(max_batch, 2 * max_batch + 1, max(1, max_batch // 4))
                sizes = sorted({*(count * width for count in batch_sizes for width in range(1, drafts + 2)), *mixed_sizes})
                rollout["engine_args"] = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
        return engine_recipe(options.folder, options.device, rollout)

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt with its answer, plus a margin."""
        return self.options.prompt + 2 * self.options.tokens + 64

    @property
    def _gpus(self) -> float:
        return round(1 / self.num_engines, 2) if self.options.device == "cuda" else 0.0

    def cluster(self) -> AbstractContextManager[object]:
        """A local Ray cluster with room for the engines."""
        gpus = 1 if self.options.device == "cuda" else 0
        config = ClusterConfig(device=self.options.device, num_cpus=None if gpus else self.num_engines + 1)
        return cluster(config, cpus=self.num_engines, gpus=gpus)

    def pool(self, drafts: int) -> AbstractAsyncContextManager[ReplicaPool]:
        """A pool with one engine. It selects a number of draft tokens up to `drafts`, unless `control_speculation` sets one."""
        return engine_pool(self.recipe(drafts), self.options.folder, self.context, self.options.device, self._gpus)

    @asynccontextmanager
    async def offline(self) -> AsyncIterator[Offline]:
        """vLLM's offline generation with the settings of `pool(0)`."""
        async with offline_actor(self.recipe(0), self.options.folder, self.context, self.options.device, self._gpus) as actor:

            async def send_offline(workload: Workload, logprobs: bool) -> Run:
                run: Run = await actor.send.remote(workload, self.shape.vocab, logprobs)
                return run

            yield send_offline

    def sender_for(self, pool: ReplicaPool) -> Send:
        return lambda workload: send_workload(pool, workload, self.shape.vocab)


@dataclass(frozen=True, slots=True)
class Result:
    """One row: throughput and its ratio to the baseline as medians over rounds, and the bounds that it misses.

    rates, ratios: of each round. draft_s: device seconds of drafting per step. steps, step_s: steps per round, and seconds of a step
    without prefill, if the engine reports them. allowed: `gain_with_free_verification`. idle: share of empty slots. drafts: draft tokens
    per step. wrong: number of answers that differ from the model's known ones.
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


def gain_with_free_verification(tokens: float, draft_s: float, step_s: float) -> float:
    """The speed-up if a step that verifies drafts took as long as one without drafts.

    tokens: tokens per step. draft_s: seconds of drafting per step. step_s: seconds of a step without speculation.
    """
    return tokens / (1 + draft_s / step_s)


async def send_alternately(workload: Workload, senders: Mapping[str, Send], rounds: int, *, warm_up: bool = True) -> dict[str, list[Run]]:
    """Send the workload with each sender `rounds` times, after a warm-up round. Every other round is reversed, to cancel out drift."""
    runs: dict[str, list[Run]] = {name: [] for name in senders}
    for round_number in range(-1 if warm_up else 0, rounds):
        for name in list(senders)[:: 1 if round_number % 2 == 0 else -1]:
            run = await await_within(senders[name](workload), RUN_TIMEOUT_S, f"{name}, {workload.name}")
            if round_number >= 0:
                runs[name].append(run)
    return runs


def make_row(what: str, workload: Workload, runs: list[Run], baseline: list[Run] | None = None, bound: float | None = None) -> Result:
    """Make a row from the runs of its rounds and those of its baseline. bound: minimum throughput relative to the baseline."""
    rates = tuple(run.tokens_per_s for run in runs)
    ratios = (
        tuple(run.tokens_per_s / baseline_run.tokens_per_s for run, baseline_run in zip(runs, baseline, strict=True)) if baseline else ()
    )
    ratio = statistics.median(ratios) if ratios else None
    misses = []
    if ratio is not None and bound is not None and ratio < bound:
        misses.append(f"{ratio:.3f}, bound {bound:.3g}")
    num_wrong = sum(run.wrong for run in runs)
    if num_wrong:
        misses.append(f"{num_wrong} answers are not the model's")
    idles = [run.idle for run in runs if run.idle is not None]
    idle = statistics.median(idles) if idles else None
    if idle is not None and idle > MAX_IDLE:
        misses.append(f"slots empty {idle:.1%} of the time, bound {MAX_IDLE:.0%}")
    stats = runs[-1].stats
    return Result(
        what,
        workload.name,
        statistics.median(rates),
        rates,
        ratio,
        ratios,
        accept_rate=stats.accept_rate if stats.drafted else None,
        accept_length=stats.accept_length if stats.drafted else None,
        idle=idle,
        wrong=num_wrong,
        misses=tuple(misses),
    )


class Table:
    """The rows so far. Each is printed as soon as it is measured."""

    def __init__(self, report: Report) -> None:
        self.rows: list[Result] = []
        self.report = report

    def add(self, result: Result) -> None:
        self.rows.append(result)
        self.report(format_row(result))


async def measure_path(bench: Bench, table: Table, workloads: list[Workload], offline: Offline, plain: ReplicaPool) -> None:
    """Measure the same loads through vLLM's offline generation and through the pool."""
    senders: dict[str, Send] = {VLLM: lambda workload: offline(workload, True), POOL: bench.sender_for(plain)}
    largest = bench.workloads()[-1]
    for workload in workloads:
        workload_senders = senders | ({VLLM_BARE: lambda workload: offline(workload, False)} if workload == largest else {})
        all_runs = await send_alternately(workload, workload_senders, bench.options.rounds)
        for name, runs in all_runs.items():
            baseline = None if name == VLLM else all_runs[VLLM]
            table.add(make_row(name, workload, runs, baseline, MIN_PATH_RATIO if name == POOL else None))


async def measure_speculation(bench: Bench, table: Table, plain: ReplicaPool, drafting: ReplicaPool) -> None:
    """Measure an engine without speculation, and one with 0 to k draft tokens and with the number that it selects."""
    for workload in bench.workloads():
        await _measure_fixed(bench, table, workload, plain, drafting)
    for wrong_drafts in (False, True):
        for workload in bench.workloads(wrong_drafts=wrong_drafts):
            await _measure_auto(bench, table, workload, plain, drafting, "auto, no draft right" if wrong_drafts else "auto")


async def _measure_fixed(bench: Bench, table: Table, workload: Workload, plain: ReplicaPool, drafting: ReplicaPool) -> None:
    counts = range(bench.options.drafts + 1)
    states: dict[int, list[SpeculationState]] = {drafts: [] for drafts in counts}
    send_to_drafting = bench.sender_for(drafting)

    def with_drafts(drafts: int) -> Send:
        async def send_drafting(workload: Workload) -> Run:
            await drafting.control_speculation(drafts)
            run = await send_to_drafting(workload)
            states[drafts].append((await drafting.control_speculation())[0])
            return run

        return send_drafting

    names = {drafts: f"{drafts} drafts" for drafts in counts}
    all_runs = await send_alternately(
        workload, {OFF: bench.sender_for(plain)} | {names[n]: with_drafts(n) for n in counts}, bench.options.rounds
    )
    baseline_row = make_row(OFF, workload, all_runs[OFF])
    table.add(baseline_row)
    for drafts in counts:
        runs = all_runs[names[drafts]]
        round_states = states[drafts][-len(runs) :]
        draft_s = statistics.median(state["draft_s"][drafts] for state in round_states) if drafts else 0.0
        max_gain = gain_with_free_verification(runs[-1].stats.accept_length, draft_s, workload.batch / baseline_row.tokens_per_s)
        bound = MIN_GAIN_SHARE * max_gain if drafts == 1 and workload.batch <= MAX_GAIN_BATCH else None
        table.add(
            replace(
                make_row(names[drafts], workload, runs, all_runs[OFF], bound),
                allowed=max_gain,
                draft_s=draft_s,
                drafts=drafts,
                steps=statistics.median(state["steps"][drafts] for state in round_states),
                step_s=statistics.median(state["step_s"][drafts] for state in round_states),
            )
        )


async def _measure_auto(bench: Bench, table: Table, workload: Workload, plain: ReplicaPool, drafting: ReplicaPool, what: str) -> None:
    """Measure `speculation.auto`: one round in which the engine compares numbers of drafts, then rounds with the selected number."""
    senders = {OFF: bench.sender_for(plain), what: bench.sender_for(drafting)}
    await drafting.control_speculation(-1)
    first_round = await send_alternately(workload, senders, 1, warm_up=False)
    table.add(make_row(f"{what}, first trials", workload, first_round[what], first_round[OFF]))
    await drafting.control_speculation()
    rounds = bench.options.rounds
    runs = await send_alternately(workload, senders, rounds, warm_up=False)
    state = (await drafting.control_speculation())[0]
    steps: dict[int, int] = state["steps"]
    most_frequent = max(steps, key=lambda drafts: steps[drafts])
    row = make_row(what, workload, runs[what], runs[OFF], MIN_AUTO_RATIO)
    table.add(replace(row, drafts=state["drafts"], steps=sum(steps.values()) / rounds, step_s=state["step_s"].get(most_frequent)))
    counts = ", ".join(f"{count} with {drafts}" for drafts, count in sorted(steps.items()))
    table.report(f"  number of steps by draft tokens: {counts}; {state['message'] or 'no measurement was completed'}")


def run_benchmark(options: Options, parts: list[str], report: Report) -> list[Result]:
    """Run the named parts of the benchmark. Every row is printed as soon as it is measured."""
    path, speculation = "path" in parts, "speculation" in parts
    bench = Bench(options, report, num_engines=1 + path + speculation)
    table = Table(report)

    async def measure() -> None:
        managers: list[AbstractAsyncContextManager[ReplicaPool | Offline]] = [bench.pool(0)]
        managers += [bench.offline()] if path else []
        managers += [bench.pool(options.drafts)] if speculation else []
        async with enter_all(*managers) as engines:
            freeze_heap()
            pools = [engine for engine in engines if isinstance(engine, ReplicaPool)]
            offlines = [engine for engine in engines if not isinstance(engine, ReplicaPool)]
            for offline in offlines:
                await measure_path(bench, table, bench.workloads(), offline, pools[0])
            if speculation:
                await measure_speculation(bench, table, pools[0], pools[1])
            for offline in offlines:
                # The queued workload is last, because it takes longest.
                await measure_path(bench, table, [bench.queued()], offline, pools[0])

    with bench.cluster():
        asyncio.run(measure())
    return table.rows


def format_row(result: Result) -> str:
    r = result
    selected = f" → {r.drafts} drafts" if r.what.startswith("auto") and r.drafts is not None else ""
    steps = "–" if r.steps is None else f"{r.steps:.0f}, {format_number(r.step_s and r.step_s * 1e3, '.2f')}"
    spread = f" ({min(r.ratios):.3f} – {max(r.ratios):.3f})" if r.ratios else ""
    return (
        f"| {r.what}{selected} | {r.load} | {r.tokens_per_s:,.0f} ({min(r.rates):,.0f} – {max(r.rates):,.0f}) "
        f"| {format_number(r.ratio, '.3f')}{spread} | {format_number(r.accept_rate, '.1%')} | {format_number(r.accept_length, '.2f')} "
        f"| {steps} | {format_number(r.draft_s and r.draft_s * 1e3, '.2f')} "
        f"| {format_number(r.allowed, '.2f')} | {format_number(r.idle, '.2%')} |"
    )


def format_verdict(results: list[Result]) -> list[str]:
    """The best number of drafts for each workload, and all missed bounds."""
    lines = []
    drafting = [r for r in results if r.what.endswith(" drafts")]
    for workload in dict.fromkeys(r.load for r in drafting):
        best = max((r for r in drafting if r.load == workload), key=lambda r: r.ratio or 0.0)
        lines.append(f"{workload}: best with {best.what}, {best.ratio:.2f} times as fast as without speculation")
    return lines + [f"MISSED {r.what}, {r.load}: {'; '.join(r.misses)}" for r in results if r.misses]


def to_document(options: Options, results: list[Result]) -> dict[str, object]:
    return {"options": {**asdict(options), "folder": str(options.folder)}, "timer": TIMED_WORK, "results": [asdict(r) for r in results]}
