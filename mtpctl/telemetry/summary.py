"""The summary of a run: its headline metrics before and after RL, and held-out accuracy in between."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

from mtpctl.telemetry.curves import measure
from mtpctl.telemetry.history import History
from mtpctl.telemetry.names import Metric, describe, format_value

HEADLINES = (
    "eval/accuracy",
    "reward/mean",
    "reward/unfiltered_mean",
    "rollout/spec_accept_rate",
    "rollout/spec_accept_length",
    "actor/entropy",
    "response/length_mean",
    "rollout/tokens_per_s",
    "perf/tokens_per_s",
)

_SINGLE = {"eval/accuracy"}
"""Measured on a whole held-out set, so first and last value are compared. Of the others, means over a tenth of the values are."""


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One metric at the beginning and at the end of RL."""

    name: str
    metric: Metric
    before: float
    after: float

    @property
    def change(self) -> str:
        """The difference: in points for shares, else relative; a dash where one side is no number."""
        if not (math.isfinite(self.before) and math.isfinite(self.after)):
            return "–"
        if self.metric.unit == "share":
            return f"{100 * (self.after - self.before):+.1f} points"
        if self.before <= 0:
            return f"{self.after - self.before:+.3g}"
        percent = round(100 * (self.after / self.before - 1))
        return f"{percent:+d}%" if percent else "±0%"


def before_and_after(history: History) -> list[SummaryRow]:
    """The headline metrics before and after RL. Those that were logged fewer than two times are left out.

    Held-out accuracy has a second row where it was measured in between: from the first evaluation to the mean of the late ones, which
    depends less on chance than the last one.
    """
    rows = []
    for name in HEADLINES:
        values = [value for _, value in history.series(name, "rl")]
        if len(values) < 2:
            continue
        window = 1 if name in _SINGLE else max(1, len(values) // 10)
        rows.append(SummaryRow(name, describe(name), sum(values[:window]) / window, sum(values[-window:]) / window))
        if name == "eval/accuracy" and (measures := measure(evaluations(history))) and measures.late > 1:
            late = Metric(f"its last {measures.late}, mean", "share", f"Held-out accuracy, mean of the last {measures.late} evaluations.")
            rows.append(SummaryRow(name, late, measures.start, measures.late_mean))
    return rows


def evaluations(history: History) -> list[tuple[float, float]]:
    """(update, held-out accuracy) of every evaluation of RL whose accuracy is finite."""
    return [(float(step), value) for step, value in history.series("eval/accuracy", "rl") if math.isfinite(value)]


def in_between(history: History) -> str:
    """A sentence on the best evaluation and the worst fall, or that there was no evaluation in between; empty for fewer than two."""
    measures = measure(evaluations(history))
    if measures is None:
        return ""
    if measures.late == 1:
        return "Held-out accuracy was measured before and after alone; train.eval_every shows how it went in between."
    (step, best), fall = measures.best, measures.worst_fall
    start = f"Held-out accuracy: best {_accuracy(best)} at update {step:g}"
    if fall is None:
        return f"{start}; no evaluation fell under one before it."
    (x0, y0), (x, y) = fall.top, fall.bottom
    return f"{start}; worst fall {100 * fall.size:.1f} points, from {_accuracy(y0)} at update {x0:g} to {_accuracy(y)} at update {x:g}."


def summary_table(rows: list[SummaryRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    for heading in ("before RL", "after RL", "change"):
        table.add_column(heading, justify="right")
    for row in rows:
        unit = row.metric.unit
        label = {"rollout/tokens_per_s": "rollout speed", "perf/tokens_per_s": "trainer speed"}.get(row.name, row.metric.label)
        table.add_row(label, format_value(row.before, unit), f"[bold]{format_value(row.after, unit)}[/]", row.change)
    return table


def _accuracy(value: float) -> str:
    return format_value(value, "share")
