"""The state, progress, reward and accuracy of runs: from the files of run directories, or from memory for the running session.

`mtpctl runs` and `mtpctl status` read the files; `watch_runs` shows them as a table. `LiveStatus` stores the same state of the running
session in memory, for its status page.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mtpctl.errors import UserError
from mtpctl.telemetry.charts import page
from mtpctl.telemetry.metrics_file import ERROR_KINDS, Event, History, json_safe, load_history
from mtpctl.telemetry.names import describe, format_duration, format_value
from mtpctl.telemetry.panel import sparkline
from mtpctl.telemetry.run_directory import RunDirectory, last_requested_replicas

State = Literal["running", "done", "failed", "stopped", "broken off", "empty", "unreadable"]
"""`broken off`: the run ended without logging an end, for example because it was killed. `empty`: it has no metrics or events.
`unreadable`: its metrics, or the files of `mtpctl scale`, are damaged."""
DEPTH = 4
"""Depth of folders that are searched for runs."""


@dataclass(frozen=True)
class RunOverview:
    """The overview of one run.

    Attributes:
        stage, step: the newest stage and its last step.
        steps: total number of steps of the stage.
        reward, unfiltered_reward, accuracy: newest values in RL.
        unseen_accuracy: `accuracy` over prompts that are not in the training rows; None if no held-out prompt is in them.
        age_s: seconds since the newest metric.
        restarts: one line for each restart of a trainer or replica, newest last.
        replicas: rollout replicas at the newest weight sync; None before the first.
        requested_replicas: the last request of `mtpctl scale`; None if there was none.
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
    requested_replicas: int | None = None
    fault: str = ""
    unseen_accuracy: float | None = None


def find_runs(folder: Path) -> list[RunOverview]:
    """All runs below the folder, or the folder itself if it is a run; newest first. Includes unreadable runs."""
    return sorted((_overview_of(path) for path in _run_folders(folder, DEPTH)), key=lambda run: run.age_s)


def _overview_of(path: Path) -> RunOverview:
    try:
        return describe_run(path)
    except UserError as error:
        return RunOverview(path, "unreadable", "", 0, None, None, None, None, _age(RunDirectory(path)), fault=str(error))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if RunDirectory(folder).recipe.is_file():
        yield folder
    elif depth and folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                yield from _run_folders(path, depth - 1)


def describe_run(path: Path) -> RunOverview:
    """The overview of one run. Raises UserError if its metrics or the files of `mtpctl scale` are damaged."""
    run = RunDirectory(path)
    history = load_history(path)
    stage = history.rows[-1].phase if history.rows else ""
    step = history.last_step(stage) if stage else 0
    stage_steps = _stage_steps(run)
    return RunOverview(
        path,
        _state(run, history, stage_steps),
        stage,
        step,
        stage_steps.get(stage),
        _newest_value(history, "reward/mean"),
        _newest_value(history, "reward/unfiltered_mean"),
        _newest_value(history, "eval/accuracy"),
        _age(run),
        [event.message for event in history.events if event.kind == "restart"],
        None if (replicas := _newest_value(history, "rollout/replicas")) is None else int(replicas),
        last_requested_replicas(run),
        unseen_accuracy=_newest_value(history, "eval/unseen_accuracy"),
    )


def _age(run: RunDirectory) -> float:
    """Seconds since the newest metric was written, or the recipe if there are no metrics."""
    newest = run.metrics if run.metrics.exists() else run.recipe
    return max(0.0, time.time() - newest.stat().st_mtime)


def _state(run: RunDirectory, history: History, stage_steps: dict[str, int]) -> State:
    if run.is_locked:
        return "running"
    if not history.rows and not history.events:
        return "empty"
    # An SFT stage may end before its last step. Its last checkpoint is then named `-end`.
    last_stage = list(stage_steps)[-1] if stage_steps else ""
    end_folder = run.checkpoints / f"{last_stage}-{history.last_step(last_stage):06d}-end"
    if last_stage and (end_folder.is_dir() or _ended(history, last_stage, stage_steps)):
        return "done"
    kind = history.events[-1].kind if history.events else ""
    return "failed" if kind == "error" else "stopped" if kind == "stop" else "broken off"


