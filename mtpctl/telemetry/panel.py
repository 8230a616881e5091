"""The output of the command during a run: a live panel on a terminal, otherwise one line per step.

Both receive the same rows. The panel is redrawn four times per second, to update times and the reasons for waiting.
"""

from __future__ import annotations

import sys
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mtpctl.telemetry.metrics_file import Row
from mtpctl.telemetry.names import compact, describe, format_duration, format_value

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 512
_RATE_WINDOW = 20
_REDRAW_S = 0.25
_WAIT_REPORT_S = 15.0
"""Seconds between lines about waits, without a panel."""
_ERASE_SCREEN = "\x1b[H\x1b[J"
"""Moves to the top of the terminal and erases everything below. Clearing the screen would add it to the scroll-back."""

PLAIN_METRICS = {
    "sft/loss": "loss",
    "mtp/loss_1": "mtp",
    "eval/accuracy": "held-out",
    "eval/unseen_accuracy": "unseen",
    "reward/mean": "reward",
    "reward/unfiltered_mean": "unfiltered",
    "rollout/spec_accept_rate": "accept",
    "response/length_mean": "length",
    "actor/entropy": "entropy",
    "async/staleness_mean": "stale",
    "perf/tokens_per_s": "trainer",
    "rollout/tokens_per_s": "rollout",
}


DRAFT_CURVES = {
    "mtp/loss_1": "mtp",
    **{f"mtp/expected_rate_greedy_{position}": f"greedy {position}" for position in range(1, 4)},
    **{f"mtp/expected_rate_{position}": f"sampled {position}" for position in range(1, 4)},
}
"""Metrics of the stage draft and their short names: MTP loss, and expected acceptance of each draft token, greedy or sampled."""


