"""Checkpoints at the start of a run: resume, fall back and start over, each with a message."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtpctl.checkpoint.finding import damaged_in, list_checkpoints
from mtpctl.checkpoint.listing import write_listing
from mtpctl.controller import state as module
from mtpctl.controller.resume import describe_start, find_starting_point, start_over
from mtpctl.controller.state import FAILURE_PERIOD_S, RETRY_S, RunState
from mtpctl.doctor.checks import examine_run
from mtpctl.errors import RuntimeFailure, SaveFailed, ThresholdMissed, UserError
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.train import TrainConfig
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.trackers import tracker_id
from tests.fakes.checkpoint_folders import SHARD, flip, write_checkpoint
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.runs import recipe as recipe_in


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Of a run with two checkpoints within RL."""
    created = recipe_in(tmp_path / "run", "train.rl.steps=9", "train.rl.kl_coef=0.1")
    RunDirectory.create(created.run_path, dump_resolved(created)).close()
    for name in ("rl-000002", "rl-000004"):
        write_checkpoint(created.run_path, name)
    reference = write_checkpoint(tmp_path / "other", "rl-000001")
    reference.rename(created.run_path / "reference")
    return created


def start(recipe: Recipe) -> Any:
    message: list[str] = []
    return find_starting_point(recipe, RunDirectory(recipe.run_path), message.append)


def test_run_resumes_from_the_newest_complete_checkpoint_and_keeps_the_damaged_one(recipe: Recipe) -> None:
    root = recipe.run_path / "checkpoints"
    assert (start(recipe).checkpoint, start(recipe).lines) == (root / "rl-000004", [])
    flip(root / "rl-000004" / SHARD)
    planned = describe_start(recipe)
    assert planned[0] == "rl-000002, rl after step 2; its checksums match" and "rl-000004/__0_0.distcp has changed" in planned[1]
    assert [path.name for path in list_checkpoints(root)] == ["rl-000004", "rl-000002"], "a plan changes nothing"
    result = start(recipe)
    assert (result.checkpoint, result.state["step"]) == (root / "rl-000002", 2)
    (line,) = result.lines
    assert line.endswith("; rl-000002 is used instead; rl-000004 is kept under another name") and "\n" not in line
    assert [path.name for path in damaged_in(root)] == ["rl-000004.damaged"]


@pytest.mark.parametrize("damage", ["flipped", "missing", "truncated"])
def test_damaged_initial_policy_of_rl_is_reported_before_actors_start(recipe: Recipe, damage: str) -> None:
    shard = recipe.run_path / "reference" / SHARD
    {"flipped": lambda: flip(shard), "missing": shard.unlink, "truncated": lambda: os.truncate(shard, 10)}[damage]()
    for look in (start, describe_start):
        with pytest.raises(UserError, match=r"^train\.rl\.kl_coef: .*reference/__0_0\.distcp .*: restore it, set train\.rl\."):
            look(recipe)


def test_stage_of_the_previous_checkpoint_must_be_in_the_recipe(recipe: Recipe) -> None:
    sft = recipe.model_copy(update={"train": recipe.train.model_copy(update={"stages": ["sft"]})})
    with pytest.raises(UserError, match=r"^train\.stages: .*rl-000004 is within rl"):
        start(sft)


def test_start_over_keeps_all_files_of_the_earlier_run(recipe: Recipe) -> None:
    run = recipe.run_path
    (run / "start").mkdir()
    (run / "start" / "model.safetensors").write_bytes(b"weights")
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    aside = start_over(recipe, ["start"])
    assert aside == run.with_name("run.1")
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
    assert [path.relative_to(run).as_posix() for path in sorted(run.rglob("*")) if path.is_file()] == [".begun", "start/model.safetensors"]
    assert tracker_id(run) != tracker_id(aside), "trackers have a separate run for it"
    assert start_over(recipe) is None, "there is no run now"


