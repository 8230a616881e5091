"""`mtpctl bench rollout --model FOLDER`: throughput of a model's rollout on one GPU, in comparison with vLLM's offline generation.

The length of each prompt and response is set in advance, so vLLM alone and one engine generate the same number of tokens; several engines
get proportionally more requests. Within a workload the response lengths differ, so slots become free at different times. All engines are
loaded at the same time and alternate.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mtpctl.bench.rollout_engines import Workload, engine_pool, engine_recipe, enter_all, offline_actor
from mtpctl.cluster.deadlines import await_within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.process import freeze_heap
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.recipe.model import ModelConfig, hf_config
from mtpctl.recipe.schema import ClusterConfig, Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.samples import GenerationRequest, Sample

OFFLINE = "vLLM LLM.generate"
LENGTH_SPREAD = 0.75
"""Response lengths are uniform in the mean times 1 ± this."""
GPU_MEMORY_FRACTION = 0.8
"""Share of GPU memory for all engines together."""
RUN_TIMEOUT_S = 300.0
TIMED_WORK = (
    "from sending the first request to receiving the last response, prefill included; engine start and one warm-up round excluded. "
    "All engines are loaded at the same time and alternate; a ratio is the median of the rounds' ratios"
)
HEADINGS = (
    "| what | in flight | tokens/s: median (min–max) | relative to vLLM | busy cores: controller's event loop | busy cores: each engine |"
)
RULE = "|---" * 6 + "|"

Report = Callable[[str], None]


EngineKey = tuple[int, int, str]
"""Number of engines, their slots, and their `rollout.engine_args` as JSON."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate: `engines` engines of mtpctl on the GPU, or vLLM alone if 0.

    in_flight: maximum concurrent requests of each engine. immediate_admission: admit each request as soon as a slot is free. engine_args:
    `rollout.engine_args` as JSON; ignored on CPUs.
    """

    name: str
    engines: int
    in_flight: int
    immediate_admission: bool = False
    engine_args: str = "{}"

    @property
    def engine_key(self) -> EngineKey:
        """Arms with the same key use the same engines."""
        return self.engines, self.in_flight, self.engine_args


@dataclass(frozen=True, slots=True)
class Options:
    """prompt: tokens of a random prompt. tokens: mean tokens of a response. group: responses per prompt. requests: per slot and round."""

    folder: Path
    device: Literal["cpu", "cuda"]
    prompt: int = 60
    tokens: int = 39
    group: int = 8
    requests: int = 8
    rounds: int = 2
    prompts: tuple[str, ...] = ()
    eager: bool = False

    @property
    def max_response_tokens(self) -> int:
        return max(1, round(self.tokens * (1 + LENGTH_SPREAD)))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One round of an arm.

    loop_cpu_s: CPU seconds of the controller's event loop. engines_cpu_s: those of all engine processes; None for vLLM.
    """

    seconds: float
    tokens: int
    loop_cpu_s: float = 0.0
    engines_cpu_s: float | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table. loop, busy: mean number of cores that the controller's event loop, and each engine, keep busy."""

    what: str
    in_flight: int
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    loop: float | None
    busy: float | None


def make_prompts(options: Options, count: int) -> list[list[int]]:
    """`count` prompts: the texts of `options.prompts` in turn, or random tokens that are not special.

    Raises UserError for a folder without a tokenizer.
    """
    from mtpctl.data.tokenizers import load_plain_tokenizer

    tokenizer = load_plain_tokenizer(options.folder)
    if options.prompts:
        encoded = [tokenizer.encode(text, special=True) for text in options.prompts]
        return [encoded[index % len(encoded)] for index in range(count)]
    tokens, draw = sorted({*range(tokenizer.vocab_size)} - tokenizer.special_ids), random.Random(0)
    return [draw.choices(tokens, k=options.prompt) for _ in range(count)]


