#!/usr/bin/env python3
"""Write docs/metrics.md, the page of all metrics, from the tables in mtpctl/telemetry/names.py and mtpctl/telemetry/advice.py.

Run it after a change of one of them. `--check` writes nothing and exits 1 where the page is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated_page import write_or_check

from mtpctl.telemetry.advice import listed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
INTRODUCTION = """\
# Metrics

Generated from `mtpctl/telemetry/names.py` and `mtpctl/telemetry/advice.py` by `scripts/generate_metrics_page.py`.

Every row of `metrics.jsonl` in a run directory is one update or evaluation with these names; TensorBoard and W&B have
the same, and `mtpctl report RUN` draws them. Names follow those of other frameworks, verl's above all. A share is a
fraction of 1. What is usual is a rule of thumb for runs in general, not a bound that anything checks; where nothing is
said, read the curve against earlier runs of the same recipe. What to do by symptom is in
[troubleshooting](troubleshooting.md), and who waits for whom in [async tuning](async-tuning.md).
"""
SECTIONS = {
    "reward": "Reward",
    "rl": "Stability",
    "response": "Responses",
    "eval": "Evaluation",
    "sft": "Supervised stage",
    "actor": "Policy update",
    "mtp": "MTP layers",
    "moe": "Mixtures of experts",
    "teacher": "Teacher",
    "rollout": "Rollout and speculation",
    "environment": "Environments",
    "rollout_corr": "Difference of trainer and rollout engine",
    "async": "Asynchrony",
    "sync": "Weight sync",
    "checkpoint": "Copies of checkpoints",
    "logprob": "Log-prob server",
    "timing_s": "Time",
    "perf": "Throughput of the trainer",
    "skipped": "Skipped updates",
}
"""Titles, by the first part of a name, in the order of the page."""


def page() -> str:
    """The whole page. Raises KeyError for a metric whose first part has no title yet."""
    rows: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for name, unit, meaning, advice in listed():
        cells = (f"`{name}`", meaning, "" if unit == "number" else unit, advice.healthy, advice.act)
        rows[name.split("/")[0]].append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    parts = [INTRODUCTION]
    for section, title in SECTIONS.items():
        if rows[section]:
            parts += [f"## {title}", "", "| metric | meaning | unit | usual | otherwise |", "|---|---|---|---|---|", *rows[section], ""]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page, script=Path(__file__).name, about=__doc__))
