"""`mtpctl bench fused-kernels`: time, memory and error of every implementation of the head's log-probs, in one run.

Time: see `TIMER`; by device events on a card, by the wall clock on a CPU. Cases take turns for several rounds, so that drift of the card's
clock falls on all of them. Floor: the matrix products alone, by torch, one for the forward pass and three for forward and backward. Memory:
the peak beyond the inputs and the returned gradients. Error: ‖got − exact‖ / ‖exact‖ against float64 (`fused_oracle`), at most 1.5 times
that of plain torch on the same inputs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mtpctl.bench import document
from mtpctl.bench.fused_cases import Case, Inputs, Output, clipped_loss, make_inputs, ours, peers
from mtpctl.bench.fused_oracle import Exact, distance, exact
from mtpctl.plan.memory import GIB

ROUNDS, SAMPLES = 3, 5
SETTLE_MS = 250  # how long a case runs before its turn is timed: a card at its power limit takes that long to find its clock
REFERENCE_ROWS, REFERENCE_HIDDEN, REFERENCE_VOCAB = 8192, 4096, 151680
SLACK_ELSEWHERE = 1.1  # bounds are set at the reference shape; at others ratios may be a tenth worse, and memory grows with rows above it
TORCH_ERRORS = 1.5
NO_ERRORS: dict[str, float | None] = dict.fromkeys(("logprob_error", "entropy_error", "hidden_grad_error", "weight_grad_error"))
TIMER = (
    "one whole call from hidden states and weight to results on the device, argument checks and launches included, "
    "data creation and compilation excluded; median of 15 runs, in three rounds in which all cases take turns, each after running for "
    "250 ms untimed."
)


@dataclass(frozen=True)
class Shape:
    """Rows N, hidden size H and vocabulary V of the head."""

    rows: int
    hidden: int
    vocab: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `8192x4096x151680`: rows, hidden size, vocabulary. Raises ValueError for other text."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
            raise ValueError(
                f"--shape: {text!r}, expected ROWSxHIDDENxVOCAB, such as {REFERENCE_ROWS}x{REFERENCE_HIDDEN}x{REFERENCE_VOCAB}"
            )
        return cls(*map(int, parts))

    @property
    def is_reference(self) -> bool:
        """Whether the bounds were set at this shape."""
        return self == Shape(REFERENCE_ROWS, REFERENCE_HIDDEN, REFERENCE_VOCAB)


@dataclass(frozen=True)
class Result:
    """One line of the table; None where it does not apply. `ratio` is to the floor, for mtp to the first forward+backward case."""

    shape: str
    what: str
    name: str
    ms: float
    fastest_ms: float
    slowest_ms: float
    ratio: float
    peak_gib: float | None
    logprob_error: float | None
    entropy_error: float | None
    hidden_grad_error: float | None
    weight_grad_error: float | None
    peer: bool
    misses: tuple[str, ...]


def time_runs(run: Callable[[], object], device: str, samples: int) -> list[float]:
    """Milliseconds of each of `samples` runs."""
    out = []
    for _ in range(samples):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            out.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            out.append((time.perf_counter() - begin) * 1e3)
    return out


def settle(run: Callable[[], object], device: str) -> None:
    """Run it untimed until the card has found its clock."""
    spent = sum(time_runs(run, device, 1))
    while device == "cuda" and spent < SETTLE_MS:
        spent += sum(time_runs(run, device, 1))


def _floors(x: Inputs) -> list[Case]:
    """The matrix products alone: that of the logits, and all three (logits, hidden gradient, weight gradient)."""
    h, w = x.hidden.detach(), x.weight.detach()
    logits = torch.empty(len(h), len(w), dtype=h.dtype, device=h.device)
    hidden_grad, weight_grad = torch.empty_like(h), torch.empty_like(w)

    def forward(_: Inputs) -> Output:
        torch.mm(h, w.T, out=logits)
        return Output()

    def both(_: Inputs) -> Output:
        torch.mm(h, w.T, out=logits)
        torch.mm(logits, w, out=hidden_grad)
        torch.mm(logits.T, h, out=weight_grad)
        return Output()

    return [Case("forward", "floor", forward, peer=True), Case("forward+backward", "floor", both, peer=True)]


def peak_gib(run: Callable[[], Output], device: str) -> float | None:
    """The peak of a card's memory beyond what was there and the gradients; None on a CPU."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = run()
    torch.cuda.synchronize()
    gradients = sum(g.nbytes for g in (made.hidden_grad, made.weight_grad, made.trunk_grad) if g is not None)
    return (torch.cuda.max_memory_allocated() - before - gradients) / GIB


