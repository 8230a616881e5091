"""`mtpctl bench train-step`: forward and backward of a policy update on packed samples, on one device or on the ranks of a layout.

On one device, three ways to compute the LM head's loss are compared. One pass computes loss and gradients together, as in training. Two
passes compute log-probs first, as required by losses that couple tokens. The baseline materializes all logits. With several ranks, there is
one process per rank, and only one pass is measured.

The timer covers packing, and a forward and backward pass of the whole model with policy and MTP loss, with gradients in fp32 buffers, but
no optimizer step. With several ranks, it runs from a barrier until the slowest rank is done. The rate is compared with that of a large
bf16 matrix product, measured in the same run on one device.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mtpctl.bench.report import Environment, format_number, markdown_table
from mtpctl.cluster.process import freeze_heap
from mtpctl.cluster.rendezvous import address_of, host_store
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.families.reading import describe_context, extend_context, shape_of
from mtpctl.kernels.logprob import LogProbOut
from mtpctl.kernels.products import take_stale
from mtpctl.model.packing import Packing
from mtpctl.model.parallel import Rank
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import ModelConfig, MtpConfig, hf_config
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig, check_parallel
from mtpctl.trainer.batch import Sequence, update_flops
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.head import Head
from mtpctl.trainer.objective import NextToken, Sums

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

WARMUP_STEPS, NUM_ROUNDS, STEPS_PER_ROUND = 2, 3, 3
TIMED_WORK = "one forward and backward pass, policy and MTP loss, gradients into fp32 buffers; no optimizer step"


class TwoPasses(Head):
    """Computes log-probs first, then their loss. The backward pass recomputes most logits."""

    def loss(self, *args: Any, couples_tokens: bool = True, **options: Any) -> tuple[Tensor, Sums]:
        return super().loss(*args, couples_tokens=True, **options)


class MaterializedLogits(TwoPasses):
    """The baseline: materializes all logits, and uses PyTorch's log-softmax."""

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
        # The engine expects the head to overwrite a stale gradient buffer, but autograd adds to it.
        if not detach_weight and take_stale(buffer := cast(Any, weight).main_grad):
            buffer.zero_()
        weight = weight.detach() if detach_weight else weight
        logprobs = (state[rows] @ weight.t()).float().log_softmax(-1)
        label_logprobs = logprobs.gather(1, labels[:, None]).squeeze(1)
        with torch.no_grad():
            entropies = -torch.einsum("rv,rv->r", logprobs.exp(), logprobs) if entropy else None
            hits = logprobs.argmax(-1) == labels if hit else None
        return LogProbOut(label_logprobs, entropies, hits, None)


HEADS: dict[str, type[Head]] = {"two passes": TwoPasses, "one pass": Head, "materialised": MaterializedLogits}


class NextTokenWithEntropy(NextToken):
    """Cross-entropy that also requests the entropy: a step then does the same work as a policy update."""

    needs_entropy = True


@dataclass(frozen=True)
class Workload:
    """The work of a step: `tokens` packed tokens in `samples` samples of equal length, and how they are trained."""

    tokens: int
    samples: int
    prompt_share: float
    precision: str
    mtp: MtpConfig
    recompute: str = "none"


@dataclass(frozen=True)
class Result:
    """Measurements of a step with one implementation of the loss.

    Times and memory are maxima over ranks. tokens_per_s, tflops and share (of the matrix product's rate) are per rank. step_gib: peak in
    addition to weights and buffers. gradient: the larger relative difference of the gradients of LM head and embedding from those of the
    first implementation; None with several ranks.
    """

    name: str
    ranks: int
    median_ms: float
    least_ms: float
    most_ms: float
    tokens_per_s: float
    tflops: float
    share: float
    peak_gib: float
    step_gib: float
    loss: float
    gradient: float | None


def make_layout(tp: int, cp: int, ep: int, folder: HfFolder) -> ParallelConfig:
    """Make the layout for these sizes, with dp equal to ep. Raises UserError if it does not fit the model or the host."""
    parallel = ParallelConfig(tp=tp, cp=cp, ep=ep, dp=ep, sequence_parallel=tp > 1)
    if ep > 1 and not folder.shape.moe:
        raise UserError(f"--ep: {folder.shape.family} has no experts")
    for complaint in check_parallel(parallel, folder.shape, "train.parallel"):
        raise UserError("--" + complaint.removeprefix("train.parallel."))
    if torch.cuda.is_available() and torch.cuda.device_count() < parallel.world_size:
        raise UserError(f"--tp, --cp, --ep: {parallel.world_size} ranks, but this host has {torch.cuda.device_count()} GPUs")
    return parallel


