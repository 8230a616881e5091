"""`mtpctl scale`: what is refused, in one line each, before a run is asked; what the run answers is printed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.scale_requests import Answer, take_requests
from tests.cli.test_commands import mtpctl as mtpctl

ELASTIC = "rollout.replicas={min: 2, max: 4}"


def run_of(path: Path, *sets: str) -> RunDirectory:
    """A run that goes on, of the tiny recipe."""
    return RunDirectory.create(path, dump_resolved(load_recipe("tiny_mtp", sets=[f"run_dir={path}", *sets]).recipe))


@pytest.mark.parametrize(
    ("sets", "replicas", "told"),
    [
        ([ELASTIC], "5", "error: --replicas: 5 is not within rollout.replicas: min 2, max 4"),
        ([ELASTIC], "1", "error: --replicas: 1 is not within rollout.replicas: min 2, max 4"),
        (
            ["rollout.replicas=2"],
            "3",
            "error: rollout.replicas: 2 is a fixed number; stop the run, and resume it with --set 'rollout.replicas={{min: 2, max: 3}}'",
        ),
        (["train.stages=[sft]"], "1", "error: RUN: {run} has no rollout replicas; its train.stages are sft"),
    ],
)
def test_a_number_that_the_recipe_does_not_allow_is_exit_2(mtpctl: Any, tmp_path: Path, sets: list[str], replicas: str, told: str) -> None:
    with run_of(tmp_path / "run", *sets) as run:
        found = mtpctl("scale", str(run.path), "--replicas", replicas)
        assert (found.code, found.out, found.err) == (2, "", told.format(run=run.path) + "\n")
        assert not run.requests.exists()


def test_a_run_that_is_not_there_or_does_not_go_on_is_exit_2(mtpctl: Any, tmp_path: Path) -> None:
    found = mtpctl("scale", str(tmp_path), "--replicas", "2")
    assert (found.code, found.err) == (2, f"error: RUN: {tmp_path} is no run directory; mtpctl runs lists those below a folder\n")
    run_of(tmp_path / "run", ELASTIC).close()
    found = mtpctl("scale", str(tmp_path / "run"), "--replicas", "2")
    assert (found.code, found.err) == (2, f"error: RUN: {tmp_path}/run is not running; start it with mtpctl train {tmp_path}/run\n")


@pytest.mark.parametrize(("refused", "code"), [(False, 0), (True, 2)])
def test_the_answer_is_the_runs(mtpctl: Any, tmp_path: Path, refused: bool, code: int) -> None:
    with run_of(tmp_path / "run", ELASTIC) as run:

        def answer() -> None:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                for request in take_requests(run):
                    return request.answer(Answer(f"{request.replicas} are asked for", refused))
                time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        found = mtpctl("scale", str(run.path), "--replicas", "3")
        thread.join(20)
        assert (found.code, found.err if refused else found.out) == (code, "error: " * refused + "3 are asked for\n")
