"""`mtpctl bench fused-kernels`: time and memory of the LM head's log-probs and policy loss, relative to the matrix products alone.

`TIMED_WORK` describes what is timed, with CUDA events on a GPU and the wall clock on a CPU. Cases alternate for several rounds, so that
drift of the GPU's clock affects all of them equally. The floor is torch's matrix products alone: one for forward, three for the other
kinds of work. Memory is the peak beyond the inputs and the returned gradients. `benchmarks/kernel_errors.py` compares the same cases with
float64.

Shape legend: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from mtpctl.bench.report import describe_machine, format_number, markdown_table
from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.plan.memory import GIB

Work = Literal["forward", "forward+backward", "policy loss"]
ROUNDS, SAMPLES = 3, 5
SETTLE_MS = 250
"""Time for which a case runs before it is timed, until the clock of a GPU at its power limit is stable."""
REFERENCE_ROWS, REFERENCE_HIDDEN, REFERENCE_VOCAB = 8192, 4096, 151680
SLACK_ELSEWHERE = 1.1
"""Factor on the bounds of time ratios at shapes other than the reference shape, for which the bounds are set."""
TIMED_WORK = (
    "one whole call from hidden states and weight to results on the device, argument checks and launches included, "
    "data creation and compilation excluded; median of 15 runs, in three rounds in which all cases take turns, each after running for "
    "250 ms untimed"
)


@dataclass(frozen=True)
class Shape:
    """Rows N, hidden size H and vocabulary V of the head."""

    rows: int
    hidden: int
    vocab: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse ROWSxHIDDENxVOCAB. Raises ValueError if `text` is invalid."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(
                f"--shape: {text!r}, expected ROWSxHIDDENxVOCAB, such as {REFERENCE_ROWS}x{REFERENCE_HIDDEN}x{REFERENCE_VOCAB}"
            )
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.vocab}"

    @property
    def scale(self) -> float:
        """Factor on workspaces and memory bounds: rows relative to the reference shape, at least 1."""
        return max(1.0, self.rows / REFERENCE_ROWS)


@dataclass(frozen=True)
class Inputs:
    """Inputs of all cases: hidden [N, H] and weight [V, H], which require gradients, and labels [N].

    upstream [N] is the gradient with respect to the log-probs. old_logprob [N] and advantage [N] are for the policy loss.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: Tensor
    old_logprob: Tensor
    advantage: Tensor


@dataclass
class Output:
    """Log-probs [N], entropies [N], and gradients of hidden, weight and, for a draft loss, the trunk's states; None if not computed."""

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    hidden_grad: Tensor | None = None
    weight_grad: Tensor | None = None
    trunk_grad: Tensor | None = None


Run = Callable[[Inputs], Output]


@dataclass(frozen=True)
class Case:
    """One implementation of one kind of work.

    max_ratio: bound on time relative to the floor. max_gib: bound on memory. peer: another package's implementation, without bounds.
    """

    work: Work
    name: str
    run: Run
    max_ratio: float | None = None
    max_gib: float | None = None
    peer: bool = False


@dataclass(frozen=True)
class Result:
    """One row of the table. `ratio` is the time relative to the floor; `peak_gib` is None on a CPU."""

    shape: str
    what: str
    name: str
    ms: float
    fastest_ms: float
    slowest_ms: float
    ratio: float
    peak_gib: float | None
    peer: bool
    misses: tuple[str, ...]


def make_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """Random inputs. Logits have a standard deviation of 2, so the softmax is neither flat nor one-hot."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    weight = torch.empty(shape.vocab, shape.hidden, device=device, dtype=dtype)
    for start in range(0, shape.vocab, 8192):  # In slices, because the whole weight in fp32 would determine the peak memory.
        rows = weight[start : start + 8192]
        rows.copy_(normal(*rows.shape) * (2 / shape.hidden**0.5))
    labels = torch.randint(0, shape.vocab, (shape.rows,), device=device, generator=generator)
    return Inputs(
        normal(shape.rows, shape.hidden).to(dtype).requires_grad_(),
        weight.requires_grad_(),
        labels,
        normal(shape.rows),
        normal(shape.rows) * 0.1 - 13.0,
        normal(shape.rows),
    )


def clipped_loss(logprob: Tensor, entropy: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    """A clipped policy loss with an entropy bonus, per row."""
    ratio = (logprob - old_logprob).clamp(-20, 20).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)) - 0.01 * entropy


def make_cases(shape: Shape, device: str) -> list[Case]:
    """mtpctl's implementations. Workspaces are `shape.scale` times the sizes in the names of the cases."""
    half_gib, one_gib, one_and_a_half_gib, three_gib = (int(shape.scale * gib * GIB) for gib in (0.5, 1, 1.5, 3))
    chunked = [
        Case("forward", "chunked, 1 GiB", _forward_run("chunked", one_gib)),
        Case("forward+backward", "chunked, 1 GiB", _backward_run("chunked", one_gib)),
    ]
    if device != "cuda":
        return chunked
    return [
        Case("forward", "triton, 0.5 GiB", _forward_run("triton", half_gib), 1.12, 0.5),
        Case("forward+backward", "triton, 0.5 GiB", _backward_run("triton", half_gib), 1.42, 0.5),
        Case("forward+backward", "triton, 1 GiB", _backward_run("triton", one_gib)),
        Case("forward+backward", "triton, 3 GiB", _backward_run("triton", three_gib), 1.12, 3.0),
        Case("policy loss", "triton, 1.5 GiB", _policy_run(one_and_a_half_gib), 1.12, 1.5),
        *chunked,
    ]


