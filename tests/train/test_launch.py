"""What a start of a run does with the run that is there, up to its actors, which stand still here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.recipe import Recipe, UserError
from mtpctl.telemetry import RunDirectory, Telemetry
from mtpctl.train import launch
from mtpctl.train.launch import Run
from mtpctl.train.prepare import Prepared, model_of
from tests.train.test_offline import recipe

SFT = ("train.stages=[sft]", "train.sft.steps=4")


class Rows:
    """Telemetry that keeps the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, kind: str, message: str) -> None:
        self.events.append(message)


def save(run: Path, stage: str, step: int, ended: list[str]) -> Path:
    """A checkpoint of which nothing but the controller's part is there."""
    folder = run / "checkpoints" / f"{stage}-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"stage": stage, "step": step, "version": 0, "cursor": None, "ended": ended}))
    (folder.parent / "latest").write_text(folder.name)
    return folder


def drive(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch, *, stopped: bool) -> tuple[bool, list[str]]:
    """A start on the newest checkpoint of the directory: whether it finished, and what it asked the trainer for.

    `stopped`: Ctrl-C comes while the trainer starts.
    """
    asked: list[str] = []

    class Trainer:
        def __init__(self, recipe: Recipe, placement: Any) -> None:
            pass

        async def build(self, folder: Path) -> dict[str, Any]:
            if stopped:
                run.state.stopping.set()
            return {"parameters": 1, "trained": 1}

        async def call(self, method: str, *args: Any) -> Any:
            asked.append(method)
            return str(folder) if method == "latest_checkpoint" else None

    monkeypatch.setattr(launch, "TrainerGroup", Trainer)
    home = recipe.run_path
    prepared = Prepared(model_of(recipe, home), cast(Any, None), cast(Any, None), 64)
    run = Run(recipe, prepared, RunDirectory(home), cast(Telemetry, Rows()), cast(Any, None))
    return asyncio.run(run.drive()), asked


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_has_ended_keeps_its_last_checkpoint_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """Also where Ctrl-C comes before it has said that there is nothing to do: what it would save then had no optimizer."""
    ended = save(tmp_path / "run", "sft", 4, ended=["sft"])
    assert drive(recipe(tmp_path / "run", *SFT), ended, monkeypatch, stopped=stopped) == (True, ["latest_checkpoint", "restore"])


def test_a_stage_that_was_begun_is_not_left_out_in_silence(tmp_path: Path) -> None:
    save(tmp_path / "run", "sft", 3, ended=[])
    with pytest.raises(UserError, match=r"train\.stages: .*sft-000003 is within sft.* train\.sft\.steps: 3 to end it there") as told:
        launch.run(recipe(tmp_path / "run", "train.stages=[rl]", "cluster.num_cpus=2"))
    assert "\n" not in str(told.value)
    assert not RunDirectory(tmp_path / "run").recipe.exists(), "the directory is left as it was"
