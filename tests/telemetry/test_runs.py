"""The list of runs: in what state each is, and how far it got."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.telemetry.run_directory import RunDirectory, store_requested_replicas
from mtpctl.telemetry.runs import describe_run, find_runs
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.runs import RECIPE


def run(path: Path, step: int, event: str | None = None, *, stage: str = "rl") -> Path:
    RunDirectory.create(path, RECIPE).close()
    rows: list[dict[str, Any]] = [
        {"phase": stage, "step": s, "reward/mean": 0.9, "reward/unfiltered_mean": s / 10, "eval/accuracy": 0.25} for s in range(1, step + 1)
    ]
    rows += [{"event": event, "message": "m"}] if event else []
    RunDirectory(path).metrics.write_text("".join(json.dumps({"session": 1, "time": 1.7e9, **row}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("step", "event", "state"),
    [
        (10, None, "done"),
        (4, "error", "failed"),
        (4, "stop", "stopped"),
        (4, "start", "broken off"),
        (10, "error", "failed"),
        (0, None, "empty"),
    ],
)
def test_state_of_ended_run(tmp_path: Path, step: int, event: str | None, state: str) -> None:
    assert describe_run(run(tmp_path / "a", step, event)).state == state


def test_locked_run_is_running_and_inspection_does_not_block_a_start(tmp_path: Path) -> None:
    path = run(tmp_path / "a", 4)
    with RunDirectory.create(path, RECIPE):
        assert describe_run(path).state == "running"
        with pytest.raises(UserError, match=r"^run_dir: another run is writing"):
            RunDirectory.create(path, RECIPE)
    assert describe_run(path).state == "broken off"


def test_stage_that_ended_early_is_done_if_checkpoint_is_final(tmp_path: Path) -> None:
    path = run(tmp_path / "a", 4, "checkpoint")
    (path / "checkpoints" / "rl-000004-end").mkdir()
    assert describe_run(path).state == "done"


def test_end_of_earlier_stage_does_not_end_run(tmp_path: Path) -> None:
    result = describe_run(run(tmp_path / "a", 5, stage="sft"))
    assert (result.state, result.stage, result.step, result.steps, result.reward) == ("broken off", "sft", 5, 5, None)


def test_the_two_rewards_of_a_run_have_two_names(mtpctl: Any, tmp_path: Path) -> None:
    """That of the batches that were trained on, and that of all groups."""
    result = describe_run(run(tmp_path / "a", 4))
    assert (result.reward, result.unfiltered_reward) == (0.9, 0.4)
    header, line = mtpctl("runs", str(tmp_path)).out.splitlines()
    assert dict(zip(re.split(r" {2,}", header), re.split(r" {2,}", line), strict=True))["reward"] == "0.900"
    assert dict(zip(re.split(r" {2,}", header), re.split(r" {2,}", line), strict=True))["unfiltered"] == "0.400"
    assert "reward 0.900, unfiltered 0.400" in mtpctl("status", str(tmp_path / "a")).out


def test_runs_below_a_folder_are_listed_without_nested_ones(mtpctl: Any, tmp_path: Path) -> None:
    run(tmp_path / "x" / "a", 4, "stop")
    run(tmp_path / "x" / "a" / "inner", 1)
    run(tmp_path / "b", 10)
    assert {result.path for result in find_runs(tmp_path)} == {tmp_path / "x" / "a", tmp_path / "b"}
    lines = mtpctl("runs", str(tmp_path)).out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "reward", "unfiltered", "held-out", "age"]
    row = next(line for line in lines if "/x/a" in line)
    assert row.split()[1:7] == ["stopped", "rl", "4/10", "0.900", "0.400", "0.250"]
    assert {row["state"] for row in json.loads(mtpctl("runs", str(tmp_path), "--json").out)} == {"stopped", "done"}
    assert mtpctl("runs", str(tmp_path / "no")).err == f"error: FOLDER: no folder {tmp_path / 'no'}; name one with runs in it\n"


def test_unreadable_run_is_listed_with_its_error_next_to_others(mtpctl: Any, tmp_path: Path) -> None:
    run(tmp_path / "a", 4, "stop")
    broken = run(tmp_path / "b", 10)
    RunDirectory(broken).requested_replicas.write_text("{")
    message = mtpctl("runs", str(tmp_path)).out.splitlines()
    assert {line.split()[1] for line in message[1:3]} == {"stopped", "unreadable"}
    assert message[3] == f"unreadable: {broken}/replicas.json: is not a valid file of mtpctl scale; remove it, and repeat the command"
    faults = {row["path"]: row["fault"] for row in json.loads(mtpctl("runs", str(tmp_path), "--json").out)}
    assert faults[str(tmp_path / "a")] == "" and faults[str(broken)] == message[3].removeprefix("unreadable: ")


def test_accuracy_on_unseen_prompts_is_listed(mtpctl: Any, tmp_path: Path) -> None:
    path = run(tmp_path / "a", 2)
    with RunDirectory(path).metrics.open("a") as file:
        file.write(json.dumps({"session": 1, "time": 1.7e9, "phase": "rl", "step": 2, "eval/unseen_accuracy": 0.125}) + "\n")
    assert " 0.250 (unseen 0.125) " in mtpctl("runs", str(tmp_path)).out
    assert ", held-out accuracy 0.250 (unseen prompts 0.125); wrote " in mtpctl("status", str(path)).out
    assert json.loads(mtpctl("status", str(path), "--json").out)["unseen_accuracy"] == 0.125


def test_status_reports_reason_of_trainer_restart(mtpctl: Any, tmp_path: Path) -> None:
    path = run(tmp_path / "a", 4, "restart")
    message = mtpctl("status", str(path)).out
    assert message.startswith(f"{path}: broken off, rl step 4 of 10, reward 0.900, unfiltered 0.400, held-out accuracy 0.250; wrote ")
    assert message.endswith(" ago\nrestart: m\n")
    assert json.loads(mtpctl("status", str(path), "--json").out)["restarts"] == ["m"]
    store_requested_replicas(RunDirectory(path), 2)
    assert "held-out accuracy 0.250, 2 requested by mtpctl scale; wrote " in mtpctl("status", str(path)).out
    assert json.loads(mtpctl("status", str(path), "--json").out)["requested_replicas"] == 2
    no = tmp_path / "no"
    assert mtpctl("status", str(no)).err == f"error: RUN: {no} is no run directory; mtpctl runs lists those below a folder\n"