def extend_positions(config: dict[str, object], length: int) -> tuple[dict[str, object], str]:
    """Raise the positions of a config to `length` if it has fewer. Returns the config, and a note on the change (empty if unchanged)."""
    original = shape_of(config)
    if length <= original.max_positions:
        return config, ""
    longer = extend_context(config, length)
    return longer, describe_context(original, shape_of(longer))


def measure(folder: HfFolder, parallel: ParallelConfig, workload: Workload) -> tuple[list[Result], float]:
    """Measure a step on the host's GPUs, or on its CPU. Returns the results, and the rate of matrix products in TFLOP/s.

    Raises RuntimeFailure with the rank and its error if one of several ranks fails.
    """
    if parallel.world_size == 1:
        return _measure_rank(folder, parallel, workload, None)
    store = host_store("127.0.0.1")
    answers: Queue[tuple[list[Result], float]] = mp.get_context("spawn").Queue()
    try:
        mp.spawn(_run_rank, args=(folder, parallel, workload, address_of(store), answers), nprocs=parallel.world_size)
    except mp.ProcessRaisedException as error:
        raise RuntimeFailure(f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}") from error
    return answers.get(timeout=10)


def _run_rank(
    rank: int, folder: HfFolder, parallel: ParallelConfig, workload: Workload, store: str, answers: Queue[tuple[list[Result], float]]
) -> None:
    answer = _measure_rank(folder, parallel, workload, Rank(rank, parallel.world_size, store, local_rank=rank))
    if rank == 0:
        answers.put(answer)


