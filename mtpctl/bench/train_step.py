"""`mtpctl bench train-step`: forward and backward of a policy update on packed samples, with three ways to compute the loss.

One pass computes loss and gradients of the head together, as updates do. Two passes compute log-probs first, as a loss that couples
tokens needs. The baseline materialises every logit.

The timer covers one forward and backward pass of the whole model with policy and MTP loss, gradients into the fp32
buffers, packing included; no optimizer step. The rate it is held against is a large bf16 matrix product, measured in the
same run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpctl.bench.machine import Environment
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.kernels.logprob import LogProbOut
from mtpctl.model.packing import Packing
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.trainer.batch import Sequence, update_flops
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.head import Head
from mtpctl.trainer.objective import NextToken, Sums

WARMUP, ROUNDS, STEPS = 2, 3, 3
TIMER = "one forward and backward pass, policy and MTP loss, gradients into fp32 buffers; no optimizer step"


class TwoPasses(Head):
    """Computes log-probs first, then their loss; the backward pass computes most logits a second time."""

    def loss(self, *args: Any, couples_tokens: bool = True, **options: Any) -> tuple[Tensor, Sums]:
        return super().loss(*args, couples_tokens=True, **options)


class Materialised(TwoPasses):
    """The plain baseline: every logit in memory, log-softmax by PyTorch."""

    def logprob(
        self,
        packing: Packing,
        state: Tensor,
        weight: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        *,
        entropy: bool = False,
        hit: bool = False,
        topk: int = 0,
        detach_weight: bool = False,
    ) -> LogProbOut:
        weight = weight.detach() if detach_weight else weight
        logprobs = (state[rows] @ weight.t()).float().log_softmax(-1)
        chosen = logprobs.gather(1, labels[:, None]).squeeze(1)
        with torch.no_grad():
            entropies = -torch.einsum("rv,rv->r", logprobs.exp(), logprobs) if entropy else None
            hits = logprobs.argmax(-1) == labels if hit else None
        return LogProbOut(chosen, entropies, hits, None)


WAYS: dict[str, type[Head]] = {"two passes": TwoPasses, "one pass": Head, "materialised": Materialised}


@dataclass(frozen=True)
class Result:
    """One way from hidden states to a loss and its gradients: ms of a step, GiB, and `share` of the measured matrix-product rate.

    `gradient`: how far the gradients of LM head and embedding are from those of the first way, relative to their norm; the larger of
    the two.
    """

    name: str
    median_ms: float
    least_ms: float
    most_ms: float
    tokens_per_s: float
    tflops: float
    share: float
    peak_gib: float
    loss: float
    gradient: float


class TokensWithEntropy(NextToken):
    """The cross-entropy's gradient with the entropy taken beside it, as a policy update does."""

    needs_entropy = True


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def matmul_tflops(device: torch.device, size: int) -> float:
    """TFLOP/s of a square bf16 matrix product on random data, the best of five turns."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / 10)
    del a, b
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size**3 / best / 1e12


def samples(vocab: int, tokens: int, count: int, prompt_share: float) -> list[Sequence]:
    """`count` random samples of equal length that fill `tokens`, the first `prompt_share` of each a prompt."""
    generator = torch.Generator().manual_seed(0)
    length = tokens // count
    prompt = max(1, int(length * prompt_share))
    ids = torch.randint(0, vocab, (count, length), generator=generator).tolist()
    return [Sequence(row, prompt, [1] * (length - prompt)) for row in ids]


def measure(
    folder: HfFolder, *, tokens: int, count: int, prompt_share: float, precision: str, mtp: MtpConfig, recompute: str = "none"
) -> tuple[list[Result], float]:
    """Measure all ways, in turns, and the rate of matrix products in TFLOP/s."""
    cuda = torch.cuda.is_available()
    if cuda:  # as Ray has it in a trainer's actor: waking more threads takes longer than the host's small operations
        torch.set_num_threads(1)
    config = EngineConfig(
        parallel=ParallelConfig(),
        precision=precision,
        mtp=mtp,
        kernels=KernelsConfig(),
        tokens_per_microbatch=tokens,
        recompute=recompute,
        random_seed=0,
    )
    engine = MegatronEngine(folder, config)
    batch = samples(folder.shape.vocab, tokens, count, prompt_share)
    flops = update_flops(folder.shape, batch, engine.depths if engine.trains_mtp else 0, isolated=mtp.mode == "isolated")
    packed = sum(len(s.token_ids) for s in batch)
    rate = matmul_tflops(engine.device, 8192 if cuda else 512)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks: dict[str, float] = {}
    losses: dict[str, float] = {}
    off: dict[str, float] = {}
    ends = [each for name, each in engine.module.named_parameters() if name.startswith(("embedding.", "output_layer."))]
    first: list[Tensor] = []
    for turn in range(ROUNDS):
        for name, kind in WAYS.items():
            # All ways use the same weights and buffers.
            engine.head = kind(config.kernels, folder.shape, config.parallel, sequence_parallel=False)
            for step in range(STEPS + (WARMUP if turn == 0 else 1)):
                synchronize(engine.device)
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                began = time.perf_counter()
                metrics = engine.forward_backward(batch, TokensWithEntropy())
                synchronize(engine.device)
                if step >= (WARMUP if turn == 0 else 1):
                    times[name].append(1000 * (time.perf_counter() - began))
                    losses[name] = metrics["sft/loss"]
                    if cuda:
                        peaks[name] = (torch.cuda.max_memory_allocated() - before) / GIB
            if turn == 0:
                found: list[Tensor] = [each.main_grad.to("cpu", copy=True) for each in ends]
                first = first or found
                off[name] = max(float((mine - right).norm() / right.norm()) for mine, right in zip(found, first, strict=True))
    results = []
    for name, taken in times.items():
        median = statistics.median(taken)
        tflops = flops / median / 1e9
        results.append(
            Result(
                name,
                median,
                min(taken),
                max(taken),
                1000 * packed / median,
                tflops,
                tflops / rate,
                peaks.get(name, 0.0),
                losses[name],
                off[name],
            )
        )
    engine.close()
    return results, rate


def table(results: list[Result], rate: float) -> str:
    lines = [
        f"Large bf16 matrix product: {rate:.0f} TFLOP/s.",
        "",
        "| head | ms (least–most) | tokens/s | TFLOP/s | of matmul rate | peak beyond weights and buffers, GiB | loss | gradient off by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.name} | {r.median_ms:.0f} ({r.least_ms:.0f}–{r.most_ms:.0f}) | {r.tokens_per_s:.0f} | {r.tflops:.0f} | {r.share:.1%} "
            f"| {r.peak_gib:.1f} | {r.loss:.4f} | {r.gradient:.1e} |"
        )
    return "\n".join(lines)


def as_json(results: list[Result], rate: float, environment: Environment, options: Mapping[str, object]) -> dict[str, object]:
    found = [asdict(r) for r in results]
    return {"environment": environment, "timer": TIMER, "options": options, "matmul_tflops": rate, "results": found}


def with_layers(config: Mapping[str, object], layers: int) -> dict[str, object]:
    """The config with its first `layers` decoder layers alone. Raises UserError where the model has fewer."""
    whole = shape_of(config).layers
    if layers > whole:
        raise UserError(f"--layers: the model has {whole}, got {layers}")
    kinds = config.get("layer_types")
    return {**config, "num_hidden_layers": layers, **({"layer_types": kinds[:layers]} if isinstance(kinds, list) else {})}


def shape_folder(config: dict[str, object], at: Path) -> HfFolder:
    """Make a folder with a config and no weights, which the engine then draws on its device."""
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text(json.dumps(config))
    return HfFolder(at, config, shape_of(config))
