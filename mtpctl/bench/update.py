"""`mtpctl bench update`: time and memory of whole updates, optimizer included, with an adapter or with offloading.

The timer covers one update: packing, forward and backward with policy and MTP loss, gradient norm and clipping, Adam, the copy of
master weights to parameters, and all moves to and from host memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from mtpctl.bench.machine import Environment
from mtpctl.bench.train_step import samples, synchronize
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.train import LoraConfig, OffloadConfig
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken

WARMUP, STEPS = 2, 5
TIMER = "one update: packing, forward and backward with policy and MTP loss, clipping, Adam, moves to and from host memory"


@dataclass(frozen=True)
class Result:
    """Times in ms, memory of the device in GiB: the peak of an update, and between updates. `optimizer_ms`: clipping, Adam and moves."""

    trained: int
    parameters: int
    median_ms: float
    least_ms: float
    most_ms: float
    optimizer_ms: float
    peak_gib: float
    between_gib: float
    loss: float


def measure(
    folder: HfFolder,
    *,
    tokens: int,
    count: int,
    precision: str,
    lora: LoraConfig | None = None,
    offload: OffloadConfig | None = None,
    workspace_bytes: int = 1 << 30,
    recompute: str = "none",
) -> Result:
    """Measure updates on random samples and weights, on one device."""
    config = EngineConfig(
        parallel=ParallelConfig(),
        precision=precision,
        mtp=MtpConfig(),
        kernels=KernelsConfig(workspace_bytes=workspace_bytes),
        tokens_per_microbatch=tokens,
        recompute=recompute,
        random_seed=0,
        lora=lora,
        offload=offload or OffloadConfig(),
    )
    engine = MegatronEngine(folder, config)
    cuda = engine.device.type == "cuda"
    engine.set_optimizer(OptimizerConfig())
    batch = samples(folder.shape.vocab, tokens, count, 0.25)
    taken: list[float] = []
    stepped: list[float] = []
    losses: list[float] = []
    assert engine.optimizer is not None
    step = engine.optimizer.step

    def timed(total_steps: int) -> object:
        synchronize(engine.device)
        began = time.perf_counter()
        result = step(total_steps)
        synchronize(engine.device)
        stepped.append(1000 * (time.perf_counter() - began))
        return result

    engine.optimizer.step = timed  # type: ignore[assignment, method-assign]
    peak = between = 0.0
    for turn in range(WARMUP + STEPS):
        synchronize(engine.device)
        if cuda and turn == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        losses.append(engine.update(batch, NextToken())["sft/loss"])
        synchronize(engine.device)
        taken.append(1000 * (time.perf_counter() - began))
    if cuda:
        peak, between = torch.cuda.max_memory_allocated() / GIB, torch.cuda.memory_allocated() / GIB
    held, trained = engine.parameters
    engine.close()
    taken, stepped = taken[WARMUP:], stepped[WARMUP:]
    return Result(trained, held, statistics.median(taken), min(taken), max(taken), statistics.median(stepped), peak, between, losses[-1])


def table(result: Result) -> str:
    r = result
    return "\n".join(
        [
            f"{r.parameters:,} parameters, {r.trained:,} trained.",
            "",
            "| update ms (least–most) | of it optimizer ms | peak GiB | between updates GiB | loss |",
            "|---|---|---|---|---|",
            f"| {r.median_ms:.0f} ({r.least_ms:.0f}–{r.most_ms:.0f}) | {r.optimizer_ms:.0f} | {r.peak_gib:.1f} | {r.between_gib:.1f} "
            f"| {r.loss:.4f} |",
        ]
    )


def as_json(result: Result, environment: Environment, options: Mapping[str, object]) -> dict[str, object]:
    return {"environment": environment, "timer": TIMER, "options": options, **asdict(result)}
