"""Finished runs and results that the benchmarks evaluate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtpctl.bench.arms import Outcome
from mtpctl.bench.mtp import ARMS
from mtpctl.bench.sync_weights import Options, Result
from mtpctl.plan.memory import GIB
from mtpctl.plan.placement import Placement
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.metrics_file import History, Row
from mtpctl.telemetry.versions import collect_versions


def write_run(folder: Path, recipe: Recipe, rows: Sequence[Row]) -> None:
    """The files of a run directory that a benchmark reads."""
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(dump_resolved(recipe))
    (folder / "versions.json").write_text(json.dumps(collect_versions()))
    lines = [json.dumps({"session": 1, "time": row.time, "phase": row.phase, "step": row.step, **row.metrics}) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))


def drafting_run(rates: list[float], *, drafted: int = 1000, accuracy: tuple[float, float] = (0.25, 0.75)) -> History:
    """An update for each acceptance rate: two seconds, half of them with requests, and 400 tokens."""
    rows = [Row("rl", 0, 0.0, 1, {"eval/accuracy": accuracy[0]})]
    for step, rate in enumerate(rates, start=1):
        metrics = {"timing_s/step": 2.0, "async/rollout_idle": 0.5, "rollout/tokens_per_s": 200.0}
        if drafted:
            metrics |= {
                "rollout/spec_drafted": float(drafted),
                "rollout/spec_accepted": rate * drafted,
                "rollout/spec_accept_rate": rate,
                "rollout/spec_accept_rate_1": rate,
                "rollout/spec_accept_length": 1 + rate,
                "mtp/expected_rate_1": rate - 0.01,
                "mtp/expected_rate_greedy_1": rate + 0.01,
            }
        rows.append(Row("rl", step, float(step), 1, metrics))
    rows[-1].metrics |= {"eval/accuracy": accuracy[1]} | ({"eval/spec_accept_rate": rates[-1]} if drafted else {})
    return History(rows, [])


def mtp_outcome(arm: str, history: History, seed: int = 0) -> Outcome:
    """A run of one of the default arms of `bench mtp`."""
    return Outcome(next(each for each in ARMS if each.name == arm), seed, history, Placement("cpu", (), 0), requested_updates=4)


SYNC_OPTIONS = Options(
    config={},
    device="cuda",
    transports=("nccl",),
    repeats=3,
    batch=64,
    prompt=256,
    tokens=512,
    bucket_bytes=GIB,
    fp8=False,
    eager=True,
    shared=False,
    folder=Path(),
)


def sync_result(transport: str = "nccl", **fields: object) -> Result:
    """Three syncs whose medians meet all bounds, with these fields changed."""
    result = Result(transport, 10_000_000_000, 10, link_gb_per_s=100.0, verified=3)
    result.seconds, result.stall_seconds, result.wire_seconds = [0.14, 0.13, 9.0], [0.2, 0.1, 0.3], [0.15, 0.19, 0.2]
    result.back_seconds, result.tokens_per_s = [0.5, 0.6, 0.7], [100.0, 100.0, 100.0]
    return replace(result, **fields)  # type: ignore[arg-type]