def test_start_over_is_refused_while_the_run_is_writing(recipe: Recipe) -> None:
    with RunDirectory.create(recipe.run_path, ""), pytest.raises(UserError, match="another run is writing"):
        start_over(recipe)
    assert list_checkpoints(recipe.run_path / "checkpoints")


def test_start_over_does_not_replace_the_copy(recipe: Recipe, tmp_path: Path) -> None:
    from mtpctl.checkpoint.copying import COPY_URL_FIELD, CopyWriter
    from mtpctl.cluster.object_store import ObjectStore

    url = f"file://{tmp_path}/copy"
    CopyWriter(ObjectStore(url, COPY_URL_FIELD), recipe.run_path, 2).copy(recipe.run_path / "checkpoints" / "rl-000004")
    copied = recipe.model_copy(update={"train": recipe.train.model_copy(update={"checkpoint_copy": url})})
    with pytest.raises(
        UserError, match=r"^--start-over: train\.checkpoint_copy: .*/copy has rl-000004 of this run, which would be overwritten"
    ):
        start_over(copied)
    assert list_checkpoints(recipe.run_path / "checkpoints")


def test_doctor_verifies_the_checkpoints_of_a_run(recipe: Recipe, mtpctl: Any) -> None:
    run = recipe.run_path
    message = mtpctl("doctor", str(run))
    assert message.code == 0 and "rl-000004" in message.out and "reference" in message.out
    os.truncate(run / "checkpoints" / "rl-000002" / SHARD, 10)
    diagnosis = examine_run(run)
    assert [(check.name, check.finding.state) for check in diagnosis.checks] == [
        ("rl-000004", "ok"),
        ("rl-000002", "failed"),
        ("reference", "ok"),
    ]
    assert isinstance(diagnosis.error, ThresholdMissed) and diagnosis.verdict == "damaged"
    message = mtpctl("doctor", str(run), "--json")
    assert message.code == 6 and json.loads(message.out)["checks"]["rl-000002"]["data"]["file"] == SHARD
    with pytest.raises(UserError, match="is not a run directory"):
        examine_run(run / "checkpoints")


class Disk:
    """Save from the time `free` on, with a clock that advances only during sleeps."""

    def __init__(self, patch: pytest.MonkeyPatch, free: float) -> None:
        self.now, self.free, self.tries = 0.0, free, 0
        patch.setattr(module.time, "monotonic", lambda: self.now)
        patch.setattr(module.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def save(self) -> str:
        self.tries += 1
        if self.now < self.free:
            raise SaveFailed("checkpoint rl-000009-end was not written: No space left on device")
        return "saved"


def test_required_save_is_retried_until_the_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message: list[str] = []
    state, disk = RunState(tmp_path, TrainConfig(), report=message.append), Disk(monkeypatch, 25)
    assert asyncio.run(state.retry_while_disk_full(disk.save)) == "saved"
    assert disk.tries == 4 and disk.now == 3 * RETRY_S
    assert message == [
        "checkpoint rl-000009-end was not written: No space left on device; free disk space: the checkpoint is written again "
        "every 10 seconds for 5 minutes"
    ]


def test_required_save_fails_after_minutes_of_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, disk = RunState(tmp_path, TrainConfig()), Disk(monkeypatch, 1e9)
    with pytest.raises(RuntimeFailure, match="31 attempts in 5 minutes failed; free space and start the same command again"):
        asyncio.run(state.retry_while_disk_full(disk.save))
    assert disk.now == FAILURE_PERIOD_S


def test_checkpoint_of_an_edited_file_can_be_listed_again(recipe: Recipe) -> None:
    """For whoever changed it on purpose."""
    path = recipe.run_path / "checkpoints" / "rl-000004"
    state = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(state | {"version": 9}))
    assert describe_start(recipe)[0].startswith("rl-000002")
    write_listing(path, 2, {})
    assert describe_start(recipe) == ["rl-000004, rl after step 4; its checksums match"]
