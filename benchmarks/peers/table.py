"""Print the tables of the comparison from output folders of measure.py.

    python3 benchmarks/peers/table.py --warmup 3 mtpctl=runs/mtpctl_0 'verl sync=runs/verl_0' …

Tokens, responses and accuracy come from responses.jsonl, which peer_reward.py writes in all systems. The first table
has one row per run, the second one row per evaluation. The time of an evaluation is that of its last response.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out rows. Accuracies are means of rewards; `unseen` excludes rows whose prompt is also a training row."""

    time: float
    responses: int
    accuracy: float
    unseen: float
    tokens: float


@dataclass(frozen=True)
class Run:
    """The records of one run. Lines are ordered by time."""

    name: str
    start: float
    gpus: int
    train: list[Line]
    held_out: list[Line]
    updates: list[Line]
    gpu: list[Line]
    parts: list[Line]

    def evaluations(self) -> list[Evaluation]:
        """Complete evaluations. Each scores every held-out row once, so the n-th response of a row belongs to evaluation n."""
        scored: Counter[str] = Counter()
        passes: list[list[Line]] = []
        for line in self.held_out:
            number = scored[line["key"]]
            scored[line["key"]] += 1
            if number == len(passes):
                passes.append([])
            passes[number].append(line)
        return [_evaluation(lines) for lines in passes if len(lines) == len(scored)]

    def after(self, warmup: int) -> tuple[float, float]:
        """Times of update `warmup` and of the last update."""
        return next(line["time"] for line in self.updates if line["update"] >= warmup), self.updates[-1]["time"]


def _evaluation(lines: Sequence[Line]) -> Evaluation:
    unseen = [line["reward"] for line in lines if not line["in_training"]]
    return Evaluation(
        time=lines[-1]["time"],
        responses=len(lines),
        accuracy=statistics.fmean(line["reward"] for line in lines),
        unseen=statistics.fmean(unseen) if unseen else float("nan"),
        tokens=statistics.fmean(line["tokens"] for line in lines),
    )


def read(name: str, folder: Path) -> Run:
    """The records in a folder of measure.py."""
    responses = sorted(_lines(folder / "responses.jsonl"), key=lambda line: line["time"])
    gpu = _lines(folder / "gpu.jsonl")
    updates: dict[int, Line] = {}
    for line in _lines(folder / "updates.jsonl"):
        updates.setdefault(line["update"], line)
    return Run(
        name,
        json.loads((folder / "run.json").read_text(encoding="utf-8"))["start"],
        gpu[0]["gpus"] if gpu else 1,
        [line for line in responses if line["split"] == "train"],
        [line for line in responses if line["split"] == "held_out"],
        [updates[number] for number in sorted(updates) if number > 0],
        gpu,
        _lines(folder / "parts.jsonl"),
    )


def _lines(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def speed(runs: Iterable[Run], warmup: int) -> str:
    """One row per run, over the updates after `warmup`."""
    rows = [
        "| run | first update (s) | updates | s per update: median (min to max) | tokens/s per GPU | responses/s per GPU | "
        "tokens per response | GPU busy | peak memory (GiB) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        if not run.updates or run.updates[-1]["update"] <= warmup:
            rows.append(f"| {run.name} | {len(run.updates)} updates, all in the warm-up |" + " |" * 7)
            continue
        begin, end = run.after(warmup)
        timed = [line for line in run.train if begin < line["time"] <= end]
        times = [line["time"] for line in run.updates if line["time"] >= begin]
        steps = [later - earlier for earlier, later in pairwise(times)]
        tokens = sum(line["tokens"] for line in timed)
        busy = [line["utilization"] for line in run.gpu if begin < line["time"] <= end]
        cells = [
            f"{run.updates[0]['time'] - run.start:.0f}",
            f"{len(steps)}",
            f"{statistics.median(steps):.2f} ({min(steps):.2f} to {max(steps):.2f})",
            f"{tokens / (end - begin) / run.gpus:,.0f}",
            f"{len(timed) / (end - begin) / run.gpus:.1f}",
            f"{tokens / len(timed):.1f}" if timed else "",
            f"{statistics.fmean(busy):.0f}%" if busy else "",
            f"{max(line['memory_mib'] for line in run.gpu) / 1024:.1f}" if run.gpu else "",
        ]
        rows.append(f"| {run.name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def learning(runs: Iterable[Run]) -> str:
    """One row per evaluation. GPU-seconds count from the start of the command."""
    rows = [
        "| run | s from start | s from first update | GPU-s | updates | responses | held-out % | unseen % | tokens per response |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        first = run.updates[0]["time"] if run.updates else float("nan")
        for evaluation in run.evaluations():
            elapsed = evaluation.time - run.start
            cells = [
                f"{elapsed:.0f}",
                f"{max(0.0, evaluation.time - first):.0f}",
                f"{elapsed * run.gpus:.0f}",
                f"{sum(line['time'] <= evaluation.time for line in run.updates)}",
                f"{sum(line['time'] <= evaluation.time for line in run.train)}",
                f"{evaluation.accuracy:.1%}".rstrip("%"),
                f"{evaluation.unseen:.1%}".rstrip("%"),
                f"{evaluation.tokens:.1f}",
            ]
            rows.append(f"| {run.name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def parts(runs: Iterable[Run], warmup: int) -> str:
    """One row per run and part of an update, over the updates after `warmup`. Each system defines its own parts, which may overlap."""
    rows = ["| run | part, as the system reports it | updates | s per update: median (min to max) |", "|---|---|---|---|"]
    for run in runs:
        seconds: dict[str, list[float]] = {}
        for line in run.parts:
            if line["update"] > warmup:
                for name, values in line["parts"].items():
                    seconds.setdefault(name, []).append(values)
        for name, values in sorted(seconds.items(), key=lambda item: -statistics.median(item[1])):
            rows.append(
                f"| {run.name} | {name} | {len(values)} | {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--warmup", type=int, default=3, help="updates that the speed leaves out")
    options = parser.parse_args()
    runs = [read(name, Path(folder)) for name, _, folder in (argument.rpartition("=") for argument in options.runs)]
    print(f"Speed after {options.warmup} updates, evaluations included:\n\n{speed(runs, options.warmup)}")
    if any(run.parts for run in runs):
        print(f"\nParts of an update:\n\n{parts(runs, options.warmup)}")
    if any(run.held_out for run in runs):
        print(f"\nHeld-out accuracy:\n\n{learning(runs)}")


if __name__ == "__main__":
    main()
