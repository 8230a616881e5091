"""`mtpctl bench sync-weights`: how long a weight sync takes, and how long it stalls generation.

The trainer runs in a separate process; the vLLM engine speculates. Both have random weights. While requests are in flight, the trainer's
weights (target and draft under one version) are synced several times over each transport.

- A sync lasts from the announcement of a version until the engine has resumed: export, packing, transfer, and loading into target
  and drafter.
- A stall lasts from the call that pauses the engine to the return of the call that resumes it.
- Wire time is the time to send the buckets. Link time is the time to send the same number of bytes without packing.
- Throughput has recovered when its average over a window is 90% of the rate before the sync. The recovery time starts at the pause.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mtpctl.bench.report import Environment, cuda_visible_devices, format_spread, markdown_table
from mtpctl.bench.sync_ends import RequestLoad, SingleEngine, TrainerProcess
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import count_parameters, tensor_shapes
from mtpctl.plan.memory import GIB, WEIGHT_BYTES
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.sync import PUSH_TRANSPORTS
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.transports.base import TransferStats

if TYPE_CHECKING:
    from mtpctl.rollout.vllm.engine import VllmEngine

TIMED_WORK = "announcement to last resume: export, packing, transfer, loading into target and drafter; a stall from pause to resume"
BOUNDS = {"wire": 2.0, "seconds": 0.15, "fp8_seconds": 0.09, "stall": 0.6, "memory_gib": 1.0, "tiny_seconds": 0.05}
"""wire: relative to link time. seconds, fp8_seconds, stall: for MiMo-7B. memory_gib: in addition to two buckets. tiny_seconds: of a sync
on a CPU."""


@dataclass(frozen=True)
class Options:
    """config: the model's `config.json` fields. fp8: the engine's linear layers are in FP8. shared: trainer and engine share a GPU."""

    config: dict[str, object]
    device: Literal["cpu", "cuda"]
    transports: tuple[str, ...]
    repeats: int
    batch: int
    prompt: int
    tokens: int
    bucket_bytes: int
    fp8: bool
    eager: bool
    shared: bool
    folder: Path

    @property
    def as_json(self) -> dict[str, object]:
        """The options except the folder, JSON-serializable."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        return "bf16" if self.device == "cuda" or self.fp8 else "fp32"

    @property
    def window_s(self) -> float:
        """Seconds over which throughput is averaged."""
        return 0.1 if self.device == "cuda" else 1.0


def compute_extra_gib(before: dict[str, int], after: dict[str, int], *, exclusive: bool) -> float:
    """GPU memory in GiB that syncs need in addition to the memory allocated before.

    `before`, `after`: results of `gpu_memory` before and after the syncs; the first call resets the peaks.

    Counts the peak of tensors, and memory that torch's allocator reserved beyond that peak due to fragmentation. If no other process uses
    the GPU (`exclusive`), also counts the memory of NCCL's buffers and CUDA's kernels.
    """
    tensor_growth = after["peak"] - before["allocated"]
    reserved_growth = after["peak_reserved"] - before["reserved"]
    outside_torch = (after["used"] - after["reserved"]) - (before["used"] - before["reserved"]) if exclusive else 0
    return (tensor_growth + max(0, reserved_growth - tensor_growth) + max(0, outside_torch)) / GIB


@dataclass
class Result:
    """The syncs over one transport. Each list of numbers has one entry per sync.

    verified: number of tensors whose checksums were compared. back_seconds: seconds until throughput has recovered. tokens_per_s: rate
    before the sync. phase_seconds: seconds of each phase, in order.
    """

    transport: str
    nbytes: int
    buckets: int
    link_gb_per_s: float
    verified: int
    seconds: list[float] = field(default_factory=list)
    export_seconds: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    trainer_gib: float = 0.0
    engine_gib: float = 0.0
    misses: list[str] = field(default_factory=list)

    @property
    def link_seconds(self) -> float:
        """Seconds to send all bytes at the rate of the link."""
        return self.nbytes / self.link_gb_per_s / 1e9


