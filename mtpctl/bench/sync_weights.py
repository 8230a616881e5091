"""`mtpctl bench sync-weights`: how long a weight sync takes, and what generation loses by it.

A trainer in a process of its own and a vLLM engine that speculates, both with weights drawn at random. While requests are in
flight the trainer's weights are synced several times, over one transport after the other, target and draft under one version.

A sync's timer covers everything from the announcement of a version to the last engine resumed: export, packing, transfer, both
update sessions. The stall is the engine's, from the call that pauses it to the return of the one that resumes it. The wire's
time is the one in which a bucket was under way, and the link's the same for buckets that nobody packs, over the same
communicator, in the same run. Throughput is back,
counted from the pause, when tokens come at 90% of the rate before the sync, over a window after the resume.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtpctl import families
from mtpctl.recipe import Recipe, RuntimeFailure
from mtpctl.sync import Manifest, Sender, Sent, SyncReport
from mtpctl.sync.transports import PUSHED

GIB = 1 << 30
BOUNDS = {"wire": 2.0, "seconds": 0.5, "stall": 0.6, "memory_gib": 1.0, "tiny_seconds": 0.05}
"""Wire over link; seconds of a sync and of a stall at the shape of MiMo-7B; GiB beside two buckets; seconds on a CPU."""
BACK = 0.9
TIMER = "announcement to last resume: export, packing, transfer, both update sessions; a stall from pause to resume"


@dataclass(frozen=True)
class Options:
    """What to measure. `config` are a model's config.json fields; `shared`: trainer and engine on one card."""

    config: dict[str, Any]
    device: Literal["cpu", "cuda"]
    transports: tuple[str, ...]
    repeats: int
    batch: int
    prompt: int
    tokens: int
    bucket_bytes: int
    eager: bool
    shared: bool
    folder: Path

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        """Of trainer and engine."""
        return "bf16" if self.device == "cuda" else "fp32"

    @property
    def window_s(self) -> float:
        """Seconds over which throughput is told."""
        return 0.1 if self.device == "cuda" else 1.0


@dataclass
class Result:
    """Syncs over one transport: each list has an entry a sync. Rates in GB/s, memory in GiB beyond what was there before."""

    transport: str
    nbytes: int
    buckets: int
    link_gb_per_s: float
    first_seconds: float
    verified: int
    seconds: list[float] = field(default_factory=list)
    export_seconds: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    trainer_gib: float = 0.0
    engine_gib: float = 0.0
    misses: list[str] = field(default_factory=list)

    @property
    def link_seconds(self) -> float:
        """Seconds that the link takes for all bytes."""
        return self.nbytes / self.link_gb_per_s / 1e9


# ------------------------------------------------------------------------------------------------------------- trainer