class Display(Protocol):
    """Shows the metrics of steps, and events, as they are logged."""

    def row(self, step: int, metrics: Mapping[str, float], phase: str) -> None: ...

    def event(self, kind: str, message: str) -> None: ...

    def waiting(self, reasons: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class Pace:
    """Estimates the remaining time of a phase from its latest steps.

    `early_stopping_stages`: phases that may end before their last step.
    """

    def __init__(self, stage_steps: Mapping[str, int], clock: Callable[[], float], early_stopping_stages: Collection[str] = ()) -> None:
        self._stage_steps, self._clock, self._early_stopping_stages = stage_steps, clock, early_stopping_stages
        self._marks: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def mark(self, step: int, phase: str) -> None:
        marks = self._marks[phase]
        if not marks or step > marks[-1][0]:
            marks.append((step, self._clock()))
            del marks[:-_RATE_WINDOW]

    def remaining_s(self, phase: str) -> float | None:
        """Remaining seconds; None before the second step, and if the number of steps is unknown."""
        marks = self._marks[phase]
        if len(marks) < 2 or phase not in self._stage_steps:
            return None
        (first, start), (last, end) = marks[0], marks[-1]
        per_step = (end - start) / (last - first)
        return max(0.0, (self._stage_steps[phase] - last) * per_step - (self._clock() - end))

    def text(self, phase: str, prefix: str = "") -> str:
        """`prefix` and the remaining time, such as `4 min 00 s`; `at most …` for a stage that may end early; empty if unknown."""
        if (seconds := self.remaining_s(phase)) is None:
            return ""
        return ("at most " if phase in self._early_stopping_stages else prefix) + format_duration(seconds)


class PlainLines:
    """One line per row: `rl 12/100  reward 0.531  accept 78.2%  …  left 1 min 10 s`."""

    def __init__(
        self,
        console: Console,
        stage_steps: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
        *,
        early_stopping_stages: Collection[str] = (),
        timestamped: bool = False,
    ) -> None:
        """`early_stopping_stages`: phases that may end before their last step. `timestamped`: lines begin with the time."""
        self._console, self._stage_steps, self._timestamped = console, stage_steps, timestamped
        self._pace, self._clock = Pace(stage_steps, clock, early_stopping_stages), clock
        self._last_report = clock()

    def row(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        self._pace.mark(step, phase)
        total = f"/{self._stage_steps[phase]}" if phase in self._stage_steps else ""
        parts = [f"{phase} {step}{total}"]
        labels = PLAIN_METRICS
        if phase == "draft":
            labels = DRAFT_CURVES | {"perf/tokens_per_s": "trainer"}
        parts += [f"{short} {format_value(metrics[name], describe(name).unit)}" for name, short in labels.items() if name in metrics]
        if remaining := self._pace.text(phase):
            parts.append(f"left {remaining}")
        self._print("  ".join(parts))

    def event(self, kind: str, message: str) -> None:
        self._print(f"{kind}: {message}")

    def waiting(self, reasons: Sequence[str]) -> None:
        """Print the reasons of waits, at intervals."""
        if not reasons:
            self._last_report = self._clock()
        elif self._clock() - self._last_report >= _WAIT_REPORT_S:
            self._last_report = self._clock()
            self._print(f"waiting: {'; '.join(reasons)}")

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}" if self._timestamped else line
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LivePanel:
    """The live panel. Rows come from the logging thread; a separate thread draws.

    When the terminal is resized, its lines are rewrapped to an unknown number of lines, so the panel is redrawn from the top.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        stage_steps: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
        *,
        early_stopping_stages: Collection[str] = (),
        draw: bool = True,
    ) -> None:
        self._title, self._stage_steps, self._clock = title, stage_steps, clock
        self._pace = Pace(stage_steps, clock, early_stopping_stages)
        self._start = clock()
        self._steps: dict[str, int] = {phase: 0 for phase in stage_steps}
        self._phase = next(iter(stage_steps), "")
        self._values: dict[str, list[float]] = defaultdict(list)
        self._event: tuple[str, str] | None = None
        self._waiting: tuple[str, ...] = ()
        self._console = console
        self._closing = threading.Event()
        self._drawing: threading.Thread | None = None
        self._restore_echo: Callable[[], None] = lambda: None
        if draw:
            self._live, self._size = self._begin(), console.size
            self._restore_echo = disable_echo()
            self._drawing = threading.Thread(target=self._draw, name="panel", daemon=True)
            self._drawing.start()

    def _begin(self) -> Live:
        live = Live(console=self._console, get_renderable=self.render, auto_refresh=False)
        live.start(refresh=True)
        return live

    def _draw(self) -> None:
        while not self._closing.wait(_REDRAW_S):
            if self._console.size != self._size:
                self._size = self._console.size
                self._live.stop()
                self._console.file.write(_ERASE_SCREEN)
                self._live = self._begin()
            self._live.refresh()

    def resume(self, rows: Iterable[Row], phase: str) -> None:
        """Record the rows of earlier sessions, and show the resumed phase."""
        for row in rows:
            self._record(row.step, row.metrics, row.phase)
        self._phase = phase

    def row(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        self._pace.mark(step, phase)
        self._phase = phase
        self._record(step, metrics, phase)

    def _record(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        self._steps[phase] = max(step, self._steps.get(phase, 0))
        for name, value in metrics.items():
            self._values[name].append(value)
            del self._values[name][:-_HISTORY]

    def event(self, kind: str, message: str) -> None:
        self._event = (kind, message)

    def waiting(self, reasons: Sequence[str]) -> None:
        """Show the reasons of waits."""
        self._waiting = tuple(reasons)

    def close(self) -> None:
        if self._drawing is not None and not self._closing.is_set():
            self._closing.set()
            self._drawing.join()
            self._live.stop()
            self._restore_echo()

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress(), Text(""), self._curves(), Text(""), self._facts()]
        if self._waiting or self._event:
            parts.append(Text(""))
        for reason in self._waiting:
            parts += [Text.assemble(("waiting  ", "yellow"), (reason, "dim"), no_wrap=True, overflow="ellipsis")]
        if self._event is not None:
            kind, message = self._event
            # Folded instead of truncated, because the message often ends with a path.
            parts += [Text.assemble((f"{kind}  ", "yellow"), (message, "dim"), overflow="fold")]
        elapsed = format_duration(self._clock() - self._start)
        remaining = self._pace.text(self._phase, "about ")
        subtitle = elapsed + (f" · {remaining} left of {self._phase.upper()}" if remaining else "")
        return Panel(
            Group(*parts),
            title=Text(self._title, "bold"),
            subtitle=subtitle,
            title_align="left",
            subtitle_align="right",
            border_style="blue",
        )

    def _progress(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None):
            grid.add_column(ratio=ratio, no_wrap=True)
        earlier_phases = list(self._steps)[: list(self._steps).index(self._phase)] if self._phase in self._steps else []
        for phase, step in list(self._steps.items()):
            # A stage may end before its last step, so earlier phases are complete.
            total = step if phase in earlier_phases and step else self._stage_steps.get(phase, 0)
            style = "bold" if phase == self._phase else "dim"
            bar = ProgressBar(total=max(total, 1), completed=min(step, total), complete_style="blue", finished_style="green")
            grid.add_row(Text(phase.upper(), style), bar, Text(f"{step}/{total}" if total else str(step), style))
        return grid

    def _curves(self) -> RenderableType:
        unseen = ["eval/unseen_accuracy"] if "eval/unseen_accuracy" in self._values else []
        curves = {"sft": ["sft/loss", "mtp/loss_1", "mtp/accept_1"], "draft": list(DRAFT_CURVES)}.get(
            self._phase, [self._reward(), "rollout/spec_accept_rate", "eval/accuracy", *unseen]
        )
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="crop")
        labels = {"rollout/spec_accept_rate": "acceptance", "mtp/loss_1": "MTP loss", "mtp/accept_1": "MTP greedy"}
        for name in curves:
            values = self._values.get(name, [])
            if self._phase == "draft" and not values:
                continue  # the head has fewer draft tokens than `DRAFT_CURVES`
            metric = describe(name)
            value = Text(format_value(values[-1], metric.unit), "bold") if values else Text("–", "dim")
            grid.add_row(labels.get(name, metric.label), value, Text(sparkline(values, 40), "cyan"))
        return grid

    def _reward(self) -> str:
        """The reward to show: the unfiltered one if it is logged, because dynamic sampling keeps the batch's reward near one half."""
        return "reward/unfiltered_mean" if "reward/unfiltered_mean" in self._values else "reward/mean"

    def _facts(self) -> RenderableType:
        def last(name: str) -> str:
            values = self._values.get(name)
            return format_value(values[-1], describe(name).unit) if values else "–"

        grid = Table.grid(padding=(0, 2))
        for style in ("dim", "", "dim", "", "dim", ""):
            grid.add_column(style=style, no_wrap=True)
        staleness = self._values.get("async/staleness_mean")
        max_staleness = self._values.get("async/staleness_max")
        staleness_text = f"{compact(staleness[-1])}, max {compact(max_staleness[-1])}" if staleness and max_staleness else "–"
        grid.add_row("trainer", last("perf/tokens_per_s"), "idle", last("async/trainer_idle"), "staleness", staleness_text)
        grid.add_row("rollout", last("rollout/tokens_per_s"), "idle", last("async/rollout_idle"), "mismatch", last("rollout_corr/abs_diff"))
        return grid


def disable_echo() -> Callable[[], None]:
    """Disable the terminal's echo, because the `^C` of Ctrl-C would shift the panel. Returns a function that restores it."""
    try:
        terminal = sys.stdin.fileno()
        settings = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # stdin is no terminal
        return lambda: None
    without_echo = settings.copy()
    without_echo[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, without_echo)
    return lambda: termios.tcsetattr(terminal, termios.TCSANOW, settings)


def sparkline(values: list[float], width: int) -> str:
    """The values as at most `width` block characters, flat if all are equal. Longer series are averaged."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if low <= value <= high else " " for value in values)