def find_misses(result: Result, options: Options) -> list[str]:
    """The bounds that a result misses, each in a few words."""
    missed = []

    def check(name: str, value: float, bound: float, unit: str) -> None:
        if value > bound:
            missed.append(f"{name} {value:.3f} {unit}, bound {bound:g}")

    if options.device == "cpu":
        check("a sync", statistics.median(result.seconds), BOUNDS["tiny_seconds"], "s")
        return missed
    if result.transport == "nccl":
        check("wire over link", statistics.median(result.wire_seconds) / result.link_seconds, BOUNDS["wire"], "x")
    if result.transport in PUSH_TRANSPORTS:
        check("a sync", statistics.median(result.seconds), BOUNDS["fp8_seconds" if options.fp8 else "seconds"], "s")
        check("a stall", statistics.median(result.stall_seconds), BOUNDS["stall"], "s")
        bound = 2 * options.bucket_bytes / GIB + BOUNDS["memory_gib"]
        check("extra memory of the trainer", result.trainer_gib, bound, "GiB")
        check("extra memory of the engine", result.engine_gib, bound, "GiB")
    return missed


def make_recipe(options: Options) -> Recipe:
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
                "quantization": "fp8" if options.fp8 else "none",
                "speculation": {"num_tokens": 1},
                "threads": 1 if options.device == "cpu" else 0,
                "gpu_memory": 0.45 if options.shared else 0.8,
                "kv_cache_bytes": 256 << 20 if options.device == "cpu" else None,
                "engine_args": {} if options.fp8 else {"load_format": "dummy"},
            },
            "sync": {"transport": options.transports[0], "bucket_bytes": options.bucket_bytes, "deadline_s": 60},
            "cluster": {"device": options.device},
        }
    )


def select_gpus(options: Options) -> tuple[str, str]:
    """`CUDA_VISIBLE_DEVICES` of trainer and engine: the first and the second GPU of this process, or the first for both."""
    if options.device == "cpu":
        return "", ""
    return cuda_visible_devices([0]), cuda_visible_devices([0 if options.shared else 1])