def _measure_rank(folder: HfFolder, parallel: ParallelConfig, workload: Workload, rank: Rank | None) -> tuple[list[Result], float]:
    if torch.cuda.is_available():  # As in Ray's trainers, because small host operations are slower with more threads.
        torch.set_num_threads(1)
    config = EngineConfig(
        parallel=parallel,
        precision=workload.precision,
        mtp=workload.mtp,
        kernels=KernelsConfig(),
        tokens_per_microbatch=workload.tokens,
        recompute=workload.recompute,
        random_seed=0,
    )
    engine = MegatronEngine(folder, config) if rank is None else MegatronEngine(folder, config, rank)
    freeze_heap()  # As in trainers.
    device, cuda = engine.device, engine.device.type == "cuda"

    def max_over_ranks(value: float) -> float:
        if rank is None:
            return value
        tensor = torch.tensor(value, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    # Only rank 0 measures the matrix product. The other ranks wait in the all-reduce.
    is_first = rank is None or rank.rank == 0
    matmul_tflops = max_over_ranks(measure_matmul_tflops(device, 8192 if cuda else 512) if is_first else 0.0)
    batch = make_samples(folder.shape.vocab, workload.tokens, workload.samples, workload.prompt_share)
    flops = update_flops(folder.shape, batch, engine.depths if engine.trains_mtp else 0, isolated=workload.mtp.mode == "isolated")
    heads = HEADS if rank is None else {"one pass": Head}
    embeddings = [parameter for name, parameter in engine.module.named_parameters() if name.startswith(("embedding.", "output_layer."))]
    times: dict[str, list[float]] = {name: [] for name in heads}
    losses, peaks, buffers, gradient_differences = dict[str, float](), dict[str, float](), dict[str, float](), dict[str, float]()
    reference_gradients: list[Tensor] = []
    for round_number in range(NUM_ROUNDS):
        for name, head_class in heads.items():
            # All heads share the engine's weights and buffers.
            if rank is None:
                engine.head = head_class(config.kernels, folder.shape, config.parallel, sequence_parallel=False)
            for step in range(-WARMUP_STEPS if round_number == 0 else -1, STEPS_PER_ROUND):
                if rank is not None:
                    dist.barrier()
                synchronize(device)
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                    buffers[name] = torch.cuda.memory_allocated() / GIB
                started = time.perf_counter()
                metrics = engine.forward_backward(batch, NextTokenWithEntropy())
                synchronize(device)
                milliseconds = max_over_ranks(1000 * (time.perf_counter() - started))
                if step >= 0:
                    times[name].append(milliseconds)
                    losses[name] = metrics["sft/loss"]
                    peaks[name] = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
            if round_number == 0 and rank is None:
                gradients: list[Tensor] = [parameter.main_grad.to("cpu", copy=True) for parameter in embeddings]
                reference_gradients = reference_gradients or gradients
                gradient_differences[name] = max(
                    float((a - b).norm() / b.norm()) for a, b in zip(gradients, reference_gradients, strict=True)
                )
    num_tokens, ranks = sum(len(s.token_ids) for s in batch), parallel.world_size
    results = []
    for name, step_ms in times.items():
        median = statistics.median(step_ms)
        tflops = flops / median / 1e9 / ranks
        peak, step_peak = max_over_ranks(peaks[name]), max_over_ranks(peaks[name] - buffers.get(name, 0.0))
        results.append(
            Result(
                name,
                ranks,
                median,
                min(step_ms),
                max(step_ms),
                1000 * num_tokens / median / ranks,
                tflops,
                tflops / matmul_tflops,
                peak,
                step_peak,
                losses[name],
                gradient_differences.get(name),
            )
        )
    if rank is not None:
        dist.barrier()
    engine.close()
    return results, matmul_tflops


def format_table(parallel: ParallelConfig, results: list[Result], matmul_tflops: float) -> str:
    layout = ", ".join(f"{name} {size}" for name in ("tp", "cp", "ep") if (size := getattr(parallel, name)) > 1) or "one device"
    headings = "layout | ranks | head | ms (least–most) | tokens/s a rank | TFLOP/s a rank | of matmul rate | peak GiB"
    rows = [
        (
            layout,
            r.ranks,
            r.name,
            f"{r.median_ms:.0f} ({r.least_ms:.0f}–{r.most_ms:.0f})",
            f"{r.tokens_per_s:.0f}",
            f"{r.tflops:.0f}",
            f"{r.share:.1%}",
            f"{r.peak_gib:.1f}",
            f"{r.step_gib:.1f}",
            f"{r.loss:.4f}",
            format_number(r.gradient, ".1e"),
        )
        for r in results
    ]
    rows_table = markdown_table(f"{headings} | beyond weights and buffers | loss | gradient off by".split(" | "), rows)
    return f"Large bf16 matrix product: {matmul_tflops:.0f} TFLOP/s.\n\n{rows_table}"


def to_document(results: list[Result], matmul_tflops: float, environment: Environment, options: Mapping[str, object]) -> dict[str, object]:
    return {
        "environment": environment,
        "timer": TIMED_WORK,
        "options": options,
        "matmul_tflops": matmul_tflops,
        "results": [asdict(r) for r in results],
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_matmul_tflops(device: torch.device, size: int) -> float:
    """Rate of a square bf16 matrix product on random data in TFLOP/s, the best of five attempts."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(10):
            left @ right
        synchronize(device)
        best = min(best, (time.perf_counter() - started) / 10)
    del left, right
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size**3 / best / 1e12


def make_samples(vocab: int, tokens: int, count: int, prompt_share: float) -> list[Sequence]:
    """`count` random samples of equal length with `tokens` tokens in total. The first `prompt_share` of each is the prompt."""
    generator = torch.Generator().manual_seed(0)
    length = tokens // count
    prompt = max(1, int(length * prompt_share))
    ids = torch.randint(0, vocab, (count, length), generator=generator).tolist()
    return [Sequence(row, prompt, [1] * (length - prompt)) for row in ids]


PER_LAYER_FIELDS = ("layer_types", "hybrid_layer_pattern", "moe_layer_freq", "layers_block_type", "hybrid_override_pattern")
"""Config fields that may have an entry, or a letter, for each decoder layer."""


def truncate_layers(config: Mapping[str, object], layers: int) -> dict[str, object]:
    """Reduce a config to its first `layers` decoder layers. Raises UserError if the model has fewer."""
    count = shape_of(config).layers
    if layers > count:
        raise UserError(f"--layers: the model has {count}, got {layers}")
    lists = {key: value[:layers] for key in PER_LAYER_FIELDS if isinstance(value := config.get(key), list | str)}
    return {**config, "num_hidden_layers": layers, **lists}


def load_named_config(model: str) -> dict[str, object]:
    """The config of a folder or of a known hub id (default: MiMo-7B). Raises UserError for other models, and for the default on a CPU."""
    if not (model or torch.cuda.is_available()):
        raise UserError("--model: the default has 7.8 billion parameters, which need a GPU; name the folder of a small model")
    config = hf_config(ModelConfig(path=model or "XiaomiMiMo/MiMo-7B-RL"), fetch=False)
    if config is None:
        raise UserError(f"--model: {model} is neither a folder with config.json nor a known hub id")
    return config


def create_config_folder(config: dict[str, object], path: Path) -> HfFolder:
    """Create a folder with a config but no weights, for which the engine initializes random weights on its device."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return HfFolder(path, config, shape_of(config))
