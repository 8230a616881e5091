"""Destinations of metrics besides `metrics.jsonl`: what they have in common, and TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from mtpctl.errors import EnvironmentMissing
from mtpctl.recipe.loading import flatten
from mtpctl.recipe.telemetry import TelemetryConfig

PACKAGES = ("wandb", "mlflow")
"""Keys of the section `telemetry` that need a package of their own, which has the key's name."""


def check_packages(telemetry: TelemetryConfig) -> None:
    """Raise EnvironmentMissing where the section names a destination whose package is not installed."""
    for key in PACKAGES:
        if getattr(telemetry, key) and find_spec(key) is None:
            raise EnvironmentMissing(f"telemetry.{key}: the package {key} is not installed; install it, or remove the key")


class Sink(Protocol):
    """A destination of metrics. `failure`: why it takes no more, empty while it does."""

    failure: str

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """Write what is left. `failed`: the run ends by an error."""


class TensorBoardSink:
    """Event files under `tensorboard/<phase>`: each phase counts its own steps. The resolved recipe is beside them, as hyperparameters.

    Rows that the disk does not take are missing there, and `failure` says so; the rows after them go to another file.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, object]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder, self.failure = folder, ""
        self._event, self._summary, self._open = Event, Summary, EventFileWriter
        self._writers: dict[str, EventFileWriter] = {}
        self._put_hyperparameters(recipe)

    def _put_hyperparameters(self, recipe: Mapping[str, object]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        values = {".".join(key): value for key, value in flatten(recipe).items() if value is not None}
        plain = {key: value if isinstance(value, bool | int | float | str) else json.dumps(value) for key, value in values.items()}
        # A resumed run shows those of its latest start.
        for earlier in self._folder.glob("events.*"):
            earlier.unlink()
        writer = self._open(str(self._folder))
        writer.add_event(self._event(wall_time=time.time(), summary=hparams_pb(plain, trial_id=self._folder.parent.name)))
        writer.close()

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        try:
            if phase not in self._writers:
                self._writers[phase] = self._open(str(self._folder / phase))
            self._writers[phase].add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        except OSError as error:  # also of rows before, which a thread of the writer writes, and which has ended by it
            self._lacks_rows(error)
            self._writers.pop(phase, None)

    def close(self, *, failed: bool = False) -> None:
        for writer in self._writers.values():
            try:
                writer.close()
            except OSError as error:
                self._lacks_rows(error)

    def _lacks_rows(self, error: OSError) -> None:
        self.failure = f"tensorboard/ lacks rows that metrics.jsonl has: {error.strerror}"
