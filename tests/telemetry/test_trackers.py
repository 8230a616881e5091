"""Rows sent to Weights & Biases and MLflow over two sessions of a run. Both are fakes, so no test needs their packages."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mtpctl.errors import PrerequisiteMissing
from mtpctl.recipe.schema import TelemetryConfig
from mtpctl.samples import Sample
from mtpctl.telemetry.metrics_file import History, load_history
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.sample_log import sample_row
from mtpctl.telemetry.session import Telemetry
from mtpctl.telemetry.trackers import UpdateCounter


def session(path: Path, config: TelemetryConfig, rows: list[tuple[int, dict[str, float], str]], recipe: str) -> str:
    """One start of a run, up to an error where a row is of the phase `error`. Returns what the screen shows."""
    out = io.StringIO()
    run = RunDirectory.create(path, recipe)
    run.record(recipe)
    telemetry = Telemetry(run, config, plain=True, stage_steps={"sft": 400, "rl": 9}, console=Console(file=out, width=200))
    with run, telemetry:
        for step, metrics, phase in rows:
            if phase == "error":
                raise KeyError
            telemetry.log(step, metrics, phase)
        sample = Sample("p", "g", [50], reward=0.5, reward_parts={"format": 1.0})
        sample.append([51], [0.0], 2)
        sample.append([52], [0.0], 2, trained=False)
        telemetry.samples([sample_row(sample, lambda ids: "".join(map(chr, ids)), step=2, kind="update", answer="4")])
    return out.getvalue()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.telemetry.trackers.find_spec", lambda name: object())


def test_updates_are_counted_over_the_phases() -> None:
    updates = UpdateCounter(["sft", "rl"], History([], []))
    assert [updates.total(step, "sft") for step in (1, 2, 3)] == [1, 2, 3]
    assert [updates.total(step, "rl") for step in (0, 1, 2, 0)] == [3, 4, 5, 3]


class Wandb(types.ModuleType):
    """The part of W&B that is used, with what it was given."""

    Error = type("Error", (Exception,), {})
    refuses = ""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, Any]] = []
        self.exits: list[int] = []

    def init(self, **options: Any) -> Any:
        if self.refuses:
            raise self.Error(self.refuses)
        self.begun.append(options)
        return self

    def define_metric(self, name: str, step_metric: str | None = None, summary: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exits.append(exit_code)

    def Table(self, columns: list[str], data: list[list[object]]) -> Any:
        return [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


CONFIG = {"tensorboard": False, "group": "lr", "tags": ["a", "b"]}


def test_wandb_gets_recipe_group_and_tags_and_rows_over_updates(tmp_path: Path, wandb: Wandb) -> None:
    config = TelemetryConfig(wandb="project", **CONFIG)  # type: ignore[arg-type]
    session(tmp_path / "run", config, [(3, {"sft/loss": 2.0}, "sft"), (1, {"reward/mean": 0.5}, "rl")], "name: t\nseed: 4\n")
    with pytest.raises(KeyError):
        session(tmp_path / "run", config, [(2, {"reward/mean": 0.75}, "rl"), (0, {}, "error")], "name: t\nseed: 4\n")
    first, second = wandb.begun
    assert (first["project"], first["group"], first["tags"], first["config"]) == ("project", "lr", ["a", "b"], {"name": "t", "seed": 4})
    assert first["id"] == second["id"] and first["resume"] == "allow", "a resumed run is the same one"
    assert ("*", "update") in wandb.defined
    tables = [values for values in wandb.logged if "samples/update" in values]
    assert [values for values in wandb.logged if values not in tables] == [
        {"sft/loss": 2.0, "sft/step": 3, "update": 3},
        {"reward/mean": 0.5, "rl/step": 1, "update": 4},
        {"reward/mean": 0.75, "rl/step": 2, "update": 5},
    ]
    assert wandb.exits == [0, 1], "a failure is reported"
    assert (tables[0]["rl/step"], tables[0]["update"]) == (2, 5)
    (result,) = tables[0]["samples/update"]
    assert (result["prompt"], result["response"], result["reward"], result["reward/format"], result["versions"]) == (
        "2",
        "3⟦4⟧",
        0.5,
        1.0,
        "2",
    )


def test_wandb_without_login_is_reported_with_fix(tmp_path: Path, wandb: Wandb) -> None:
    wandb.refuses = "api_key not configured\nsee docs"
    with pytest.raises(PrerequisiteMissing, match=r"^telemetry\.wandb: .*api_key not configured\); .*WANDB_MODE=offline") as message:
        session(tmp_path / "run", TelemetryConfig(tensorboard=False, wandb="project"), [], "name: t\n")
    assert "\n" not in str(message.value)


class Mlflow:
    """A tracking server, and the client for it, as far as they are used."""

    Exception = type("MlflowException", (Exception,), {})

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiment: str | None = None
        self.breaks = False

    def __call__(self) -> Mlflow:
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="0") if name == self.experiment else None

    def create_experiment(self, name: str) -> str:
        self.experiment = name
        return "0"

    def _run(self, identity: str) -> Any:
        data = types.SimpleNamespace(params=dict(self.runs[identity]["params"]))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=identity), data=data)

    def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[Any]:
        return [self._run(run) for run, each in self.runs.items() if wanted == f"tags.`mtpctl.run` = '{each['tags']['mtpctl.run']}'"]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.runs["r"] = {"name": run_name, "tags": tags, "params": {}, "metrics": [], "status": []}
        return self._run("r")

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"].append(status)

    set_terminated = update_run

    def set_tag(self, run: str, key: str, value: str) -> None:
        self.runs[run]["tags"][key] = value

    def log_batch(self, run: str, metrics: tuple[Any, ...] | list[Any] = (), params: tuple[Any, ...] | list[Any] = ()) -> None:
        if self.breaks and metrics:
            raise self.Exception("503\nlong text")
        assert len(params) <= 100 and all("@" not in metric[0] for metric in metrics)
        assert not {key for key, _ in params} & self.runs[run]["params"].keys(), "a parameter cannot be set twice"
        self.runs[run]["params"].update(params)
        self.runs[run]["metrics"] += [(name, value, step) for name, value, _, step in metrics]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    server = Mlflow()
    parts = {"mlflow": {}, "mlflow.exceptions": {"MlflowException": server.Exception}, "mlflow.tracking": {"MlflowClient": server}}
    parts["mlflow.entities"] = {"Param": lambda *inputs: inputs, "Metric": lambda *inputs: inputs}
    for name, content in parts.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return server


def test_mlflow_resumes_same_run(tmp_path: Path, mlflow: Mlflow) -> None:
    config = TelemetryConfig(mlflow="arms", **CONFIG)  # type: ignore[arg-type]
    session(tmp_path / "run", config, [(3, {"sft/loss": 2.0}, "sft"), (1, {"eval/avg@4": 0.5}, "rl")], "name: t\ntrain: {lr: 0.1}\n")
    with pytest.raises(KeyError):
        session(tmp_path / "run", config, [(2, {"reward/mean": 0.5}, "rl"), (0, {}, "error")], "name: t\ntrain: {lr: 0.2, seed: 1}\n")
    (run,) = mlflow.runs.values()
    assert run["params"] == {"name": '"t"', "train.lr": "0.1", "train.seed": "1"} and run["tags"]["changed.train.lr"] == "0.2"
    assert run["tags"]["mtpctl.group"] == "lr" and {"a", "b"} < run["tags"].keys()
    assert [row for row in run["metrics"] if "step" not in row[0]] == [
        ("sft/loss", 2.0, 3),
        ("eval/avg_at_4", 0.5, 4),
        ("reward/mean", 0.5, 5),
    ]
    assert run["status"] == ["RUNNING", "FINISHED", "RUNNING", "FAILED"] and mlflow.experiment == "arms"


def test_a_tracking_server_that_fails_later_ends_no_run(tmp_path: Path, mlflow: Mlflow) -> None:
    mlflow.breaks = True
    shown = session(tmp_path / "run", TelemetryConfig(tensorboard=False, mlflow="arms"), [(1, {"sft/loss": 2.0}, "sft")], "name: t\n")
    assert "tracker: MLflow receives no rows from update 1 on: MlflowException: 503\n" in shown
    assert load_history(tmp_path / "run").events[-1].kind == "tracker"
