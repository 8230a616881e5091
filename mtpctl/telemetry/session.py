"""Logging of one start of a run: steps, events, and a summary at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console

from mtpctl.recipe.telemetry import TelemetryConfig
from mtpctl.telemetry.history import load_history
from mtpctl.telemetry.metrics_file import MetricsFile
from mtpctl.telemetry.panel import Display, LivePanel, PlainLines
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.sinks import Sink, TensorBoardSink, WandbSink, check_packages
from mtpctl.telemetry.summary import before_and_after, in_between, summary_table


class Telemetry:
    """Writes metrics and events to `metrics.jsonl`, to the other sinks and to the screen. Safe to call from several threads.

    Steps are counted within their phase. A step may be logged in parts, such as an evaluation after the update: `load_history` merges
    them.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        config: TelemetryConfig,
        plain: bool = False,
        *,
        totals: Mapping[str, int] | None = None,
        title: str | None = None,
        console: Console | None = None,
    ) -> None:
        """`totals`: the number of steps of each phase, in order. `plain`: lines instead of the panel, also on a terminal."""
        self._console = Console() if console is None else console
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._closed = False
        name = run_dir.path.name if title is None else title
        self._file = MetricsFile(run_dir.metrics)
        self._sinks: list[Sink] = []
        if config.tensorboard:
            self._sinks.append(TensorBoardSink(run_dir.tensorboard))
        if config.wandb is not None:
            check_packages(config)
            self._sinks.append(WandbSink(config.wandb, name, run_dir.path))
        self._display: Display
        if plain or not self._console.is_terminal:
            self._display = PlainLines(self._console, totals or {})
        else:
            self._display = LivePanel(self._console, name, totals or {})

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        """Log metrics of a step, whose values `float` converts. Raises RuntimeFailure where the disk is full."""
        values = {name: float(value) for name, value in metrics.items()}
        with self._lock:
            self._file.append({"time": time.time(), "phase": phase, "step": step, **values})
            for sink in self._sinks:
                sink.write(step, values, phase)
            self._display.row(step, values, phase)

    def event(self, kind: str, message: str) -> None:
        """Log an event beside the steps, of a kind such as `resume` or `alarm`."""
        with self._lock:
            self._file.append({"time": time.time(), "event": kind, "message": message})
            self._display.event(kind, message)

    def print_summary(self) -> None:
        """Print the metrics before and after RL, and held-out accuracy in between; nothing for fewer than two steps. Ends the panel."""
        with self._lock:
            self._display.close()
            history = load_history(self._run_dir.path)
            rows, told = before_and_after(history), in_between(history)
            if rows:
                self._console.print()
                self._console.print(summary_table(rows))
            if told:
                self._console.print()
                self._console.print(told, highlight=False)

    def close(self) -> None:
        """End the panel and close all sinks. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._display.close()
            for sink in self._sinks:
                sink.close()
            self._file.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