async def measure(options: Options, report: Callable[[str], None]) -> list[Result]:
    """Start trainer and engine, and measure each transport in turn."""
    import torch
    from safetensors.torch import save_file

    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import build_engine_settings

    model = options.folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(options.config))
    # The mapping of names reads the index. Only an FP8 engine loads weight files: it quantizes them, so they are written, as zeros.
    shapes = tensor_shapes(shape_of(options.config))
    files = {name: f"{index}.safetensors" for index, name in enumerate(shapes)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if options.fp8:
        for name, file in files.items():
            save_file({name: torch.zeros(shapes[name], dtype=torch.bfloat16)}, model / file)
    recipe = make_recipe(options)
    started = time.perf_counter()
    cuda = options.device == "cuda"
    trainer_gpus, engine_gpus = select_gpus(options)
    trainer = TrainerProcess(recipe, model, trainer_gpus)
    if cuda:
        # This process may have initialized CUDA with another GPU, so the engine must not be forked.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ["CUDA_VISIBLE_DEVICES"] = engine_gpus
    try:
        if options.shared:
            await trainer.ready()
        settings = build_engine_settings(recipe.rollout, model=str(model), precision=options.precision, device=options.device, seed=0)  # type: ignore[arg-type]
        engine = await VllmEngine.start(settings)
        try:
            if not options.shared:
                await trainer.ready()
            report(f"trainer and engine ready after {time.perf_counter() - started:.0f} s")
            results = []
            version = 0
            for transport in options.transports:
                result, version = await _measure_transport(options, recipe, trainer, engine, transport, version, report)
                results.append(result)
            return results
        finally:
            await engine.shutdown()
    finally:
        trainer.end()


async def _measure_transport(
    options: Options,
    recipe: Recipe,
    trainer: TrainerProcess,
    engine: VllmEngine,
    transport: str,
    version: int,
    report: Callable[[str], None],
) -> tuple[Result, int]:
    from mtpctl.controller.weights import WeightSync

    recipe = recipe.model_copy(update={"sync": recipe.sync.model_copy(update={"transport": transport})})
    await trainer.call("use", transport)
    store = options.folder / f"versions-{transport}"
    if transport not in PUSH_TRANSPORTS:
        from mtpctl.sync.store import default_root

        store = default_root(f"bench-{os.getpid()}", 3 * model_bytes(options), store)
    sync = WeightSync(recipe, trainer, SingleEngine(engine), None, store)
    load = RequestLoad(engine._llm, options)
    try:
        # The memory that the engine allocates when it begins to generate must not be attributed to the sync.
        await _wait_until_steady(load, options)
        memory_before = await _read_memory(trainer, engine, reset=True)
        await sync(version := version + 1, verify=True)
        assert sync.last_update is not None
        manifest, first_report = sync.last_update.manifest, sync.last_update.reports[0]
        await sync.wait_copied()
        link_gb_per_s = await _measure_link(options, trainer, engine, manifest)
        buckets = sum(len(section.buckets) for section in manifest.sections.values())
        result = Result(transport, manifest.nbytes, buckets, link_gb_per_s, first_report.verified)
        report(
            f"{transport}: {result.nbytes / 1e9:.3f} GB in {buckets} buckets, {first_report.verified} tensors verified, "
            f"link {link_gb_per_s:.1f} GB/s"
        )
        await _wait_until_steady(load, options)
        for _ in range(options.repeats):
            await asyncio.sleep(3 * options.window_s)
            rate_before = load.recent_rate(3 * options.window_s)
            metrics = await sync(version := version + 1, verify=False)
            resumed = time.perf_counter()
            await sync.wait_copied()
            persist_s = time.perf_counter() - resumed
            load.check()
            sync_report, sent = sync.last_update.reports[0], sync.last_update.sent
            recovery = sync_report.stall_seconds + await _wait_for_recovery(load, resumed, rate_before, options)
            result.seconds.append(metrics["sync/seconds"])
            result.export_seconds.append(metrics["sync/publish_seconds"])
            result.wire_seconds.append(sent.wire_seconds or metrics["sync/seconds"])
            result.stall_seconds.append(sync_report.stall_seconds)
            result.back_seconds.append(recovery)
            result.tokens_per_s.append(rate_before)
            for phase, seconds in {"plan": sync.last_update.plan_seconds, **sync_report.phases}.items():
                result.phase_seconds.setdefault(phase, []).append(seconds)
            report(
                f"  version {version}: {metrics['sync/seconds']:.3f} s, stall {sync_report.stall_seconds:.3f} s, wire "
                f"{result.wire_seconds[-1]:.3f} s, waited {sent.wait_seconds:.3f} s, persisted after {persist_s:.2f} s"
            )
        memory_after = await _read_memory(trainer, engine)
    finally:
        load.end()
        if transport not in PUSH_TRANSPORTS:
            from mtpctl.sync.store import VersionStore

            # The store may be in shared memory, which is not freed when this process ends.
            VersionStore(store).close()
    result.trainer_gib, result.engine_gib = (
        compute_extra_gib(*readings, exclusive=not options.shared) for readings in zip(memory_before, memory_after, strict=True)
    )
    report(f"  extra GiB of the trainer: {result.trainer_gib:.2f}; of the engine: {result.engine_gib:.2f}")
    result.misses = find_misses(result, options)
    return result, version


def model_bytes(options: Options) -> int:
    return count_parameters(shape_of(options.config))["total"] * WEIGHT_BYTES[options.precision]


async def _read_memory(trainer: TrainerProcess, engine: VllmEngine, *, reset: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    trainer_memory: dict[str, int] = await trainer.call("memory", reset)
    engine_memory: dict[str, int] = (await engine._llm.collective_rpc("mtpctl_memory", args=("reset" if reset else "",)))[0]
    return trainer_memory, engine_memory


async def _measure_link(options: Options, trainer: TrainerProcess, engine: VllmEngine, manifest: Manifest) -> float:
    """The best rate of several attempts, in GB/s: of the transport without packing if it pushes, else of a copy in host memory."""
    if manifest.transport not in PUSH_TRANSPORTS:
        from mtpctl.sync.receiver import copy_rate

        return copy_rate(min(manifest.nbytes, options.bucket_bytes))
    rates = []
    await engine.pause("keep")
    for probe_number in range(1, 4):
        send_task = asyncio.create_task(trainer.call("probe", probe_number))
        await asyncio.sleep(0)
        await engine._target.probe(manifest, probe_number)
        stats: TransferStats = await send_task
        rates.append(stats.nbytes / stats.wire_seconds / 1e9)
    await engine.resume()
    return max(rates)


async def _wait_until_steady(load: RequestLoad, options: Options) -> None:
    """Wait until the rates of two consecutive windows differ by less than 15%, for at most 60 pairs of windows.

    Raises the error of a failed request, or RuntimeFailure if no tokens arrive.
    """
    window = options.window_s
    for _ in range(60):
        await asyncio.sleep(2 * window)
        load.check()
        now = time.perf_counter()
        earlier_rate, later_rate = load.rate(now - 2 * window, now - window), load.rate(now - window, now)
        if earlier_rate and abs(earlier_rate - later_rate) < 0.15 * earlier_rate:
            return
    load.recent_rate(2 * window)  # raises RuntimeFailure if no tokens arrived


async def _wait_for_recovery(load: RequestLoad, since: float, rate: float, options: Options) -> float:
    for _ in range(100):
        await asyncio.sleep(options.window_s)
        if (seconds := load.recovery(since, rate)) < float("inf"):
            return seconds
    return float("inf")


def format_table(results: list[Result]) -> str:
    """Medians, with minimum and maximum."""
    headings = "transport | GB | buckets | link GB/s | wire s | × link | sync s | stall s | recovery s | tokens/s before"
    rows = [
        (
            r.transport,
            f"{r.nbytes / 1e9:.3f}",
            r.buckets,
            f"{r.link_gb_per_s:.1f}",
            format_spread(r.wire_seconds, ".3f"),
            f"{statistics.median(r.wire_seconds) / r.link_seconds:.2f}",
            format_spread(r.seconds, ".3f"),
            format_spread(r.stall_seconds, ".3f"),
            format_spread(r.back_seconds, ".3f"),
            f"{statistics.median(r.tokens_per_s):.0f}",
            f"{r.trainer_gib:.2f} / {r.engine_gib:.2f}",
            r.verified,
        )
        for r in results
    ]
    return markdown_table(f"{headings} | extra GiB trainer / engine | verified".split(" | "), rows)


def format_phases(results: list[Result]) -> str:
    """The phases of a sync in milliseconds: medians, with minimum and maximum."""
    phases = list(dict.fromkeys(phase for r in results for phase in r.phase_seconds))
    rows = [
        (phase, *(format_spread([1000 * s for s in r.phase_seconds[phase]], ".1f") if phase in r.phase_seconds else "" for r in results))
        for phase in phases
    ]
    return markdown_table(["ms", *(r.transport for r in results)], rows)


def to_document(results: list[Result], environment: Environment, options: Mapping[str, object]) -> dict[str, object]:
    names = ("seconds", "export_seconds", "wire_seconds", "stall_seconds", "back_seconds", "tokens_per_s")
    rows = []
    for r in results:
        medians = {name: statistics.median(getattr(r, name)) for name in names}
        rows.append({**asdict(r), "link_seconds": r.link_seconds, "median": medians})
    return {"environment": environment, "timer": TIMED_WORK, "options": options, "results": rows}
