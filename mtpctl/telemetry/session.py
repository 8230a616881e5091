"""Logging of one session of a run: steps, events, and a summary at the end."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console

from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.recipe.schema import TelemetryConfig
from mtpctl.telemetry.metrics_file import DAMAGED_SUFFIX, History, MetricsFile, Row, load_history, open_retrying
from mtpctl.telemetry.panel import Display, LivePanel, PlainLines
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import LiveStatus, steady_clock
from mtpctl.telemetry.sample_log import LogTable, SampleLog, SampleRow
from mtpctl.telemetry.summary import before_and_after, evaluation_summary, summary_table
from mtpctl.telemetry.trackers import MlflowSink, Sink, TensorBoardSink, UpdateCounter, WandbSink, check_packages

MAX_LOG_BYTES = 16 << 20


def open_log(path: Path) -> TextIO:
    """Open a log for appending. A log larger than `MAX_LOG_BYTES` is first renamed to `NAME.1.log`."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_suffix(".1.log"))
    return open_retrying(path)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes: after `step` of `stage`, with the stages that have ended. For a new run, `stage` is empty."""

    stage: str = ""
    step: int = 0
    ended: Sequence[str] = ()

    def rows_before(self, history: History) -> list[Row]:
        """The rows up to the checkpoint. Later steps will be repeated."""
        phases = {*self.ended, self.stage}
        return [row for row in history.rows if row.phase in phases and (row.phase != self.stage or row.step <= self.step)]


def print_summary(console: Console, history: History) -> None:
    """Print the metrics before and after RL, and a sentence about evaluations; nothing if no headline metric was logged twice."""
    if rows := before_and_after(history):
        console.print()
        console.print(summary_table(rows))
    if sentence := evaluation_summary(history):
        console.print()
        console.print(sentence, highlight=False)


def print_completed_run(run_dir: RunDirectory, line: str) -> None:
    """Print `line` and the summary of a run that has already ended."""
    console = Console()
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    print_summary(console, load_history(run_dir.path))


class Telemetry:
    """Writes metrics and events to `metrics.jsonl`, `logs/run.log`, the other sinks and the screen. Thread-safe.

    Steps are counted within their phase. A step may be logged in parts, such as an evaluation after the update: `load_history` merges
    them. `live` is the state for the status page.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        config: TelemetryConfig,
        plain: bool = False,
        *,
        stage_steps: Mapping[str, int] | None = None,
        early_stopping_stages: Collection[str] = (),
        resumed: ResumePoint = ResumePoint(),
        console: Console | None = None,
    ) -> None:
        """`stage_steps`: the number of steps of each stage, in order. `early_stopping_stages`: stages that may end before their last step.

        `plain`: print lines instead of the panel, even on a terminal.
        """
        self._console = Console() if console is None else console
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._closed = False
        self._now = steady_clock()
        name = run_dir.path.name
        self._file = MetricsFile(run_dir.metrics)
        self._sinks: list[Sink] = []
        tables: list[LogTable] = []
        settings: dict[str, object] = run_dir.read_recipe() or {}
        history = load_history(run_dir.path)
        self.live = LiveStatus(run_dir.path, stage_steps or {}, History(resumed.rows_before(history), history.events))
        check_packages(config)
        if config.tensorboard:
            self._sinks.append(TensorBoardSink(run_dir.tensorboard, settings))
        if config.wandb is not None:
            wandb = WandbSink(config, name, run_dir.path, settings, UpdateCounter(list(stage_steps or {}), history))
            self._sinks.append(wandb)
            tables.append(wandb.samples)
        if config.mlflow is not None:
            self._sinks.append(MlflowSink(config, name, run_dir.path, settings, UpdateCounter(list(stage_steps or {}), history)))
        self._samples = SampleLog(run_dir.samples, self._file.session, tables)
        self._display: Display
        if plain or not self._console.is_terminal:
            self._display = PlainLines(self._console, stage_steps or {}, early_stopping_stages=early_stopping_stages)
        else:
            panel = LivePanel(self._console, name, stage_steps or {}, early_stopping_stages=early_stopping_stages)
            phase = next((phase for phase in stage_steps or {} if phase not in resumed.ended), resumed.stage)
            panel.resume(resumed.rows_before(history), phase)
            self._display = panel

        run_dir.logs.mkdir(exist_ok=True)
        self._log_file = open_log(run_dir.logs / "run.log")
        self._log = PlainLines(
            Console(file=self._log_file, no_color=True), stage_steps or {}, early_stopping_stages=early_stopping_stages, timestamped=True
        )

    def log(self, step: int, metrics: Mapping[str, float], phase: str) -> None:
        """Log metrics of a step. Raises RuntimeFailure if the disk has been full for `DISK_FULL_TIMEOUT_S`."""
        values = {name: float(value) for name, value in metrics.items()}
        with self._lock:
            self._file.append({"time": self._now(), "phase": phase, "step": step, **values})
            for sink in self._sinks:
                sink.write(step, values, phase)
            with self._log_errors():
                self._log.row(step, values, phase)
            self._display.row(step, values, phase)
            self.live.row(step, values, phase)

    def event(self, kind: str, message: str) -> None:
        """Log an event, of a kind such as `resume` or `alarm`."""
        with self._lock:
            self._file.append({"time": self._now(), "event": kind, "message": message})
            with self._log_errors():
                self._log.event(kind, message)
            self._display.event(kind, message)
            self.live.event(kind, message)

    def waiting(self, reasons: Sequence[str]) -> None:
        """Show the reasons of waits, one line each. They are not recorded."""
        with self._lock:
            self._display.waiting(reasons)
            self.live.waiting = list(reasons)

    @contextlib.contextmanager
    def _log_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeFailure(
                f"cannot write {self._log_file.name}: {error.strerror}; free space and start the same command again"
            ) from error

    def record_failure(self, error: Exception) -> None:
        """Record the error that ends the run as an event, with its traceback in `logs/run.log`. The command prints it."""
        message = str(error) if isinstance(error, MtpctlError) else f"{type(error).__name__}: {error}"
        # If the disk is full, report that error rather than the failure to log it.
        with self._lock, contextlib.suppress(OSError, RuntimeFailure):
            self._log.event("error", message)
            self._log_file.write("".join(traceback.format_exception(error)))
            self._log_file.flush()
            self._file.append({"time": self._now(), "event": "error", "message": message})

    def samples(self, rows: list[SampleRow]) -> None:
        """Log samples of one step asynchronously, in `samples/` and as a table in W&B."""
        if rows:
            self._samples.write(rows)

    def print_summary(self) -> None:
        """Close the panel, and print the summary."""
        with self._lock:
            self._display.close()
            print_summary(self._console, load_history(self._run_dir.path))

    def close(self, *, failed: bool = False) -> None:
        """Close the panel and all sinks. `failed`: the run ends with an error. A second call does nothing."""
        # After a failure, a full disk must not replace the run's own error.
        failure_guard = contextlib.suppress(RuntimeFailure) if failed else contextlib.nullcontext()
        if not self._closed:
            self._samples.close()
            if self._samples.dropped:
                with failure_guard:
                    self.event("samples", self._samples.warning)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._display.close()
            for sink in self._sinks:
                try:
                    sink.close(failed=failed)
                except Exception as error:
                    # Tracker errors do not abort the run; `metrics.jsonl` is the complete record.
                    name, message = type(sink).__name__.removesuffix("Sink"), str(error).partition("\n")[0]
                    sink.failure = f"{name} may lack the last rows and the end of the run: {type(error).__name__}: {message}"
                if sink.failure:
                    with failure_guard:
                        self._file.append({"time": self._now(), "event": "tracker", "message": sink.failure})
                    self._console.print(f"tracker: {sink.failure}", markup=False, highlight=False, soft_wrap=True)
            self._file.close()
            self._log_file.close()

    @property
    def damage_warning(self) -> str:
        """A warning about damaged lines in `metrics.jsonl` at the start of this session; empty if there were none."""
        if not (numbers := self._file.damaged):
            return ""
        number_list = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
        target = f"{self._file.path.name}{DAMAGED_SUFFIX}"
        return f"{self._file.path}: {len(numbers)} line(s) are damaged ({number_list}); they were moved to {target}"

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.record_failure(error)
        self.close(failed=isinstance(error, Exception))
