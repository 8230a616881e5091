"""Choosing the number of draft tokens: a fixed number, `rollout.speculation.auto`, and vLLM's own schedule, in one run on one GPU.

    python benchmarks/speculation_auto.py --out speculation_auto.md
    python benchmarks/speculation_auto.py --toy                       # on a CPU, about a minute

The model has MiMo-7B's shape with fewer layers and known answers ("cycle"): its MTP head is right on a chosen share of the tokens after
the lower half of the vocabulary (the good head), and never after the upper half (the weak head). Four engines share the GPU: without
speculation, with k drafts, with `speculation.auto`, and with vLLM's `num_speculative_tokens_per_batch_size` set to `--schedule`. The
same requests go to each engine in turn. Every cell is the median over rounds of tokens/s, relative to the engine without speculation in
the same round. `auto` gets one more round for its trials, which is printed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtpctl.bench.rollout_engines import write_cycle_model
from mtpctl.cluster.local import cluster
from mtpctl.families.configs import hub_config, toy_config
from mtpctl.families.reading import shape_of
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe.schema import ClusterConfig, Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.start import start_pool
from mtpctl.samples import GenerationRequest, Sample

OFF, FIXED, AUTO, VLLM = "no speculation", "fixed", "auto", "vLLM's schedule"
GPU_SHARE = 0.9
"""Share of GPU memory for all engines together."""
START_S = 300.0


@dataclass(frozen=True)
class Options:
    batches: list[int]
    drafts: int
    schedule: list[tuple[int, int, int]]
    acceptance: float
    layers: int
    prompt: int
    tokens: int
    rounds: int
    device: Literal["cpu", "cuda"]

    @property
    def config(self) -> dict[str, object]:
        if self.device == "cpu":
            return toy_config(vocab_size=1024, max_position_embeddings=1024, torch_dtype="float32")
        # A `model_type` that vLLM supports without the plugin.
        return hub_config("XiaomiMiMo/MiMo-7B-RL") | {"model_type": "qwen2", "num_hidden_layers": self.layers}

    @property
    def context(self) -> int:
        return self.prompt + self.tokens + 64


def recipe_of(name: str, options: Options, folder: Path) -> Recipe:
    """The recipe of one of the four engines."""
    k, max_batch, gpu = options.drafts, max(options.batches), options.device == "cuda"
    drafts = 0 if name == OFF else k
    rollout: dict[str, object] = {
        "max_in_flight": max_batch,
        "max_tokens": options.tokens,
        "threads": 0 if gpu else 1,
        "speculation": {"num_tokens": drafts, "auto": name == AUTO},
    }
    engine_args: dict[str, object] = {}
    if gpu:
        rollout["kv_cache_bytes"] = max_batch * options.context * kv_bytes_per_token(shape_of(options.config), 1, 2, drafting=True)
        rollout["gpu_memory"] = GPU_SHARE / 4
        counts = sorted({1, 2, 4, *options.batches, *range(32, max_batch + 1, 32)})
        sizes = sorted({count * width for count in counts for width in range(1, drafts + 2)})
        engine_args["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if name == VLLM:
        engine_args["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": k,
            "draft_sample_method": "greedy",
            "num_speculative_tokens_per_batch_size": options.schedule,
        }
    return Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "train": {"precision": "bf16" if gpu else "fp32"},
            "rollout": rollout | {"engine_args": engine_args},
            "sync": {"transport": "shm"},
            "cluster": {"device": options.device, "actor_deadline_s": START_S},
        }
    )


def requests_of(options: Options, batch: int, *, weak: bool) -> list[GenerationRequest]:
    """`batch` requests with answers in the lower half of the vocabulary, or with `weak` in the upper half, where all drafts are wrong."""
    half = shape_of(options.config).vocab // 2
    span = half - options.tokens - options.prompt
    firsts = [half * weak + (number * 7919) % span for number in range(batch)]
    prompts = [list(range(first, first + options.prompt)) for first in firsts]
    return [GenerationRequest(Sample(str(n), str(n), ids), options.tokens, seed=n) for n, ids in enumerate(prompts)]


async def send(pool: ReplicaPool, options: Options, batch: int, *, weak: bool) -> tuple[float, float]:
    """Send `batch` requests. Returns tokens/s and tokens per verification step (1 without speculation)."""

    async def stream() -> AsyncIterator[GenerationRequest]:
        for request in requests_of(options, batch, weak=weak):
            yield request

    began = time.perf_counter()
    async with aclosing(pool.generate(stream())) as answers:
        samples = [sample async for sample in answers]
    seconds = time.perf_counter() - began
    for sample in samples:
        first = sample.prompt_ids[-1] + 1
        assert sample.response_ids.tolist() == list(range(first, first + options.tokens)), "the answer is not the model's"
    steps, accepted = sum(sample.speculation.steps for sample in samples), sum(sample.speculation.accepted for sample in samples)
    return sum(len(sample.response_ids) for sample in samples) / seconds, 1 + accepted / steps if steps else 1.0


async def measure(options: Options, folder: Path) -> list[str]:
    """Start the four engines and measure all rows of the table, which are also printed as they are completed."""
    share = 0.25 if options.device == "cuda" else 0.0
    placement = Placement(options.device, (Actor("rollout", 0, 0, 0, 1.0, share),), 1)
    starting = [
        start_pool(recipe_of(name, options, folder), model=str(folder), context=options.context, placement=placement)
        for name in (OFF, FIXED, AUTO, VLLM)
    ]
    began = time.perf_counter()
    pools = dict(zip((OFF, FIXED, AUTO, VLLM), await asyncio.gather(*starting), strict=True))
    print(f"engines started in {time.perf_counter() - began:.0f} s", flush=True)
    rows = []
    for weak in (False, True):
        for batch in options.batches:
            rows.append(await _row(options, pools, batch, weak=weak))
            print(rows[-1], flush=True)
    await asyncio.gather(*(pool.close() for pool in pools.values()))
    return rows


async def _row(options: Options, pools: dict[str, ReplicaPool], batch: int, *, weak: bool) -> str:
    await pools[AUTO].control_speculation(-1)  # Discards the measurements for the previous load.
    first_round: dict[str, float] = {}
    ratios: dict[str, list[float]] = {name: [] for name in pools}
    off: list[float] = []
    accepted: dict[str, float] = {}
    # In the first round, `auto` compares numbers of drafts. For the other engines it is a warm-up.
    for number in range(-1, options.rounds):
        rates = {}
        for name, pool in pools.items():
            rates[name], accepted[name] = await send(pool, options, batch, weak=weak)
        if number < 0:
            first_round = rates
            continue
        off.append(rates[OFF])
        for name, rate in rates.items():
            ratios[name].append(rate / rates[OFF])
    state = (await pools[AUTO].control_speculation())[0]
    cells = [_cell(ratios[name], accepted[name]) for name in (FIXED, AUTO, VLLM)]
    scheduled = next(drafts for low, high, drafts in options.schedule if low <= batch <= high)
    first_ratio = first_round[AUTO] / first_round[OFF]
    return (
        f"| {'weak' if weak else 'good'} | {batch} | {statistics.median(off):,.0f} | {cells[0]} | {first_ratio:.3f} "
        f"| {cells[1]}, {state['drafts']} drafts | {cells[2]}, {scheduled} drafts |"
    )


def _cell(ratios: list[float], tokens: float) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f}), {tokens:.2f} tokens/step"


def parse_schedule(text: str, k: int, max_requests: int) -> list[tuple[int, int, int]]:
    """Parse a schedule such as `64:3,256:1`: 3 drafts with up to 64 requests, 1 draft with up to 256."""
    schedule, first = [], 1
    for entry in text.split(","):
        last, drafts = map(int, entry.split(":"))
        schedule.append((first, last, min(drafts, k)))
        first = last + 1
    assert first > max_requests, f"--schedule: must reach {max_requests} requests"
    return schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--toy", action="store_true", help="toy sizes on a CPU")
    parser.add_argument("--drafts", type=int, default=3, help="k, the maximum number of draft tokens")
    parser.add_argument("--acceptance", type=float, default=0.75, help="share of correct drafts of the good head")
    parser.add_argument("--schedule", default="64:3,256:1", help="vLLM's schedule; the default is the best for the good head on an H200")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    batches = [1, 4, 8] if args.toy else [1, 8, 64, 256]
    options = Options(
        batches,
        args.drafts,
        parse_schedule("4:3,8:1" if args.toy else args.schedule, args.drafts, max(batches)),
        args.acceptance,
        args.layers,
        prompt=8 if args.toy else 64,
        tokens=96 if args.toy else args.tokens,
        rounds=1 if args.toy else args.rounds,
        device="cpu" if args.toy else "cuda",
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mtpctl-speculation-") as temporary:
        folder = write_cycle_model(Path(temporary, "model"), options.config, acceptance=options.acceptance, device=options.device)
        print(f"model written in {time.perf_counter() - began:.0f} s", flush=True)
        gpus = int(options.device == "cuda")
        with cluster(ClusterConfig(device=options.device, num_cpus=None if gpus else 5), cpus=4, gpus=gpus):
            rows = asyncio.run(measure(options, folder))
    head = ["head", "in flight", "no speculation, tokens/s", f"fixed, {options.drafts} drafts", "auto, first trials", "auto", VLLM]
    table = "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])
    print(f"\n{table}\n\n{time.perf_counter() - began:.0f} s in all", flush=True)
    if args.out is not None:
        args.out.write_text(f"{table}\n")


if __name__ == "__main__":
    main()
