"""Destinations of metrics besides `metrics.jsonl`: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import hashlib
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from mtpctl.errors import EnvironmentMissing
from mtpctl.recipe.telemetry import TelemetryConfig

PACKAGES = ("wandb",)
"""Keys of the section `telemetry` that need a package of their own, which has the key's name."""


def check_packages(telemetry: TelemetryConfig) -> None:
    """Raise EnvironmentMissing where the section names a destination whose package is not installed."""
    for key in PACKAGES:
        if getattr(telemetry, key) and find_spec(key) is None:
            raise EnvironmentMissing(f"telemetry.{key}: the package {key} is not installed; install it, or remove the key")


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files under `tensorboard/<phase>`: each phase counts its own steps."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        self._event, self._summary, self._open = Event, Summary, EventFileWriter
        self._writers: dict[str, EventFileWriter] = {}

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None:
        if phase not in self._writers:
            self._writers[phase] = self._open(str(self._folder / phase))
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writers[phase].add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbSink:
    """Weights & Biases."""

    def __init__(self, project: str, name: str, folder: Path) -> None:
        import wandb

        # The same directory is the same run, so that a resumed one goes on in its place.
        identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(project=project, name=name, dir=str(folder), resume="allow", id=identity)

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None:
        # W&B wants one step that only grows; each phase has its own instead, as a metric of that name.
        self._run.log({**metrics, f"{phase}/step": step})

    def close(self) -> None:
        self._run.finish()
