"""The head's kernels over a vocabulary sharded on several cards of one host, against one card with the whole vocabulary.

The timer covers one call on every rank, from a barrier to the slowest rank's results on the device, collectives included. One card's time
is taken in the same run, on rank 0 while the others wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mtpctl.bench.fused_cases import Inputs, clipped_loss, make_inputs
from mtpctl.bench.fused_kernels import Shape, time_runs
from mtpctl.cluster.rendezvous import address_of, host_store, join_store
from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.plan.memory import GIB

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

WARM, SAMPLES = 3, 12
MEET_S = 300.0
"""Seconds that a rank waits for the others to import and join."""
BOUND = 1.15
"""Of one card's time divided by the number of cards, at most."""


@dataclass(frozen=True)
class Parallel:
    """Milliseconds over `world` cards, and on one card with the whole vocabulary."""

    shape: str
    world: int
    what: str
    ms: float
    single_ms: float

    @property
    def ratio(self) -> float:
        """Time over one card's time divided by `world`; 1 is a perfect split."""
        return self.ms / (self.single_ms / self.world)


def _work(x: Inputs, weight: Tensor, group: dist.ProcessGroup | None) -> dict[str, Callable[[], object]]:
    def forward() -> object:
        with torch.no_grad():
            return linear_logprob(x.hidden, weight, x.labels, entropy=True, group=group)

    def backward(workspace: int) -> object:
        out = linear_logprob(x.hidden, weight, x.labels, entropy=True, group=group, workspace_bytes=workspace)
        return torch.autograd.grad(out.logprob, (x.hidden, weight), x.upstream)

    def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert entropy is not None
        return clipped_loss(logprob, entropy, x.old_logprob[rows], x.advantage[rows]).sum(), {}

    def policy() -> object:
        out = linear_policy_loss(x.hidden, weight, x.labels, token_loss, entropy=True, group=group, workspace_bytes=3 * GIB // 2)
        return torch.autograd.grad(out.loss_sum, (x.hidden, weight))

    return {
        "forward": forward,
        "forward+backward, 0.5 GiB": lambda: backward(GIB // 2),
        "forward+backward, 3 GiB": lambda: backward(3 * GIB),
        "policy loss, 1.5 GiB": policy,
    }


def _rank(rank: int, world: int, shape: Shape, meeting: str, device: str, answers: Queue[tuple[str, float, float]]) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=join_store(meeting, MEET_S),
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    try:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        x = make_inputs(shape.rows, shape.hidden, shape.vocab, dtype, device, seed=0)
        columns = shape.vocab // world
        shard = x.weight.detach()[rank * columns : (rank + 1) * columns].clone().requires_grad_()
        whole = replace(x, weight=shard)
        group = dist.group.WORLD
        for what, run in _work(whole, shard, group).items():
            slowest = []
            for number in range(WARM + SAMPLES):
                dist.barrier()
                took = torch.tensor(time_runs(run, device, 1), device=device)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number >= WARM:
                    slowest.append(took.item())
            single = []
            if rank == 0:
                alone = _work(x, x.weight, None)[what]
                time_runs(alone, device, WARM)
                single = time_runs(alone, device, SAMPLES)
                answers.put((what, statistics.median(slowest), statistics.median(single)))
            dist.barrier()
    finally:
        dist.destroy_process_group()


def measure_parallel(shape: Shape, world: int, device: str | None = None) -> list[Parallel]:
    """Measure at one shape, one process a rank. Raises ValueError where ranks do not divide the vocabulary, or the host has fewer cards."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if shape.vocab % world:
        raise ValueError(f"--tp: {world} ranks do not divide the vocabulary of {shape.vocab}")
    if device == "cuda" and torch.cuda.device_count() < world:
        raise ValueError(f"--tp: {world} ranks, and this host has {torch.cuda.device_count()} cards")
    meeting = host_store("127.0.0.1")
    context = mp.get_context("spawn")
    answers: Queue[tuple[str, float, float]] = context.Queue()
    mp.spawn(_rank, args=(world, shape, address_of(meeting), device, answers), nprocs=world)
    name = f"{shape.rows}x{shape.hidden}x{shape.vocab}"
    return [Parallel(name, world, *answers.get(timeout=10)) for _ in range(4)]


def parallel_table(results: list[Parallel]) -> str:
    lines = ["| shape | ranks | what | ms | one card, ms | × one card's share |", "|---|---|---|---|---|---|"]
    lines += [f"| {r.shape} | {r.world} | {r.what} | {r.ms:.2f} | {r.single_ms:.2f} | {r.ratio:.2f} |" for r in results]
    return "\n".join(lines)
