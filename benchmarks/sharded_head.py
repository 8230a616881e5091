"""The LM head's kernels over a vocabulary sharded on several GPUs of one host, against one GPU with the whole vocabulary.

    python benchmarks/sharded_head.py --ranks 2
    python benchmarks/sharded_head.py --ranks 2 --shape 16x8x64      # on a CPU

The timer covers one call on every rank, from a barrier to the slowest rank's results on the device, collectives included. One GPU is
measured in the same run, on rank 0 while the others wait. Exit code 6 if a case takes more than 1.15 times one GPU's share of the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from harness import finish, parser, print_environment
from mtpctl.bench.fused_kernels import Inputs, Shape, clipped_loss, make_inputs, time_runs
from mtpctl.bench.report import markdown_table
from mtpctl.cluster.rendezvous import address_of, host_store, join_store
from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.plan.memory import GIB

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

WARMUP, SAMPLES = 3, 12
JOIN_S = 300.0
MAX_RATIO = 1.15


def cases(x: Inputs, group: dist.ProcessGroup | None) -> dict[str, Callable[[], object]]:
    def forward() -> object:
        with torch.no_grad():
            return linear_logprob(x.hidden, x.weight, x.labels, entropy=True, group=group)

    def backward(workspace: int) -> object:
        out = linear_logprob(x.hidden, x.weight, x.labels, entropy=True, group=group, workspace_bytes=workspace)
        return torch.autograd.grad(out.logprob, (x.hidden, x.weight), x.upstream)

    def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert entropy is not None
        return clipped_loss(logprob, entropy, x.old_logprob[rows], x.advantage[rows]).sum(), {}

    def policy() -> object:
        out = linear_policy_loss(x.hidden, x.weight, x.labels, token_loss, entropy=True, group=group, workspace_bytes=3 * GIB // 2)
        return torch.autograd.grad(out.loss_sum, (x.hidden, x.weight))

    return {
        "forward": forward,
        "forward+backward, 0.5 GiB": lambda: backward(GIB // 2),
        "forward+backward, 3 GiB": lambda: backward(3 * GIB),
        "policy loss, 1.5 GiB": policy,
    }


def run_rank(rank: int, ranks: int, shape: Shape, store: str, device: str, answers: Queue[tuple[str, float, float]]) -> None:
    """Measure every case. Rank 0 puts (case, ms of the slowest rank, ms on one GPU) into `answers`."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    device_id = torch.device("cuda", rank) if device == "cuda" else None
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=join_store(store, JOIN_S), rank=rank, world_size=ranks, device_id=device_id)
    x = make_inputs(shape, torch.bfloat16 if device == "cuda" else torch.float32, device, seed=0)
    shard = x.weight.detach().chunk(ranks)[rank].clone().requires_grad_()
    single_cases = cases(x, None)
    for name, run in cases(replace(x, weight=shard), dist.group.WORLD).items():
        slowest = []
        for number in range(WARMUP + SAMPLES):
            dist.barrier()
            ms = torch.tensor(time_runs(run, device, 1), device=device)
            dist.all_reduce(ms, op=dist.ReduceOp.MAX)
            if number >= WARMUP:
                slowest.append(ms.item())
        if rank == 0:
            time_runs(single_cases[name], device, WARMUP)
            answers.put((name, statistics.median(slowest), statistics.median(time_runs(single_cases[name], device, SAMPLES))))
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--shape", type=Shape.parse, default=Shape(8192, 4096, 151680) if device == "cuda" else Shape(64, 64, 1000))
    options = arguments.parse_args()
    ranks, shape = options.ranks, options.shape
    if shape.vocab % ranks:
        arguments.error(f"--ranks: {ranks} ranks do not divide the vocabulary of {shape.vocab}")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        arguments.error(f"--ranks: {ranks} ranks, and this host has {torch.cuda.device_count()} GPUs")
    store = host_store("127.0.0.1")
    answers: Queue[tuple[str, float, float]] = mp.get_context("spawn").Queue()
    mp.spawn(run_rank, args=(ranks, shape, address_of(store), device, answers), nprocs=ranks)
    print_environment()
    rows, misses = [], []
    for _ in range(4):
        name, sharded_ms, single_ms = answers.get(timeout=10)
        ratio = sharded_ms * ranks / single_ms
        rows.append((name, f"{sharded_ms:.2f}", f"{single_ms:.2f}", f"{ratio:.2f}"))
        if device == "cuda" and ratio > MAX_RATIO:
            misses.append(f"{name}: {ratio:.2f} × one GPU's share, bound {MAX_RATIO}")
    print(markdown_table((f"{shape}", f"{ranks} ranks, ms", "one GPU, ms", "× one GPU's share"), rows))
    finish(misses)


if __name__ == "__main__":
    main()