def _trainer(pipe: Any, recipe_json: str, folder: str, visible: str) -> None:
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from mtpctl.compat import cpu_device
    from mtpctl.engine import EngineConfig, MegatronEngine
    from mtpctl.train.trainer import TrainerRank

    class Drawn(TrainerRank):
        """A trainer whose weights are drawn on its device, and that changes its transport."""

        def make(self, folder: str) -> None:
            from mtpctl.convert import HfFolder

            config = json.loads((Path(folder) / "config.json").read_text())
            train = self.recipe.train
            settings = EngineConfig(
                parallel=train.parallel,
                precision=train.precision,
                mtp=self.recipe.mtp,
                kernels=self.recipe.kernels,
                train=False,
                random_seed=1,
            )
            self.engine = MegatronEngine(HfFolder(Path(folder), config, families.shape_of(config)), settings)

        def take(self, transport: str) -> None:
            if isinstance(self.publisher, Sender):
                self.publisher.close()
            self.publisher, self.learned = None, False
            self.recipe = self.recipe.model_copy(update={"sync": self.recipe.sync.model_copy(update={"transport": transport})})

        def probe(self, number: int) -> Sent:
            sent: Sent = self.publisher.probe(number)
            return sent

        def memory(self, reset: bool = False) -> dict[str, int]:
            import torch

            if not torch.cuda.is_available():
                return {"allocated": 0, "peak": 0, "used": 0}
            if reset:
                torch.cuda.reset_peak_memory_stats()
            free, total = torch.cuda.mem_get_info()
            return {"allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(), "used": total - free}

    cpu_device.install()
    rank = Drawn(recipe_json, 0, 1)
    rank.make(folder)
    pipe.send((True, None))
    while (call := pipe.recv()) is not None:
        method, arguments = call
        try:
            pipe.send((True, getattr(rank, method)(*arguments)))
        except Exception as error:
            pipe.send((False, error))


class Trainer:
    """The trainer's process, called as `TrainerGroup` is."""

    def __init__(self, recipe: Recipe, folder: Path, visible: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_trainer, args=(theirs, recipe.model_dump_json(by_alias=True), str(folder), visible), daemon=True
        )
        self._process.start()
        self._lock = asyncio.Lock()

    async def ready(self) -> None:
        """Return once the model is there."""
        await self._answer("make")

    async def call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """What `method` returns. Raises what it raises."""
        async with self._lock:
            self._pipe.send((method, arguments))
            return await self._answer(method)

    async def _answer(self, method: str) -> Any:
        while not await asyncio.to_thread(self._pipe.poll, 0.5):
            if not self._process.is_alive():
                raise RuntimeFailure(f"the trainer's process ended in {method}, exit code {self._process.exitcode}")
        done, result = self._pipe.recv()
        if not done:
            raise result
        return result

    def end(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


# -------------------------------------------------------------------------------------------------------------- engine


class Alone:
    """The one engine as `WeightSync` sees a pool."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def members(self, ranks: int) -> list[str]:
        return [f"engine {rank}" for rank in range(ranks)]

    async def update(self, manifest: Manifest, **options: Any) -> list[SyncReport]:
        from mtpctl.sync import or_cancel

        report: SyncReport = await or_cancel(manifest, self.engine.update(manifest, **options))
        return [report]


class Load:
    """Requests that are always in flight, and when each of their tokens came."""

    def __init__(self, llm: Any, options: Options) -> None:
        self._llm, self._options = llm, options
        self.came: deque[tuple[float, int]] = deque()
        self._tasks = [asyncio.create_task(self._forever(place)) for place in range(options.batch)]

    async def _forever(self, place: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        prompt = [3 + (place * 7 + i) % 200 for i in range(self._options.prompt)]
        turn = 0
        while True:
            sampling = SamplingParams(
                max_tokens=self._options.tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
            )
            async for step in self._llm.generate(tokens_input(prompt), sampling, f"load-{place}-{turn}"):
                self.came.append((time.perf_counter(), len(step.outputs[0].token_ids)))
            turn += 1

    def rate(self, start: float, stop: float) -> float:
        """Tokens a second that came in `[start, stop)`."""
        return sum(count for at, count in self.came if start <= at < stop) / (stop - start)

    def back(self, since: float, rate: float) -> float:
        """Seconds from `since` until a window's rate is `BACK` of `rate`; infinite where it was not yet."""
        window = self._options.window_s
        last = self.came[-1][0]
        at = since
        while at + window <= last:
            if self.rate(at, at + window) >= BACK * rate:
                return at + window - since
            at += window / 20
        return float("inf")

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()


# ------------------------------------------------------------------------------------------------------------- measuring


def recipe_of(options: Options) -> Recipe:
    """What trainer and engine are told."""
    return Recipe.model_validate(
        {
            "name": "bench-sync-weights",
            "run_dir": str(options.folder / "run"),
            "model": {"path": str(options.folder / "model")},
            "mtp": {"mode": "isolated"},
            "data": {"task": {"name": "addition"}},
            "train": {"stages": ["rl"], "precision": options.precision},
            "rollout": {
                "engine": "vllm",
                "max_tokens": options.tokens,
                "context": options.prompt + options.tokens + 8,
                "max_in_flight": options.batch,
                "eager": options.eager,
                "speculation": {"num_tokens": 1},
                "threads": 1 if options.device == "cpu" else 0,
                "gpu_memory": 0.45 if options.shared else 0.8,
                "kv_cache_bytes": 256 << 20 if options.device == "cpu" else None,
                "engine_args": {"load_format": "dummy"},
            },
            "sync": {"transport": options.transports[0], "bucket_bytes": options.bucket_bytes, "deadline_s": 60},
            "cluster": {"device": options.device},
        }
    )


async def measure(options: Options, say: Callable[[str], None]) -> list[Result]:
    """Start both ends once, and sync over every transport in turn."""
    from mtpctl.rollout import VllmEngine, engine_settings

    model = options.folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(options.config))
    # Names without weights: the mapping to Hugging Face wants to know which there are.
    names = families.tensors(families.shape_of(options.config))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    recipe = recipe_of(options)
    began = time.perf_counter()
    cuda = options.device == "cuda"
    trainer = Trainer(recipe, model, "0" if cuda else "")
    if cuda:
        # This process may have looked at the cards before it tells the engine's which one is its own.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ["CUDA_VISIBLE_DEVICES"] = "0" if options.shared else "1"
    try:
        if options.shared:
            await trainer.ready()
        settings = engine_settings(recipe.rollout, model=str(model), precision=options.precision, device=options.device, seed=0)  # type: ignore[arg-type]
        engine = await VllmEngine.start(settings)
        try:
            if not options.shared:
                await trainer.ready()
            say(f"trainer and engine ready after {time.perf_counter() - began:.0f} s")
            results = []
            version = 0
            for transport in options.transports:
                result, version = await _one(options, recipe, trainer, engine, transport, version, say)
                results.append(result)
            return results
        finally:
            await engine.shutdown()
    finally:
        trainer.end()


async def _one(
    options: Options, recipe: Recipe, trainer: Trainer, engine: Any, transport: str, version: int, say: Callable[[str], None]
) -> tuple[Result, int]:
    from mtpctl.train.weights import WeightSync

    recipe = recipe.model_copy(update={"sync": recipe.sync.model_copy(update={"transport": transport})})
    await trainer.call("take", transport)
    store = options.folder / f"versions-{transport}"
    if transport == "shm":
        from mtpctl.sync import default_root

        store = default_root(f"bench-{os.getpid()}", 3 * sum_bytes(options), store)
    sync = WeightSync(recipe, trainer, Alone(engine), None, store)  # type: ignore[arg-type]
    before = await _memory(trainer, engine)
    await sync(version := version + 1, verify=True)
    assert sync.last is not None
    first = sync.reports[0]
    await sync.kept()
    link = await _link(options, trainer, engine, sync.last)
    # The probe's scratch is no part of a sync, nor is what verifying or keeping the first version took.
    ready = await _memory(trainer, engine, reset=True)
    result = Result(
        transport, sync.last.nbytes, sum(len(s.buckets) for s in sync.last.sections.values()), link, first.seconds, first.verified
    )
    say(f"{transport}: {result.nbytes / 1e9:.3f} GB in {result.buckets} buckets, {first.verified} tensors verified, link {link:.1f} GB/s")
    load = Load(engine._llm, options)
    try:
        await _steady(load, options)
        for _ in range(options.repeats):
            await asyncio.sleep(3 * options.window_s)
            now = time.perf_counter()
            rate = load.rate(now - 3 * options.window_s, now)
            metrics = await sync(version := version + 1, verify=False)
            resumed = time.perf_counter()
            await sync.kept()
            report = sync.reports[0]
            back = report.stall_seconds + await _back(load, resumed, rate, options)
            result.seconds.append(metrics["sync/seconds"])
            result.export_seconds.append(metrics["sync/publish_seconds"])
            result.wire_seconds.append(sync.sent.wire_seconds or metrics["sync/seconds"])
            result.stall_seconds.append(report.stall_seconds)
            result.back_seconds.append(back)
            result.tokens_per_s.append(rate)
            say(
                f"  version {version}: {metrics['sync/seconds']:.3f} s, stall {report.stall_seconds:.3f} s, wire "
                f"{result.wire_seconds[-1]:.3f} s, waited {sync.sent.wait_seconds:.3f} s, kept after {time.perf_counter() - resumed:.2f} s"
            )
        after = await _memory(trainer, engine)
    finally:
        load.end()
    result.trainer_gib = _extra(before[0], ready[0], after[0], alone=not options.shared)
    result.engine_gib = _extra(before[1], ready[1], after[1], alone=not options.shared)
    result.misses = misses(result, options)
    if transport == "shm":
        from mtpctl.sync import VersionStore

        VersionStore(store).close()
    return result, version


def sum_bytes(options: Options) -> int:
    """Bytes of the model."""
    return families.count(families.shape_of(options.config))["total"] * (2 if options.precision == "bf16" else 4)


async def _memory(trainer: Trainer, engine: Any, *, reset: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    theirs: dict[str, int] = await trainer.call("memory", reset)
    ours: dict[str, int] = (await engine._llm.collective_rpc("mtpctl_memory", args=("reset" if reset else "",)))[0]
    return theirs, ours


def _extra(before: dict[str, int], ready: dict[str, int], after: dict[str, int], *, alone: bool) -> float:
    """GiB that syncs needed: tensors at most beyond those between syncs, and what stays on the card beside tensors.

    The latter only where a process has the card `alone`: a card does not tell whose memory it is.
    """
    tensors = after["peak"] - ready["allocated"]
    beside = (after["used"] - before["used"]) - (after["peak"] - before["peak"]) if alone else 0
    return (tensors + max(0, beside)) / GIB


async def _link(options: Options, trainer: Trainer, engine: Any, manifest: Manifest) -> float:
    """GB/s of the transport with nothing to pack: the best of three."""
    if manifest.transport not in PUSHED:
        from mtpctl.train.manual_sync import copy_rate

        return copy_rate(min(manifest.nbytes, options.bucket_bytes))
    rates = []
    await engine.pause("keep")
    for number in range(1, 4):
        sending = asyncio.create_task(trainer.call("probe", number))
        await asyncio.sleep(0)
        await engine._target.probe(manifest, number)
        sent: Sent = await sending
        rates.append(sent.nbytes / sent.wire_seconds / 1e9)
    await engine.resume()
    return max(rates)


async def _steady(load: Load, options: Options) -> None:
    """Return once every request is in flight and two windows in a row have the same rate, within 15%."""
    window = options.window_s
    for _ in range(60):
        await asyncio.sleep(2 * window)
        now = time.perf_counter()
        one, two = load.rate(now - 2 * window, now - window), load.rate(now - window, now)
        if one and abs(one - two) < 0.15 * one:
            return


async def _back(load: Load, since: float, rate: float, options: Options) -> float:
    for _ in range(100):
        await asyncio.sleep(options.window_s)
        if (found := load.back(since, rate)) < float("inf"):
            return found
    return float("inf")


def misses(result: Result, options: Options) -> list[str]:
    """Which bounds are missed, each in words."""
    found = []

    def held(what: str, value: float, bound: float, unit: str) -> None:
        if value > bound:
            found.append(f"{what} {value:.3f} {unit}, bound {bound:g}")

    if options.device == "cpu":
        held("a sync", statistics.median(result.seconds), BOUNDS["tiny_seconds"], "s")
        return found
    if result.transport == "nccl":
        held("wire over link", statistics.median(result.wire_seconds) / result.link_seconds, BOUNDS["wire"], "x")
    if result.transport in PUSHED:
        held("a sync", statistics.median(result.seconds), BOUNDS["seconds"], "s")
        held("a stall", statistics.median(result.stall_seconds), BOUNDS["stall"], "s")
        room = 2 * options.bucket_bytes / GIB + BOUNDS["memory_gib"]
        held("memory beside the trainer's", result.trainer_gib, room, "GiB")
        held("memory beside the engine's", result.engine_gib, room, "GiB")
    return found


def table(results: list[Result]) -> str:
    """For a terminal, and for docs/benchmarks.md. Medians, with the least and the most."""

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"

    lines = [
        "| transport | GB | buckets | link GB/s | wire s | × link | sync s | stall s | throughput back s | of tokens/s | "
        "extra GiB trainer / engine | verified |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ratio = statistics.median(r.wire_seconds) / r.link_seconds
        lines.append(
            f"| {r.transport} | {r.nbytes / 1e9:.3f} | {r.buckets} | {r.link_gb_per_s:.1f} | {spread(r.wire_seconds)} | {ratio:.2f} "
            f"| {spread(r.seconds)} | {spread(r.stall_seconds)} | {spread(r.back_seconds)} | {statistics.median(r.tokens_per_s):.0f} "
            f"| {r.trainer_gib:.2f} / {r.engine_gib:.2f} | {r.verified} |"
        )
    return "\n".join(lines)


def as_json(results: list[Result]) -> str:
    """Everything that was measured."""
    return json.dumps([{**asdict(r), "link_seconds": r.link_seconds} for r in results], indent=1)


def run(options: Options, say: Callable[[str], None]) -> list[Result]:
    """`measure` in a loop of its own."""
    step: Awaitable[list[Result]] = measure(options, say)
    return asyncio.run(step)  # type: ignore[arg-type]
