"""The runs below a folder: their state, progress, reward and accuracy, also as a live table."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mtpctl.errors import UserError
from mtpctl.telemetry.metrics_file import ERROR_KINDS, History, load_history
from mtpctl.telemetry.names import format_duration, format_value
from mtpctl.telemetry.panel import sparkline
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.scale_requests import remembered

State = Literal["running", "done", "failed", "stopped", "broken off", "empty", "unreadable"]
"""`broken off`: it ended without logging an end, such as a killed run. `empty`: it has no log. `unreadable`: its log is damaged."""
DEPTH = 4
"""Depth of folders that are searched for runs."""


@dataclass(frozen=True)
class RunOverview:
    """The overview of one run.

    Attributes:
        step: of `steps` in `stage`, the newest stage.
        reward, unfiltered_reward, accuracy: newest values in RL.
        unseen_accuracy: the same for held-out prompts that no training row has; None if they are all unseen.
        age_s: seconds since the newest metric.
        restarts: one line for each restart of a trainer or replica, newest last.
        replicas: rollout replicas at the newest weight sync; None before the first.
        asked_replicas: the last request of `mtpctl scale`; None if there was none.
        fault: why the run is unreadable.
    """

    path: Path
    state: State
    stage: str
    step: int
    steps: int | None
    reward: float | None
    unfiltered_reward: float | None
    accuracy: float | None
    age_s: float
    restarts: list[str] = field(default_factory=list)
    replicas: int | None = None
    asked_replicas: int | None = None
    fault: str = ""
    unseen_accuracy: float | None = None


def find_runs(folder: Path) -> list[RunOverview]:
    """All runs below the folder, or the folder itself if it is a run; newest first. Includes unreadable runs."""
    return sorted((_readable_or_not(path) for path in _below(folder, DEPTH)), key=lambda run: run.age_s)


def _readable_or_not(path: Path) -> RunOverview:
    try:
        return describe_run(path)
    except UserError as error:
        return RunOverview(path, "unreadable", "", 0, None, None, None, None, _age(RunDirectory(path)), fault=str(error))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if RunDirectory(folder).recipe.is_file():
        yield folder
    elif depth and folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                yield from _below(path, depth - 1)


def describe_run(path: Path) -> RunOverview:
    """The overview of one run. Raises UserError if its metrics or the files of `mtpctl scale` are damaged."""
    run = RunDirectory(path)
    history = load_history(path)
    stage = history.rows[-1].phase if history.rows else ""
    step = history.last_step(stage) if stage else 0
    plan = _stages(run)
    return RunOverview(
        path,
        _state(run, history, plan),
        stage,
        step,
        plan.get(stage),
        _last(history, "reward/mean"),
        _last(history, "reward/unfiltered_mean"),
        _last(history, "eval/accuracy"),
        _age(run),
        [event.message for event in history.events if event.kind == "restart"],
        None if (replicas := _last(history, "rollout/replicas")) is None else int(replicas),
        remembered(run),
        unseen_accuracy=_last(history, "eval/unseen_accuracy"),
    )


def _age(run: RunDirectory) -> float:
    """Seconds since the newest metric, or since the recipe if there are no metrics."""
    newest = run.metrics if run.metrics.exists() else run.recipe
    return max(0.0, time.time() - newest.stat().st_mtime)


def _state(run: RunDirectory, history: History, plan: dict[str, int]) -> State:
    if run.held:
        return "running"
    if not history.rows and not history.events:
        return "empty"
    # An SFT stage may end before its last step. Its last checkpoint is then named `-end`.
    last = list(plan)[-1] if plan else ""
    if last and ((run.checkpoints / f"{last}-{history.last_step(last):06d}-end").is_dir() or _ended(history, last, plan)):
        return "done"
    kind = history.events[-1].kind if history.events else ""
    return "failed" if kind == "error" else "stopped" if kind == "stop" else "broken off"


def _ended(history: History, stage: str, plan: dict[str, int]) -> bool:
    return plan[stage] > 0 and history.last_step(stage) >= plan[stage] and (not history.events or history.events[-1].kind != "error")


def _stages(run: RunDirectory) -> dict[str, int]:
    """The updates of each stage, in order; empty if the recipe cannot be read."""
    try:
        train = yaml.safe_load(run.recipe.read_text(encoding="utf-8"))["train"]
        return {stage: int(train[stage]["steps"]) for stage in train["stages"]}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return {}


def _last(history: History, name: str) -> float | None:
    return next((value for _, value in reversed(history.series(name, "rl")) if math.isfinite(value)), None)


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
