"""Destinations of metrics besides `metrics.jsonl`: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import hashlib
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from mtpctl.errors import EnvironmentMissing
from mtpctl.recipe.telemetry import TelemetryConfig
from mtpctl.telemetry.sample_log import KeptSample, response_text

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


SAMPLE_COLUMNS = ("step", "set", "prompt", "answer", "response", "reward", "tokens", "ended", "versions", "drafted", "accepted", "note")


def _cells(row: KeptSample, columns: list[str]) -> list[object]:
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
    """Weights & Biases."""

    def __init__(self, project: str, name: str, folder: Path) -> None:
        import wandb

        # The same directory is the same run, so that a resumed one goes on in its place.
        identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(project=project, name=name, dir=str(folder), resume="allow", id=identity)

    def write(self, step: int, metrics: dict[str, float], phase: str) -> None:
        # W&B wants one step that only grows; each phase has its own instead, as a metric of that name.
        self._run.log({**metrics, f"{phase}/step": step})

    def samples(self, rows: list[KeptSample]) -> None:
        """A table for each kind of samples, all of one step: `samples/update`, `samples/eval`, `samples/dropped`."""
        from wandb import Table

        columns = [*SAMPLE_COLUMNS, *dict.fromkeys(f"reward/{name}" for row in rows for name in row["reward_parts"])]
        for kind in dict.fromkeys(row["kind"] for row in rows):
            of_kind = [row for row in rows if row["kind"] == kind]
            table = Table(columns=columns, data=[_cells(row, columns) for row in of_kind])
            self._run.log({f"samples/{kind}": table, "rl/step": of_kind[0]["step"]})

    def close(self) -> None:
        self._run.finish()
