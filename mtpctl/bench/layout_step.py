"""`mtpctl bench train-step --tp/--cp/--ep`: forward and backward of an update over several ranks of one host, one process a rank.

The timer covers one pass of all ranks, from a barrier to the slowest rank's gradients on its device, collectives included; no optimizer
step. The rate is one card's large matrix product, taken on rank 0 while the others wait, times the number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mtpctl.bench.machine import Environment
from mtpctl.bench.train_step import TIMER, TokensWithEntropy, matmul_tflops, samples, synchronize
from mtpctl.cluster.rendezvous import address_of, host_store
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import UserError
from mtpctl.model.parallel import Rank
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.parallel import ParallelConfig, check_parallel
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.trainer.batch import update_flops
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

WARM, STEPS = 2, 5


@dataclass(frozen=True)
class Load:
    """What a step computes: packed tokens in `count` samples, and how."""

    tokens: int
    count: int
    prompt_share: float
    precision: str
    mtp: MtpConfig
    recompute: str


@dataclass(frozen=True)
class LayoutResult:
    """A step over `ranks`: ms by the slowest rank, tokens/s and share of the matrix-product rate a rank, GiB of the fullest rank."""

    ranks: int
    median_ms: float
    least_ms: float
    most_ms: float
    tokens_per_s_rank: float
    share: float
    peak_gib: float
    loss: float
    matmul_tflops: float


def layout(tp: int, cp: int, ep: int, folder: HfFolder) -> ParallelConfig:
    """The layout of these ranks; experts are shared over data-parallel ranks. Raises UserError where the model, or this host, does not
    fit it."""
    parallel = ParallelConfig(tp=tp, cp=cp, ep=ep, dp=ep, sequence_parallel=tp > 1)
    if ep > 1 and not folder.shape.moe:
        raise UserError(f"--ep: {folder.shape.family} has no experts")
    for complaint in check_parallel(parallel, folder.shape, "train.parallel"):
        raise UserError("--" + complaint.removeprefix("train.parallel."))
    if torch.cuda.is_available() and torch.cuda.device_count() < parallel.world_size:
        raise UserError(f"--tp, --cp, --ep: {parallel.world_size} ranks, and this host has {torch.cuda.device_count()} cards")
    return parallel


def measure_layout(folder: HfFolder, parallel: ParallelConfig, load: Load) -> LayoutResult:
    """Measure a step of this layout on the host's cards, or on its CPU."""
    meeting = host_store("127.0.0.1")
    answers: Queue[LayoutResult] = mp.get_context("spawn").Queue()
    mp.spawn(_rank, args=(folder, parallel, load, address_of(meeting), answers), nprocs=parallel.world_size)
    return answers.get(timeout=10)


def _rank(number: int, folder: HfFolder, parallel: ParallelConfig, load: Load, meeting: str, answers: Queue[LayoutResult]) -> None:
    config = EngineConfig(
        parallel=parallel,
        precision=load.precision,
        mtp=load.mtp,
        kernels=KernelsConfig(),
        tokens_per_microbatch=load.tokens,
        recompute=load.recompute,
        random_seed=0,
    )
    engine = MegatronEngine(folder, config, Rank(number, parallel.world_size, meeting, local_rank=number))
    device, cuda = engine.device, torch.cuda.is_available()
    rate = torch.tensor(matmul_tflops(device, 8192 if cuda else 512) if number == 0 else 0.0, device=device)
    dist.broadcast(rate, 0)
    batch = samples(folder.shape.vocab, load.tokens, load.count, load.prompt_share)
    flops = update_flops(folder.shape, batch, engine.depths if engine.trains_mtp else 0, isolated=load.mtp.mode == "isolated")
    took, loss = [], 0.0
    for step in range(WARM + STEPS):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        loss = engine.forward_backward(batch, TokensWithEntropy())["sft/loss"]
        synchronize(device)
        slowest = torch.tensor(1000 * (time.perf_counter() - began), device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if step >= WARM:
            took.append(slowest.item())
    peak = torch.tensor(torch.cuda.max_memory_allocated() / GIB if cuda else 0.0, device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if number == 0:
        median, ranks = statistics.median(took), parallel.world_size
        tokens = sum(len(s.token_ids) for s in batch)
        share = flops / median / 1e9 / ranks / rate.item()
        answers.put(
            LayoutResult(ranks, median, min(took), max(took), 1000 * tokens / median / ranks, share, peak.item(), loss, rate.item())
        )
    dist.barrier()
    engine.close()


def table(parallel: ParallelConfig, r: LayoutResult) -> str:
    """The result as Markdown."""
    named = ", ".join(f"{name} {size}" for name in ("tp", "cp", "ep") if (size := getattr(parallel, name)) > 1)
    return "\n".join(
        [
            f"Large bf16 matrix product: {r.matmul_tflops:.0f} TFLOP/s.",
            "",
            "| layout | ranks | ms (least–most) | tokens/s a rank | of matmul rate | peak GiB, weights and all | loss |",
            "|---|---|---|---|---|---|---|",
            f"| {named} | {r.ranks} | {r.median_ms:.0f} ({r.least_ms:.0f}–{r.most_ms:.0f}) | {r.tokens_per_s_rank:.0f} | {r.share:.1%} "
            f"| {r.peak_gib:.1f} | {r.loss:.4f} |",
        ]
    )


def as_json(result: LayoutResult, environment: Environment, options: Mapping[str, object]) -> dict[str, object]:
    """Environment, options and result, JSON-ready."""
    return {"environment": environment, "timer": TIMER, "options": options, "result": asdict(result)}