def _fits(case: Case, x: Inputs) -> bool:
    """Run the case once. Returns False for a peer that runs out of the card's memory."""
    try:
        case.run(x)
    except torch.OutOfMemoryError:
        if not case.peer:
            raise
        return False
    return True


def _torch_errors(x: Inputs, truth: Exact, device: str) -> dict[str, float | None]:
    """The errors of plain torch on the same inputs: eager, or compiled where eager does not fit the card."""
    for case in peers(device):
        if case.what == "forward+backward" and case.name.startswith("torch") and _fits(case, x):
            return _errors(case, case.run(x), x, truth)
    return {}


def _errors(case: Case, made: Output, x: Inputs, truth: Exact) -> dict[str, float | None]:
    by_logprob: Tensor = x.upstream
    by_entropy: Tensor | None = None
    if case.what == "policy loss":
        logprob, entropy = truth.logprob.clone().requires_grad_(), truth.entropy.clone().requires_grad_()
        clipped_loss(logprob, entropy, x.old_logprob, x.advantage).sum().backward()
        assert logprob.grad is not None
        by_logprob, by_entropy = logprob.grad, entropy.grad
    elif case.what.startswith("mtp"):
        by_logprob = x.half.double()
    hidden_grad, weight_grad = truth.grads(by_logprob, by_entropy)
    return {
        "logprob_error": None if made.logprob is None else distance(made.logprob, truth.logprob),
        "entropy_error": None if made.entropy is None else distance(made.entropy, truth.entropy),
        "hidden_grad_error": None if made.hidden_grad is None else distance(made.hidden_grad[truth.rows], hidden_grad),
        "weight_grad_error": None if made.weight_grad is None else distance(made.weight_grad[truth.entries], weight_grad),
    }


def _misses(
    case: Case, shape: Shape, ratio: float, peak: float | None, errors: dict[str, float | None], torch_errors: dict[str, float | None]
) -> tuple[str, ...]:
    """The bounds that a case misses, each in a few words. Errors are compared by `not <=`, so that NaN is a miss."""
    found = []
    slack = 1.0 if shape.is_reference else SLACK_ELSEWHERE
    if case.limit is not None:
        if ratio > case.limit.ratio * slack:
            found.append(f"{ratio:.2f}x, bound {case.limit.ratio * slack:.2f}x")
        gib = None if case.limit.gib is None else case.limit.gib * max(1, shape.rows / REFERENCE_ROWS)
        if peak is not None and gib is not None and peak > gib:
            found.append(f"{peak:.2f} GiB, bound {gib:.2f}")
        forward = errors["logprob_error"]
        if case.limit.error is not None and forward is not None and not forward <= case.limit.error:
            found.append(f"error {forward:.1e}, bound {case.limit.error:.0e}")
    for name, value in errors.items():
        own = torch_errors.get(name)
        if value is not None and own is not None and not value <= TORCH_ERRORS * own:
            found.append(f"{name.replace('_', ' ')} {value:.1e}, torch's own {own:.1e}")
    return tuple(found)