def make_peer_cases(device: str) -> list[Case]:
    """The implementations of PyTorch and, if installed, cut-cross-entropy."""
    peers: dict[str, Scores] = {"torch eager": _eager_scores}
    if device == "cuda":
        peers["torch.compile"] = torch.compile(_eager_scores)
        if find_spec("cut_cross_entropy"):
            peers["cut-cross-entropy (no entropy)"] = _cut_cross_entropy
    return [
        Case(work, name, _torch_run(scores, backward=work != "forward"), peer=True)
        for name, scores in peers.items()
        for work in ("forward", "forward+backward")
    ]


def _forward_run(implementation: str, workspace: int) -> Run:
    def run(x: Inputs) -> Output:
        with torch.no_grad():
            out = linear_logprob(x.hidden, x.weight, x.labels, entropy=True, workspace_bytes=workspace, implementation=implementation)
        return Output(out.logprob, out.entropy)

    return run


def _backward_run(implementation: str, workspace: int) -> Run:
    def run(x: Inputs) -> Output:
        out = linear_logprob(x.hidden, x.weight, x.labels, entropy=True, workspace_bytes=workspace, implementation=implementation)
        grads = torch.autograd.grad(out.logprob, (x.hidden, x.weight), x.upstream)
        return Output(out.logprob.detach(), None if out.entropy is None else out.entropy.detach(), *grads)

    return run


def _policy_run(workspace: int) -> Run:
    def run(x: Inputs) -> Output:
        def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            assert entropy is not None
            return clipped_loss(logprob, entropy, x.old_logprob[rows], x.advantage[rows]).sum(), {}

        out = linear_policy_loss(x.hidden, x.weight, x.labels, token_loss, entropy=True, workspace_bytes=workspace, implementation="triton")
        return Output(out.logprob, out.entropy, *torch.autograd.grad(out.loss_sum, (x.hidden, x.weight)))

    return run


Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(hidden, weight, labels) → log-probs, and entropies if they are computed."""


def _eager_scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T).float().log_softmax(1)
    return logp.gather(1, labels.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    return -import_module("cut_cross_entropy").linear_cross_entropy(hidden, weight, labels, reduction="none"), None


def _torch_run(scores: Scores, *, backward: bool) -> Run:
    def run(x: Inputs) -> Output:
        if not backward:
            with torch.no_grad():
                return Output(*scores(x.hidden, x.weight, x.labels))
        logprob, entropy = scores(x.hidden, x.weight, x.labels)
        grads = torch.autograd.grad(logprob, (x.hidden, x.weight), x.upstream.to(logprob.dtype))
        return Output(logprob.detach(), None if entropy is None else entropy.detach(), *grads)

    return run


def _floor_cases(x: Inputs) -> list[Case]:
    """The matrix products alone: for forward the logits; for forward and backward also the gradients of hidden and weight."""
    hidden, weight = x.hidden.detach(), x.weight.detach()
    logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    hidden_grad, weight_grad = torch.empty_like(hidden), torch.empty_like(weight)

    def forward(_: Inputs) -> Output:
        torch.mm(hidden, weight.T, out=logits)
        return Output()

    def forward_backward(_: Inputs) -> Output:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=hidden_grad)
        torch.mm(logits.T, hidden, out=weight_grad)
        return Output()

    return [Case("forward", "floor", forward, peer=True), Case("forward+backward", "floor", forward_backward, peer=True)]


def time_runs(run: Callable[[], object], device: str, samples: int) -> list[float]:
    """Time `samples` runs. Returns milliseconds."""
    times = []
    for _ in range(samples):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def time_in_turns[K: Hashable](runs: Mapping[K, Callable[[], object]], device: str) -> dict[K, list[float]]:
    """Time `ROUNDS * SAMPLES` runs of each key, alternating between keys. On a GPU each runs for `SETTLE_MS` before it is timed."""
    times: dict[K, list[float]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            elapsed_ms = sum(time_runs(run, device, 1))
            while device == "cuda" and elapsed_ms < SETTLE_MS:
                elapsed_ms += sum(time_runs(run, device, 1))
            times[key] += time_runs(run, device, SAMPLES)
    return times


def measure_peak_gib(run: Callable[[], Output], device: str) -> float | None:
    """Peak GPU memory of a run, minus previously allocated memory and the returned gradients; None on a CPU."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    allocated_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = run()
    torch.cuda.synchronize()
    gradients = sum(gradient.nbytes for gradient in (output.hidden_grad, output.weight_grad, output.trunk_grad) if gradient is not None)
    return (torch.cuda.max_memory_allocated() - allocated_before - gradients) / GIB


