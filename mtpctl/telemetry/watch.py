"""A live table of the runs below a folder: state, step, reward with its curve, throughput, and the newest error."""

from __future__ import annotations

import math
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mtpctl.errors import UserError
from mtpctl.telemetry.history import History, load_history
from mtpctl.telemetry.live import ERROR_KINDS
from mtpctl.telemetry.names import format_duration, format_value
from mtpctl.telemetry.panel import sparkline
from mtpctl.telemetry.runs import RunOverview, find_runs

REFRESH_S = 2.0
CURVE = 24
"""Width of the curve of rewards, in characters."""
STYLES = {"running": "green", "failed": "red", "broken off": "red", "unreadable": "red", "stopped": "yellow"}


def watch(folder: Path, console: Console) -> None:
    """Show the table until Ctrl-C, updated every `REFRESH_S` seconds."""
    with Live(table(folder), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(table(folder), refresh=True)


def table(folder: Path) -> Table:
    """The runs below the folder, the newest first."""
    rows = Table(title=f"{folder}, {time.strftime('%H:%M:%S')}", box=None, title_justify="left", expand=True)
    for name in ("run", "state", "step", "reward", "", "held-out", "trainer", "rollout", "age"):
        rows.add_column(name, no_wrap=True)
    rows.add_column("newest error", overflow="ellipsis", no_wrap=True, ratio=1)
    for run in find_runs(folder):
        try:
            history = load_history(run.path)
        except UserError:  # `run.fault` is the reason.
            history = History([], [])
        rows.add_row(*_cells(folder, run, history))
    return rows


def _cells(folder: Path, run: RunOverview, history: History) -> list[str | Text]:
    rewards = [value for _, value in history.series("reward/unfiltered_mean", "rl") if math.isfinite(value)]
    errors = [event.message for event in history.events if event.kind in ERROR_KINDS]
    step = f"{run.stage} {run.step}" + ("" if run.steps is None else f"/{run.steps}")
    return [
        str(run.path.relative_to(folder)) if run.path != folder else run.path.name,
        Text(run.state, STYLES.get(run.state, "")),
        step if run.stage else "–",
        "–" if run.unfiltered_reward is None else format_value(run.unfiltered_reward, "number"),
        Text(sparkline(rewards, CURVE), "cyan"),
        "–" if run.accuracy is None else format_value(run.accuracy, "share"),
        _newest(history, "perf/tokens_per_s"),
        _newest(history, "rollout/tokens_per_s"),
        format_duration(run.age_s),
        run.fault or (errors[-1] if errors else ""),
    ]


def _newest(history: History, name: str) -> str:
    series = history.series(name)
    return format_value(series[-1][1], "tokens/s") if series else "–"