def _ended(history: History, stage: str, stage_steps: dict[str, int]) -> bool:
    return (
        stage_steps[stage] > 0
        and history.last_step(stage) >= stage_steps[stage]
        and (not history.events or history.events[-1].kind != "error")
    )


def _stage_steps(run: RunDirectory) -> dict[str, int]:
    """The updates of each stage, in order; empty if the recipe cannot be read."""
    try:
        train = yaml.safe_load(run.recipe.read_text(encoding="utf-8"))["train"]
        return {stage: int(train[stage]["steps"]) for stage in train["stages"]}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return {}


def _newest_value(history: History, name: str) -> float | None:
    return next((value for _, value in reversed(history.series(name, "rl")) if math.isfinite(value)), None)


REFRESH_S = 2.0
CURVE_WIDTH = 24
"""Width of the curve of rewards, in characters."""
STYLES = {"running": "green", "failed": "red", "broken off": "red", "unreadable": "red", "stopped": "yellow"}


def watch_runs(folder: Path, console: Console) -> None:
    """Show the table until Ctrl-C, updated every `REFRESH_S` seconds."""
    with Live(runs_table(folder), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(runs_table(folder), refresh=True)


def runs_table(folder: Path) -> Table:
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
        Text(sparkline(rewards, CURVE_WIDTH), "cyan"),
        "–" if run.accuracy is None else format_value(run.accuracy, "share"),
        _newest_speed(history, "perf/tokens_per_s"),
        _newest_speed(history, "rollout/tokens_per_s"),
        format_duration(run.age_s),
        run.fault or (errors[-1] if errors else ""),
    ]


def _newest_speed(history: History, name: str) -> str:
    series = history.series(name)
    return format_value(series[-1][1], "tokens/s") if series else "–"


MAX_EVENTS = 30
"""Number of newest events to keep."""


def steady_clock() -> Callable[[], float]:
    """A function that returns seconds since 1970, unaffected by adjustments of the machine's clock."""
    start, start_monotonic = time.time(), time.monotonic()
    return lambda: start + (time.monotonic() - start_monotonic)


class LiveStatus:
    """The newest state of a run.

    Attributes:
        metrics: the newest value of each metric of the current stage.
        waiting: the reasons of waits, one line each.
        events: the newest events.
        errors: the newest events of `ERROR_KINDS`.
        restarts: one line for each restart of the trainer or of a replica.
    """

    def __init__(self, path: Path, stage_steps: Mapping[str, int], history: History) -> None:
        """`path`: the run directory. `stage_steps`: the updates of each stage. `history`: earlier sessions, without repeated steps."""
        self.path, self.stage_steps = path, stage_steps
        self.stage, self.step, self.metrics = "", 0, dict[str, float]()
        self.waiting: Sequence[str] = ()
        self.events = deque(history.events, MAX_EVENTS)
        self.restarts = [event.message for event in history.events if event.kind == "restart"]
        self.errors = deque((event for event in history.events if event.kind in ERROR_KINDS), MAX_EVENTS)
        self._accuracy: float | None = None
        self._unseen_accuracy: float | None = None
        self._now = steady_clock()
        self._newest_row_time = self._now()
        for row in history.rows:
            self.row(row.step, row.metrics, row.phase)
            self._newest_row_time = row.time

    def row(self, step: int, metrics: Mapping[str, float], stage: str) -> None:
        """Record the metrics of a step."""
        if stage != self.stage:
            self.stage, self.step, self.metrics = stage, step, {}
        self.step, self._newest_row_time = max(self.step, step), self._now()
        self.metrics.update(metrics)
        self._accuracy = metrics.get("eval/accuracy", self._accuracy)
        self._unseen_accuracy = metrics.get("eval/unseen_accuracy", self._unseen_accuracy)

    def event(self, kind: str, message: str) -> None:
        """Record an event at the current time."""
        event = Event(self._now(), kind, message)
        self.events.append(event)
        if kind == "restart":
            self.restarts.append(message)
        if kind in ERROR_KINDS:
            self.errors.append(event)

    def overview(self) -> RunOverview:
        """The run as `mtpctl runs` lists it."""
        return RunOverview(
            self.path,
            "running",
            self.stage,
            self.step,
            self.stage_steps.get(self.stage),
            self.metrics.get("reward/mean"),
            self.metrics.get("reward/unfiltered_mean"),
            self._accuracy,
            age_s=max(0.0, self._now() - self._newest_row_time),
            restarts=list(self.restarts),
            replicas=int(self.metrics["rollout/replicas"]) if "rollout/replicas" in self.metrics else None,
            requested_replicas=last_requested_replicas(RunDirectory(self.path)),
            unseen_accuracy=self._unseen_accuracy,
        )

    def as_json(self) -> dict[str, object]:
        """The complete state, JSON-serializable."""
        return {name: json_safe(value) for name, value in asdict(self.overview()).items()} | {
            "path": str(self.path),
            "waiting": list(self.waiting),
            "errors": [asdict(event) for event in list(self.errors)],
            "events": [asdict(event) for event in list(self.events)],
            "metrics": {name: json_safe(value) for name, value in list(self.metrics.items())},
        }