def measure(shape: Shape, *, with_peers: bool, device: str | None = None) -> list[Result]:
    """Measure every case at one shape. Cases that the device cannot run (Triton on a CPU) are left out."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    x = make_inputs(shape.rows, shape.hidden, shape.vocab, torch.bfloat16, device, seed=0)
    truth = exact(x.hidden.detach(), x.weight.detach(), x.labels)
    cases = [c for c in ours(max(1.0, shape.rows / REFERENCE_ROWS)) if device == "cuda" or "chunked" in c.name]
    cases += list(peers(device)) if with_peers else []
    cases = [c for c in cases if _fits(c, x)]
    torch_errors = _torch_errors(x, truth, device)
    floors = _floors(x)
    peaks, errors = {}, {}
    for case in cases:
        peaks[case] = peak_gib(lambda case=case: case.run(x), device)  # type: ignore[misc]
        errors[case] = _errors(case, case.run(x), x, truth)
    samples: dict[Case, list[float]] = {case: [] for case in (*floors, *cases)}
    for _ in range(ROUNDS):
        for case in samples:
            settle(lambda case=case: case.run(x), device)  # type: ignore[misc]
            samples[case] += time_runs(lambda case=case: case.run(x), device, SAMPLES)  # type: ignore[misc]
    whole = next(statistics.median(samples[c]) for c in cases if c.what == "forward+backward")
    forward, both = (statistics.median(samples[c]) for c in floors)
    unit = {"forward": forward, "forward+backward": both, "policy loss": both}
    results = []
    for case, times in samples.items():
        ms = statistics.median(times)
        ratio = ms / unit.get(case.what, whole)
        found = () if case.peer else _misses(case, shape, ratio, peaks[case], errors[case], torch_errors)
        results.append(
            Result(
                f"{shape.rows}x{shape.hidden}x{shape.vocab}",
                case.what,
                case.name,
                ms,
                min(times),
                max(times),
                ratio,
                peaks.get(case),
                peer=case.peer,
                misses=found,
                **errors.get(case, NO_ERRORS),
            )
        )
    return results


def table(results: list[Result]) -> str:
    """Markdown: one line a case, the floor first within each kind of work."""

    def number(x: float | None, form: str) -> str:
        return "–" if x is None else format(x, form)

    lines = [
        "| shape | what | implementation | ms (fastest – slowest) | × floor | GiB | log-prob err | hidden grad err | weight grad err |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (r.shape, r.what, r.name != "floor", r.peer)):
        lines.append(
            f"| {r.shape} | {r.what} | {r.name} | {r.ms:.2f} ({r.fastest_ms:.2f} – {r.slowest_ms:.2f}) | {r.ratio:.2f} "
            f"| {number(r.peak_gib, '.2f')} "
            f"| {number(r.logprob_error, '.1e')} | {number(r.hidden_grad_error, '.1e')} | {number(r.weight_grad_error, '.1e')} |"
        )
    return "\n".join(lines)


def verdict(results: list[Result]) -> list[str]:
    """One line for each missed bound, then the time of the best peer over ours for each kind of work."""
    lines = [f"MISSED {r.shape} {r.what} {r.name}: {'; '.join(r.misses)}" for r in results if r.misses]
    for shape in dict.fromkeys(r.shape for r in results):
        for what in ("forward", "forward+backward"):
            here = [r for r in results if r.shape == shape and r.what == what and r.name != "floor"]
            mine, theirs = ([r for r in here if r.peer is peer] for peer in (False, True))
            if mine and theirs:
                best, peer = min(mine, key=lambda r: r.ms), min(theirs, key=lambda r: r.ms)
                lines.append(
                    f"{shape} {what}: {best.name} {best.ms:.2f} ms, best peer {peer.name} {peer.ms:.2f} ms, {peer.ms / best.ms:.2f}x"
                )
    return lines


def environment(device: str) -> str:
    """Card and versions, for the head of a table."""
    from importlib.metadata import PackageNotFoundError, version

    found = [f"torch {torch.__version__}"]
    for package in ("triton", "cut-cross-entropy"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{card}; {', '.join(found)}"


def as_json(results: list[Result], device: str) -> str:
    return document.text({"environment": environment(device), "results": [asdict(r) for r in results]})
