"""One start of a run, as the trainer talks to it: log a step, name an event, close."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console

from mtpctl.recipe.telemetry import TelemetryConfig
from mtpctl.telemetry.history import load_history
from mtpctl.telemetry.metrics_file import MetricsFile
from mtpctl.telemetry.panel import Face, LivePanel, PlainLines
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.sinks import Sink, TensorBoardSink, WandbSink
from mtpctl.telemetry.summary import before_and_after, in_between, summary_table


class Telemetry:
    """Metrics to every sink and to the screen. Safe to call from several threads.

    Steps count within their phase. A step may be logged in parts (training first, a held-out evaluation after it): the
    parts are merged by whoever reads.
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
        """`totals` are the steps of each phase, in order; `plain` asks for lines where the terminal could show a panel."""
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
            self._sinks.append(WandbSink(config.wandb, name, run_dir.path))
        self._face: Face
        if plain or not self._console.is_terminal:
            self._face = PlainLines(self._console, totals or {})
        else:
            self._face = LivePanel(self._console, name, totals or {})

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        """Metrics of a step. Values may be anything that `float` takes. Raises RuntimeFailure where the disk is full."""
        values = {name: float(value) for name, value in metrics.items()}
        with self._lock:
            self._file.append({"time": time.time(), "phase": phase, "step": step, **values})
            for sink in self._sinks:
                sink.write(step, values, phase)
            self._face.row(step, values, phase)

    def event(self, kind: str, message: str) -> None:
        """Something that happened beside the steps, such as `checkpoint` or `restart`."""
        with self._lock:
            self._file.append({"time": time.time(), "event": kind, "message": message})
            self._face.event(kind, message)

    def print_summary(self) -> None:
        """Before, after and what lay between; nothing where the run holds no RL phase of two steps. Ends the live panel."""
        with self._lock:
            self._face.close()
            history = load_history(self._run_dir.path)
            rows, told = before_and_after(history), in_between(history)
            if rows:
                self._console.print()
                self._console.print(summary_table(rows))
            if told:
                self._console.print()
                self._console.print(told, highlight=False)

    def close(self) -> None:
        """End the panel, flush every sink. Calling again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._face.close()
            for sink in self._sinks:
                sink.close()
            self._file.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
