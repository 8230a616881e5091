#!/usr/bin/env python3
"""Write docs/metrics.md, the page of all metrics, from the tables in mtpctl/telemetry/names.py and scripts/metrics_advice.py.

Run it after a change of either. `--check` only compares, and exits with 1 if the page is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated_page import write_or_check
from metrics_advice import listed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
INTRODUCTION = """\
# Metrics

Generated from `mtpctl/telemetry/names.py` and `scripts/metrics_advice.py` by `scripts/generate_metrics_page.py`.

Every row of `metrics.jsonl` in a run directory is one update or evaluation with these names. TensorBoard and W&B have
the same metrics, and `mtpctl report RUN` plots them. Most names follow verl's. A share is a fraction of 1. The usual
values are rules of thumb, not bounds that are checked; without one, compare the curve with earlier runs of the same
recipe. [Troubleshooting](troubleshooting.md) lists symptoms, and [async tuning](async-tuning.md) explains which side
waits for which.
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
"""Titles by the first part of a name, in the order of the page."""


def page() -> str:
    """The whole page. Raises KeyError for a metric without a section."""
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