@dataclass(frozen=True)
class ReplicaCounts:
    """Rollout replicas: in service, requested, the bounds of `rollout.replicas` (equal if it is one number), and restarts after failures.

    The fields are keys of `/status.json`.
    """

    serving: int
    requested: int
    least: int
    most: int
    restarts: int

    def __str__(self) -> str:
        """`2 of 3 (1 to 4) serve, 0 restarted`."""
        bounds = "" if self.least == self.most else f" ({self.least} to {self.most})"
        return f"{self.serving} of {self.requested}{bounds} serve, {self.restarts} restarted"


def render_status(live: LiveStatus, replicas: ReplicaCounts | None) -> str:
    """The status page as HTML without scripts. `replicas` is None before the engines start."""
    overview = live.overview()
    total = "" if overview.steps is None else f" of {overview.steps}"
    facts = [
        ("state", "; ".join(live.waiting) or overview.state),
        ("stage", overview.stage or "–"),
        ("step", f"{overview.step}{total}" if overview.stage else "–"),
        ("reward", "–" if overview.reward is None else format_value(overview.reward, "number")),
        ("reward, unfiltered", "–" if overview.unfiltered_reward is None else format_value(overview.unfiltered_reward, "number")),
        ("held-out accuracy", "–" if overview.accuracy is None else format_value(overview.accuracy, "share")),
        *([] if overview.unseen_accuracy is None else [("unseen prompts", format_value(overview.unseen_accuracy, "share"))]),
        ("newest row", f"{format_duration(overview.age_s)} ago"),
        ("rollout replicas", "–" if replicas is None else str(replicas)),
        ("last restart", overview.restarts[-1] if overview.restarts else "none"),
    ]
    metrics = ((name, format_value(value, describe(name).unit), describe(name).meaning) for name, value in sorted(live.metrics.items()))
    errors = list(live.errors)
    parts = [
        _html_table((), facts),
        _html_events("Newest errors", errors) if errors else "",
        _html_events("Newest events", list(live.events)),
        f"<h2>Metrics</h2>{_html_table(('metric', 'newest', ''), metrics)}" if live.metrics else "",
    ]
    return page(live.path.name, str(live.path), "".join(parts), "/status.json · /metrics for Prometheus")


def _html_events(title: str, events: Sequence[Event]) -> str:
    rows = ((time.strftime("%m-%d %H:%M:%S", time.localtime(event.time)), event.kind, event.message) for event in reversed(events))
    return f"<h2>{title}</h2>{_html_table(('time', 'kind', ''), rows)}"


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    header = f"<thead><tr>{cells}</tr></thead>" if head else ""
    return f'<table class="left">{header}<tbody>{body}</tbody></table>'