def can_run(case: Case, x: Inputs) -> bool:
    """Run the case once. Returns False if a peer runs out of GPU memory."""
    try:
        case.run(x)
    except torch.OutOfMemoryError:
        if not case.peer:
            raise
        return False
    return True


def find_misses(case: Case, shape: Shape, ratio: float, peak: float | None) -> tuple[str, ...]:
    """Short descriptions of the bounds that a case misses."""
    reference = Shape(REFERENCE_ROWS, REFERENCE_HIDDEN, REFERENCE_VOCAB)
    missed = []
    if case.max_ratio is not None and ratio > (bound := case.max_ratio * (1.0 if shape == reference else SLACK_ELSEWHERE)):
        missed.append(f"{ratio:.2f}x, bound {bound:.2f}x")
    if case.max_gib is not None and peak is not None and peak > (bound := case.max_gib * shape.scale):
        missed.append(f"{peak:.2f} GiB, bound {bound:.2f}")
    return tuple(missed)


def measure(shape: Shape, *, with_peers: bool, device: str | None = None) -> list[Result]:
    """Measure every case that the device supports at one shape, except peers that run out of GPU memory."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    x = make_inputs(shape, torch.bfloat16, device, seed=0)
    all_cases = [*make_cases(shape, device), *(make_peer_cases(device) if with_peers else [])]
    cases = [case for case in all_cases if can_run(case, x)]
    floors = _floor_cases(x)
    peaks = {case: measure_peak_gib(lambda case=case: case.run(x), device) for case in cases}  # type: ignore[misc]
    times = time_in_turns({case: (lambda case=case: case.run(x)) for case in (*floors, *cases)}, device)  # type: ignore[misc]
    forward, forward_backward = (statistics.median(times[c]) for c in floors)
    results = []
    for case, case_ms in times.items():
        ms = statistics.median(case_ms)
        ratio, peak = ms / (forward if case.work == "forward" else forward_backward), peaks.get(case)
        missed = () if case.peer else find_misses(case, shape, ratio, peak)
        results.append(Result(str(shape), case.work, case.name, ms, min(case_ms), max(case_ms), ratio, peak, case.peer, missed))
    return results


def format_table(results: list[Result]) -> str:
    """One row for each case, the floor first within each kind of work."""
    ordered = sorted(results, key=lambda r: (r.shape, r.what, r.name != "floor", r.peer))
    return markdown_table(
        ("shape", "what", "implementation", "ms (fastest – slowest)", "× floor", "GiB"),
        [
            (
                r.shape,
                r.what,
                r.name,
                f"{r.ms:.2f} ({r.fastest_ms:.2f} – {r.slowest_ms:.2f})",
                f"{r.ratio:.2f}",
                format_number(r.peak_gib, ".2f"),
            )
            for r in ordered
        ],
    )


def format_verdict(results: list[Result]) -> list[str]:
    """One line for each missed bound, then for each kind of work our best time and the best peer's."""
    lines = [f"MISSED {r.shape} {r.what} {r.name}: {'; '.join(r.misses)}" for r in results if r.misses]
    for shape in dict.fromkeys(r.shape for r in results):
        for work in ("forward", "forward+backward"):
            measured = [r for r in results if r.shape == shape and r.what == work and r.name != "floor"]
            own, peers = ([r for r in measured if r.peer is peer] for peer in (False, True))
            if own and peers:
                best, peer = min(own, key=lambda r: r.ms), min(peers, key=lambda r: r.ms)
                lines.append(
                    f"{shape} {work}: {best.name} {best.ms:.2f} ms, best peer {peer.name} {peer.ms:.2f} ms, {peer.ms / best.ms:.2f}x"
                )
    return lines


def to_document(results: list[Result]) -> dict[str, object]:
    return {"environment": describe_machine(), "timer": TIMED_WORK, "results": [asdict(r) for r in results]}
