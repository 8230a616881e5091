"""Destinations of metrics in addition to `metrics.jsonl`: TensorBoard, Weights & Biases and MLflow.

W&B and MLflow need one increasing step, but each phase of a run counts its own steps. So their step is the number of updates over all
phases, as in the report.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from mtpctl.errors import PrerequisiteMissing
from mtpctl.recipe.loading import flatten
from mtpctl.recipe.schema import TelemetryConfig
from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.run_directory import START_OVER_FILE
from mtpctl.telemetry.sample_log import SampleRow, response_text

PACKAGES = ("wandb", "mlflow")
"""Keys of the section `telemetry` that need a package of the same name."""


def check_packages(telemetry: TelemetryConfig) -> None:
    """Raise PrerequisiteMissing if the package of a destination is not installed."""
    for key in PACKAGES:
        if getattr(telemetry, key) and find_spec(key) is None:
            raise PrerequisiteMissing(f"telemetry.{key}: the package {key} is not installed; install it, or remove the key")


class Sink(Protocol):
    """A destination of metrics. `failure`: why it lacks rows; empty if it has all of them."""

    failure: str

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """Write the remaining rows. `failed`: the run ends with an error."""


class TensorBoardSink:
    """TensorBoard: metrics in `tensorboard/<phase>`, because each phase counts its own steps; the resolved recipe as hyperparameters.

    Rows that cannot be written to the disk are lost and reported in `failure`; later rows go to another file.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, object]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder, self.failure = folder, ""
        self._event_class, self._summary_class, self._writer_class = Event, Summary, EventFileWriter
        self._writers: dict[str, EventFileWriter] = {}
        self._put_hyperparameters(recipe)

    def _put_hyperparameters(self, recipe: Mapping[str, object]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        values = {".".join(key): value for key, value in flatten(recipe).items() if value is not None}
        scalars = {key: value if isinstance(value, bool | int | float | str) else json.dumps(value) for key, value in values.items()}
        # Only the hyperparameters of the latest session are shown.
        for file in self._folder.glob("events.*"):
            file.unlink()
        writer = self._writer_class(str(self._folder))
        writer.add_event(self._event_class(wall_time=time.time(), summary=hparams_pb(scalars, trial_id=self._folder.parent.name)))
        writer.close()

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None:
        values = [self._summary_class.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        try:
            if phase not in self._writers:
                self._writers[phase] = self._writer_class(str(self._folder / phase))
            self._writers[phase].add_event(self._event_class(wall_time=time.time(), step=step, summary=self._summary_class(value=values)))
        except OSError as error:  # The writer's thread stops at its first error, so `error` may be about an earlier row.
            self._record_lost_rows(error)
            self._writers.pop(phase, None)

    def close(self, *, failed: bool = False) -> None:
        for writer in self._writers.values():
            try:
                writer.close()
            except OSError as error:
                self._record_lost_rows(error)

    def _record_lost_rows(self, error: OSError) -> None:
        self.failure = f"tensorboard/ lacks rows of metrics.jsonl: {error.strerror}"


SAMPLE_COLUMNS = ("step", "set", "prompt", "answer", "response", "reward", "tokens", "ended", "versions", "drafted", "accepted", "note")
_MAX_PARAMS_PER_CALL, _MAX_VALUE_CHARACTERS = 100, 500
"""Numbers of parameters per call and characters per value that every release of MLflow accepts."""


def tracker_id(folder: Path) -> str:
    """The tracker's id of the run in a directory. It is stable over resumes, and changes if the run is started over."""
    start_over_file = folder / START_OVER_FILE
    name = str(folder.resolve()) + (start_over_file.read_text() if start_over_file.is_file() else "")
    return hashlib.sha256(name.encode()).hexdigest()[:16]


class UpdateCounter:
    """Counts updates over the phases of a run, in order, starting from its earlier sessions."""

    def __init__(self, phases: Sequence[str], history: History) -> None:
        self._phases = list(phases)
        self._last = {phase: history.last_step(phase) for phase in history.phases}

    def total(self, step: int, phase: str) -> int:
        """The total number of updates at a step of a phase."""
        if phase not in self._phases:
            self._phases.append(phase)
        self._last[phase] = max(step, self._last.get(phase, 0))
        return step + sum(self._last.get(earlier, 0) for earlier in self._phases[: self._phases.index(phase)])


def _cells(row: SampleRow, columns: list[str]) -> list[object]:
    parts = {f"reward/{name}": value for name, value in row["reward_parts"].items()}
    cells: dict[str, object] = {
        "step": row["step"],
        "set": row["set"],
        "prompt": row["prompt"],
        "answer": row["answer"],
        "response": response_text(row),
        "reward": row["reward"],
        "tokens": row["tokens"],
        "ended": row["finish_reason"],
        "versions": ", ".join(str(version) for version in dict.fromkeys(span[2] for span in row["versions"])),
        "drafted": row["drafts"]["drafted"],
        "accepted": row["drafts"]["accepted"],
        "note": row["note"],
    }
    return [(cells | parts).get(name) for name in columns]


class WandbSink:
    """Weights & Biases: metrics over updates, the resolved recipe as the run's config, samples as tables."""

    failure = ""

    def __init__(self, config: TelemetryConfig, name: str, folder: Path, recipe: Mapping[str, object], updates: UpdateCounter) -> None:
        """Raises PrerequisiteMissing if W&B rejects the run, for example without a login or a network."""
        import wandb

        self._updates = updates
        try:
            self._run = wandb.init(
                project=config.wandb,
                name=name,
                dir=str(folder),
                config=dict(recipe),
                group=config.group,
                tags=config.tags,
                resume="allow",
                id=tracker_id(folder),
            )
        except wandb.Error as error:
            reason = str(error).partition("\n")[0]
            fix = "log in (wandb login), set WANDB_MODE=offline, or remove the key"
            raise PrerequisiteMissing(f"telemetry.wandb: W&B rejects the run ({reason}); {fix}") from error
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        self._run.define_metric("eval/*", step_metric="update", summary="max,last")

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None:
        self._run.log({**metrics, f"{phase}/step": step, "update": self._updates.total(step, phase)})

    def samples(self, rows: list[SampleRow]) -> None:
        """One table per kind of samples of one step: `samples/update`, `samples/eval`, `samples/dropped`."""
        from wandb import Table

        columns = [*SAMPLE_COLUMNS, *dict.fromkeys(f"reward/{name}" for row in rows for name in row["reward_parts"])]
        for kind in dict.fromkeys(row["kind"] for row in rows):
            kind_rows = [row for row in rows if row["kind"] == kind]
            table = Table(columns=columns, data=[_cells(row, columns) for row in kind_rows])
            step = kind_rows[0]["step"]
            self._run.log({f"samples/{kind}": table, "rl/step": step, "update": self._updates.total(step, "rl")})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowSink:
    """MLflow: metrics over updates, every key of the resolved recipe as a parameter.

    A thread sends the rows, because a tracking server may be slow. After an error nothing more is sent, and `failure` is the reason.
    """

    def __init__(self, config: TelemetryConfig, name: str, folder: Path, recipe: Mapping[str, object], updates: UpdateCounter) -> None:
        """Raises PrerequisiteMissing if the tracking server does not respond, or rejects the run."""
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        assert config.mlflow is not None
        self.failure, self._updates = "", updates
        tags = {
            "mtpctl.run": tracker_id(folder),
            **({"mtpctl.group": config.group} if config.group else {}),
            **dict.fromkeys(config.tags, ""),
        }
        try:
            self._client = MlflowClient()
            experiment_info = self._client.get_experiment_by_name(config.mlflow)
            experiment = self._client.create_experiment(config.mlflow) if experiment_info is None else experiment_info.experiment_id
            earlier_runs = self._client.search_runs([experiment], f"tags.`mtpctl.run` = '{tracker_id(folder)}'", max_results=1)
            run = earlier_runs[0] if earlier_runs else self._client.create_run(experiment, run_name=name, tags=tags)
            self._id = run.info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._put_params(recipe, run.data.params)
        except MlflowException as error:
            reason = str(error).partition("\n")[0]
            raise PrerequisiteMissing(
                f"telemetry.mlflow: MLflow rejects the run ({reason}); set MLFLOW_TRACKING_URI to a working server, or remove the key"
            ) from error
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self._thread.start()

    def _put_params(self, recipe: Mapping[str, object], logged_params: Mapping[str, str]) -> None:
        """Log the recipe's values. MLflow parameters cannot change: one that a resumed run changes becomes a tag, `changed.KEY`."""
        from mlflow.entities import Param

        values = {".".join(key): json.dumps(value, ensure_ascii=False)[:_MAX_VALUE_CHARACTERS] for key, value in flatten(recipe).items()}
        new_params = [Param(key, value) for key, value in values.items() if key not in logged_params]
        for begin in range(0, len(new_params), _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=new_params[begin : begin + _MAX_PARAMS_PER_CALL])
        for key, value in values.items():
            if logged_params.get(key, value) != value:
                self._client.set_tag(self._id, f"changed.{key}", value)

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None:
        # MLflow names must not contain @.
        values = {name.replace("@", "_at_"): value for name, value in {**metrics, f"{phase}/step": float(step)}.items()}
        self._queue.put((self._updates.total(step, phase), values))

    def _send_all(self) -> None:
        from mlflow.entities import Metric

        while (row := self._queue.get()) is not None:
            if self.failure:
                continue
            update, values = row
            now = int(1000 * time.time())
            try:
                self._client.log_batch(self._id, metrics=[Metric(name, value, now, update) for name, value in values.items()])
            except Exception as error:
                # Tracker errors do not abort the run; `metrics.jsonl` is the complete record.
                self.failure = (
                    f"MLflow receives no rows from update {update} on: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                )

    def close(self, *, failed: bool = False) -> None:
        self._queue.put(None)
        self._thread.join()
        if not self.failure:
            self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")