def make_workload(options: Options, prompts: Sequence[list[int]], in_flight: int, engines: int) -> Workload:
    """A workload that fills the slots of all engines several times. The members of a group share their prompt and are consecutive."""
    count = count_requests(options, in_flight, engines)
    draw = random.Random(f"{in_flight} {count}")
    lengths = [max(1, round(options.tokens * draw.uniform(1 - LENGTH_SPREAD, 1 + LENGTH_SPREAD))) for _ in range(count)]
    return Workload(f"{in_flight} in flight", in_flight, [prompts[index // options.group] for index in range(count)], lengths)


def count_requests(options: Options, in_flight: int, engines: int) -> int:
    """Number of requests of a workload. engines: 0 for vLLM alone."""
    return in_flight * options.requests * max(1, engines)


async def send_workload(pool: ReplicaPool, workload: Workload, group: int, pids: Sequence[int]) -> Measurement:
    """Send a workload through a pool, and wait for all responses. pids: the processes of its engines' actors."""

    async def requests() -> AsyncIterator[GenerationRequest]:
        for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
            yield GenerationRequest(Sample(str(index), str(index // group), prompt), length)

    engine_cpu_seconds, loop_cpu_seconds, started = cpu_seconds(pids), time.thread_time(), time.perf_counter()
    tokens = 0
    async with aclosing(pool.generate(requests())) as samples:
        async for sample in samples:
            tokens += len(sample.response_ids)
    seconds = time.perf_counter() - started
    if tokens != sum(workload.lengths):
        raise RuntimeError(f"{tokens} tokens were generated, {sum(workload.lengths)} requested")
    return Measurement(seconds, tokens, time.thread_time() - loop_cpu_seconds, cpu_seconds(pids) - engine_cpu_seconds)


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds that these processes and their descendants have used so far."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # ended meanwhile
                continue
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_included(pid: int) -> bool:
        while pid in parents and pid not in pids:
            pid = parents[pid]
        return pid in pids

    return sum(count for pid, count in ticks.items() if is_included(pid)) / os.sysconf("SC_CLK_TCK")


SendOffline = Callable[[Workload], Awaitable[Measurement]]


class ModelBench:
    """Starts the engines of the arms for a model's folder, and measures them."""

    def __init__(self, options: Options, arms: Sequence[Arm]) -> None:
        self.options, self.arms = options, list(arms)
        config = hf_config(ModelConfig(path=str(options.folder)))
        if config is None:
            raise UserError(f"--model: {options.folder} has no config.json")
        self.shape: ModelShape = shape_of(config)
        max_requests = max(count_requests(options, arm.in_flight, arm.engines) for arm in self.arms)
        self.prompts = make_prompts(options, -(-max_requests // options.group))
        if self.context > self.shape.max_positions:
            raise UserError(
                f"--prompt: prompts and responses of up to {options.max_response_tokens} tokens take {self.context} positions, the model "
                f"has {self.shape.max_positions}; shorten the prompts, or reduce --tokens"
            )
        keys = {arm.engine_key for arm in self.arms}
        self.num_engines = sum(max(1, engines) for engines, _, _ in keys)

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt with its response, plus a margin."""
        return max(map(len, self.prompts)) + self.options.max_response_tokens + 8

    def recipe(self, key: EngineKey) -> Recipe:
        """The recipe of an arm's engines. Each has a cache for all of its slots."""
        engines, in_flight, engine_args = key
        options, gpu = self.options, self.options.device == "cuda"
        rollout: dict[str, object] = {
            "replicas": max(1, engines),
            "max_in_flight": in_flight,
            "max_tokens": options.max_response_tokens,
            "threads": 0 if gpu else 1,
            "eager": options.eager,
            "speculation": {"num_tokens": 0},
        }
        if gpu:
            rollout["gpus"] = self.share
            rollout["gpu_memory"] = GPU_MEMORY_FRACTION / self.num_engines
            rollout["kv_cache_bytes"] = in_flight * (self.context + 64) * kv_bytes_per_token(self.shape, 1, 2, drafting=False)
            rollout["engine_args"] = json.loads(engine_args)
        return engine_recipe(options.folder, options.device, rollout, mtp="off")

    @property
    def share(self) -> float:
        """Share of the GPU of each engine."""
        return int(1e4 / self.num_engines) / 1e4 if self.options.device == "cuda" else 0.0

    def pool(self, key: EngineKey) -> AbstractAsyncContextManager[ReplicaPool]:
        return engine_pool(self.recipe(key), self.options.folder, self.context, self.options.device, self.share, key[0])

    @asynccontextmanager
    async def offline(self, key: EngineKey) -> AsyncIterator[SendOffline]:
        """vLLM's offline generation with the settings of an engine."""
        async with offline_actor(self.recipe(key), self.options.folder, self.context, self.options.device, self.share) as actor:

            async def run(workload: Workload) -> Measurement:
                result = await actor.send.remote(workload, None, True)
                return Measurement(result.seconds, result.tokens)

            yield run

    async def measure(self, report: Report) -> list[Result]:
        """Start all engines, send each workload to the engines of its arms, and report a row for each arm."""
        keys = list(dict.fromkeys(arm.engine_key for arm in self.arms))
        managers: list[AbstractAsyncContextManager[ReplicaPool | SendOffline]] = [
            self.pool(key) if key[0] else self.offline(key) for key in keys
        ]
        results: list[Result] = []
        async with enter_all(*managers) as engines:
            freeze_heap()
            engine_by_key = dict(zip(keys, engines, strict=True))
            for in_flight in dict.fromkeys(arm.in_flight for arm in self.arms):
                arms = [arm for arm in self.arms if arm.in_flight == in_flight]
                measurements = await self._alternate(arms, engine_by_key)
                for arm in arms:
                    baseline = next((measurements[other.name] for other in arms if not other.engines), None)
                    results.append(_make_result(arm, measurements[arm.name], baseline))
                    report(format_row(results[-1]))
        return results

    async def _alternate(self, arms: Sequence[Arm], by_key: Mapping[EngineKey, ReplicaPool | SendOffline]) -> dict[str, list[Measurement]]:
        measurements: dict[str, list[Measurement]] = {arm.name: [] for arm in arms}
        for round_number in range(-1, self.options.rounds):
            for arm in arms[:: 1 if round_number % 2 else -1]:
                workload, engine = make_workload(self.options, self.prompts, arm.in_flight, arm.engines), by_key[arm.engine_key]
                if isinstance(engine, ReplicaPool):
                    await engine.set_immediate_admission(arm.immediate_admission)
                    sending = send_workload(engine, workload, self.options.group, await engine.pids())
                else:
                    sending = engine(workload)  # type: ignore[assignment]
                measurement = await await_within(sending, RUN_TIMEOUT_S, f"{arm.name}, {workload.name}")
                if round_number >= 0:
                    measurements[arm.name].append(measurement)
        return measurements


def _make_result(arm: Arm, rounds: list[Measurement], baseline: list[Measurement] | None) -> Result:
    seconds = sum(measurement.seconds for measurement in rounds)
    engines_cpu_s = [measurement.engines_cpu_s for measurement in rounds if measurement.engines_cpu_s is not None]
    return Result(
        arm.name,
        arm.in_flight,
        tuple(measurement.rate for measurement in rounds),
        tuple(measurement.rate / baseline_round.rate for measurement, baseline_round in zip(rounds, baseline, strict=True))
        if baseline
        else (),
        sum(measurement.loop_cpu_s for measurement in rounds) / seconds if arm.engines else None,
        sum(engines_cpu_s) / seconds / arm.engines if arm.engines and len(engines_cpu_s) == len(rounds) else None,
    )


def format_row(result: Result) -> str:
    rates = result.rates
    ratio = f"{statistics.median(result.ratios):.2f}" if result.ratios else "–"
    loop = "–" if result.loop is None else f"{result.loop:.2f}"
    busy = "–" if result.busy is None else f"{result.busy:.2f}"
    spread = f"{statistics.median(rates):,.0f} ({min(rates):,.0f} – {max(rates):,.0f})"
    return f"| {result.what} | {result.in_flight} | {spread} | {ratio} | {loop} | {busy} |"


def default_arms(batches: Sequence[int], engines: int) -> list[Arm]:
    """vLLM alone, one engine and, if more than one, `engines` engines, for each number of requests in flight."""
    arms = []
    for batch in batches:
        arms += [Arm(OFFLINE, 0, batch), Arm("one engine", 1, batch)]
        arms += [Arm(f"{engines} engines", engines, batch)] if engines > 1 else []
    return arms


def run_benchmark(options: Options, arms: Sequence[Arm], report: Report) -> list[Result]:
    """Measure the arms on one GPU, or on CPUs. Prints the table's head first, and each row as soon as it is measured."""
    bench = ModelBench(options, arms)
    report(f"The timer covers: {TIMED_WORK}.\n{HEADINGS}\n{RULE}")
    gpus = int(options.device == "cuda")
    config = ClusterConfig(device=options.device, num_cpus=bench.num_engines + 1)
    with cluster(config, cpus=bench.num_engines, gpus=gpus):
        return asyncio.run(bench.measure(report))


def to_document(options: Options, results: Sequence[Result]) -> dict[str, object]:
    return {"options": {**asdict(options), "folder": str(options.folder)}, "timer": TIMED_WORK, "results": [asdict(r) for r in results]}
