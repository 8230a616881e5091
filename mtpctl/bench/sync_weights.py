"""`mtpctl bench sync-weights`: how long a weight sync takes, and how long generation stalls.

The trainer runs in a process of its own, beside a vLLM engine that speculates, both with random weights. While requests are in
flight, the trainer's weights are synced several times over one transport after the other, target and draft under one version.

- A sync takes from the announcement of a version until the engine has resumed: export, packing, transfer and both update sessions.
- The stall is from the call that pauses the engine to the return of the call that resumes it.
- The wire time is that in which a bucket is being sent; the link's is the same for buckets that need no packing, over one communicator.
- Throughput is back when tokens come at 90% of the rate before the sync, averaged over a window; the time counts from the pause.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mtpctl.bench.machine import visible_cards
from mtpctl.bench.sync_ends import Load, SingleEngine, Trainer
from mtpctl.bench.sync_results import ExtraMemory, Options, Result, misses
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import count_parameters, tensor_shapes
from mtpctl.plan.memory import WEIGHT_BYTES
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.sync import PUSHED
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.transports.base import Sent

if TYPE_CHECKING:
    from mtpctl.rollout.vllm.engine import VllmEngine


def recipe_of(options: Options) -> Recipe:
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


def cards(options: Options) -> tuple[str, str]:
    """`CUDA_VISIBLE_DEVICES` of trainer and engine: this process's first card, and its second unless they share one."""
    if options.device == "cpu":
        return "", ""
    return visible_cards([0]), visible_cards([0 if options.shared else 1])


async def measure(options: Options, say: Callable[[str], None]) -> list[Result]:
    """Start trainer and engine once, and sync over every transport in turn."""
    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import engine_settings

    model = options.folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(options.config))
    # The mapping to Hugging Face reads the names of tensors from the index; there are no weights.
    names = tensor_shapes(shape_of(options.config))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    recipe = recipe_of(options)
    began = time.perf_counter()
    cuda = options.device == "cuda"
    trainers, engines = cards(options)
    trainer = Trainer(recipe, model, trainers)
    if cuda:
        # This process may have initialised CUDA before it sets the engine's card, so the engine must not be forked.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ["CUDA_VISIBLE_DEVICES"] = engines
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
    options: Options, recipe: Recipe, trainer: Trainer, engine: VllmEngine, transport: str, version: int, say: Callable[[str], None]
) -> tuple[Result, int]:
    from mtpctl.controller.weights import WeightSync

    recipe = recipe.model_copy(update={"sync": recipe.sync.model_copy(update={"transport": transport})})
    await trainer.call("use", transport)
    store = options.folder / f"versions-{transport}"
    if transport not in PUSHED:
        from mtpctl.sync.store import default_root

        store = default_root(f"bench-{os.getpid()}", 3 * model_bytes(options), store)
    sync = WeightSync(recipe, trainer, SingleEngine(engine), None, store)
    load = Load(engine._llm, options)
    try:
        # Memory that generation takes at its start is not to be counted as the sync's.
        await _steady(load, options)
        before = await _memory(trainer, engine, reset=True)
        await sync(version := version + 1, verify=True)
        assert sync.last is not None
        manifest, first = sync.last.manifest, sync.last.reports[0]
        await sync.persisted()
        link = await _link(options, trainer, engine, manifest)
        buckets = sum(len(section.buckets) for section in manifest.sections.values())
        result = Result(transport, manifest.nbytes, buckets, link, first.seconds, first.verified)
        say(f"{transport}: {result.nbytes / 1e9:.3f} GB in {buckets} buckets, {first.verified} tensors verified, link {link:.1f} GB/s")
        await _steady(load, options)
        for _ in range(options.repeats):
            await asyncio.sleep(3 * options.window_s)
            rate = load.last(3 * options.window_s)
            metrics = await sync(version := version + 1, verify=False)
            resumed = time.perf_counter()
            await sync.persisted()
            kept = time.perf_counter() - resumed
            load.check()
            report, sent = sync.last.reports[0], sync.last.sent
            back = report.stall_seconds + await _back(load, resumed, rate, options)
            result.seconds.append(metrics["sync/seconds"])
            result.export_seconds.append(metrics["sync/publish_seconds"])
            result.wire_seconds.append(sent.wire_seconds or metrics["sync/seconds"])
            result.stall_seconds.append(report.stall_seconds)
            result.back_seconds.append(back)
            result.tokens_per_s.append(rate)
            say(
                f"  version {version}: {metrics['sync/seconds']:.3f} s, stall {report.stall_seconds:.3f} s, wire "
                f"{result.wire_seconds[-1]:.3f} s, waited {sent.wait_seconds:.3f} s, kept after {kept:.2f} s"
            )
        after = await _memory(trainer, engine)
    finally:
        load.end()
        if transport not in PUSHED:
            from mtpctl.sync.store import VersionStore

            # The store may be in shared memory, which outlives this process.
            VersionStore(store).close()
    result.trainer_gib, result.engine_gib = (
        ExtraMemory.between(*readings, alone=not options.shared) for readings in zip(before, after, strict=True)
    )
    say(f"  GiB beside the trainer's: {result.trainer_gib}; beside the engine's: {result.engine_gib}")
    result.misses = misses(result, options)
    return result, version


def model_bytes(options: Options) -> int:
    return count_parameters(shape_of(options.config))["total"] * WEIGHT_BYTES[options.precision]


async def _memory(trainer: Trainer, engine: VllmEngine, *, reset: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    theirs: dict[str, int] = await trainer.call("memory", reset)
    ours: dict[str, int] = (await engine._llm.collective_rpc("mtpctl_memory", args=("reset" if reset else "",)))[0]
    return theirs, ours


async def _link(options: Options, trainer: Trainer, engine: VllmEngine, manifest: Manifest) -> float:
    """GB/s of the transport without packing, the best of three."""
    if manifest.transport not in PUSHED:
        from mtpctl.sync.memory import copy_rate

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
    """Return once every request is in flight and two windows in a row have the same rate, within 15%, or after 60 pairs of them.

    Raises what ended a request, and RuntimeFailure where no token came.
    """
    window = options.window_s
    for _ in range(60):
        await asyncio.sleep(2 * window)
        load.check()
        now = time.perf_counter()
        one, two = load.rate(now - 2 * window, now - window), load.rate(now - window, now)
        if one and abs(one - two) < 0.15 * one:
            return
    load.last(2 * window)


async def _back(load: Load, since: float, rate: float, options: Options) -> float:
    for _ in range(100):
        await asyncio.sleep(options.window_s)
        if (found := load.back(since, rate)) < float("inf"):
            return found
    return float("inf")
