"""Options, results and bounds of `mtpctl bench sync-weights`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from mtpctl.bench.machine import Environment
from mtpctl.plan.memory import GIB
from mtpctl.recipe.sync import PUSHED

TIMER = "announcement to last resume: export, packing, transfer, both update sessions; a stall from pause to resume"
BOUNDS = {"wire": 2.0, "seconds": 0.5, "stall": 0.6, "memory_gib": 1.0, "tiny_seconds": 0.05}
"""wire: over link time. seconds, stall: of a sync of MiMo-7B. memory_gib: beyond two buckets. tiny_seconds: of a sync on a CPU."""


@dataclass(frozen=True)
class Options:
    """What to measure. `config`: a model's config.json fields; `shared`: trainer and engine share a card."""

    config: dict[str, object]
    device: Literal["cpu", "cuda"]
    transports: tuple[str, ...]
    repeats: int
    batch: int
    prompt: int
    tokens: int
    bucket_bytes: int
    eager: bool
    shared: bool
    folder: Path

    @property
    def as_json(self) -> dict[str, object]:
        """The options but for the folder, JSON-ready."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        return "bf16" if self.device == "cuda" else "fp32"

    @property
    def window_s(self) -> float:
        """Seconds over which throughput is averaged."""
        return 0.1 if self.device == "cuda" else 1.0


@dataclass(frozen=True)
class ExtraMemory:
    """GiB of one card that syncs needed beyond what was allocated before.

    `tensors`: the peak of tensors. `kept`: what torch's allocator reserved beyond them, because free memory was fragmented.
    `beside`: NCCL's buffers and CUDA's kernels, known only where a process has the card for itself.
    """

    tensors: float = 0.0
    kept: float = 0.0
    beside: float = 0.0

    @classmethod
    def between(cls, before: dict[str, int], after: dict[str, int], *, alone: bool) -> ExtraMemory:
        """The difference of two readings of `card_memory`, the first of which reset its peaks."""
        tensors = after["peak"] - before["allocated"]
        reserved = after["peak_reserved"] - before["reserved"]
        beside = (after["used"] - after["reserved"]) - (before["used"] - before["reserved"]) if alone else 0
        return cls(tensors / GIB, max(0, reserved - tensors) / GIB, max(0, beside) / GIB)

    @property
    def total(self) -> float:
        """GiB in all. Tensors count in full even where the allocator had memory reserved for them."""
        return self.tensors + self.kept + self.beside

    def __str__(self) -> str:
        return f"{self.total:.2f} (tensors {self.tensors:.2f}, allocator {self.kept:.2f}, NCCL and CUDA {self.beside:.2f})"


@dataclass
class Result:
    """Syncs over one transport; each list has one entry for each sync. Rates in GB/s."""

    transport: str
    nbytes: int
    buckets: int
    link_gb_per_s: float
    first_seconds: float
    verified: int
    seconds: list[float] = field(default_factory=list)
    export_seconds: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    trainer_gib: ExtraMemory = field(default_factory=ExtraMemory)
    engine_gib: ExtraMemory = field(default_factory=ExtraMemory)
    misses: list[str] = field(default_factory=list)

    @property
    def link_seconds(self) -> float:
        """Seconds that the link takes for all bytes."""
        return self.nbytes / self.link_gb_per_s / 1e9


def misses(result: Result, options: Options) -> list[str]:
    """The bounds that a result misses, each in a few words."""
    found = []

    def held(what: str, value: float, bound: float, unit: str) -> None:
        if value > bound:
            found.append(f"{what} {value:.3f} {unit}, bound {bound:g}")

    if options.device == "cpu":
        held("a sync", statistics.median(result.seconds), BOUNDS["tiny_seconds"], "s")
        return found
    if result.transport == "nccl":
        held("wire over link", statistics.median(result.wire_seconds) / result.link_seconds, BOUNDS["wire"], "x")
    if result.transport in PUSHED:
        held("a sync", statistics.median(result.seconds), BOUNDS["seconds"], "s")
        held("a stall", statistics.median(result.stall_seconds), BOUNDS["stall"], "s")
        room = 2 * options.bucket_bytes / GIB + BOUNDS["memory_gib"]
        held("memory beside the trainer's", result.trainer_gib.total, room, "GiB")
        held("memory beside the engine's", result.engine_gib.total, room, "GiB")
    return found


def table(results: list[Result]) -> str:
    """The results as a Markdown table: medians, with the least and the most."""

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"

    lines = [
        "| transport | GB | buckets | link GB/s | wire s | × link | sync s | stall s | throughput back s | of tokens/s | "
        "extra GiB trainer / engine | verified |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ratio = statistics.median(r.wire_seconds) / r.link_seconds
        lines.append(
            f"| {r.transport} | {r.nbytes / 1e9:.3f} | {r.buckets} | {r.link_gb_per_s:.1f} | {spread(r.wire_seconds)} | {ratio:.2f} "
            f"| {spread(r.seconds)} | {spread(r.stall_seconds)} | {spread(r.back_seconds)} | {statistics.median(r.tokens_per_s):.0f} "
            f"| {r.trainer_gib.total:.2f} / {r.engine_gib.total:.2f} | {r.verified} |"
        )
    return "\n".join(lines)


def as_json(results: list[Result], environment: Environment, options: Mapping[str, object]) -> dict[str, object]:
    rows = [{**asdict(r), "link_seconds": r.link_seconds, "median": _medians(r)} for r in results]
    return {"environment": environment, "timer": TIMER, "options": options, "results": rows}


def _medians(result: Result) -> dict[str, float]:
    names = ("seconds", "export_seconds", "wire_seconds", "stall_seconds", "back_seconds", "tokens_per_s")
    return {name: statistics.median(getattr(result, name)) for name in names}
