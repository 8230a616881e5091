"""`mtpctl scale` and `mtpctl samples`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.telemetry.run_directory import Answer, RunDirectory, pop_requests
from mtpctl.telemetry.sample_log import SampleLog
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.sample_rows import kept

ELASTIC = "rollout.replicas={min: 2, max: 4}"


def run_of(path: Path, *sets: str) -> RunDirectory:
    """A run that goes on, of the tiny recipe."""
    return RunDirectory.create(path, dump_resolved(load_recipe("tiny_mtp", sets=[f"run_dir={path}", *sets]).recipe))


@pytest.mark.parametrize(
    ("sets", "replicas", "message"),
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
def test_number_out_of_bounds_is_exit_code_2(mtpctl: Any, tmp_path: Path, sets: list[str], replicas: str, message: str) -> None:
    with run_of(tmp_path / "run", *sets) as run:
        result = mtpctl("scale", str(run.path), "--replicas", replicas)
        assert (result.code, result.out, result.err) == (2, "", message.format(run=run.path) + "\n")
        assert not run.requests.exists()


def test_missing_or_ended_run_is_exit_code_2(mtpctl: Any, tmp_path: Path) -> None:
    result = mtpctl("scale", str(tmp_path), "--replicas", "2")
    assert (result.code, result.err) == (2, f"error: RUN: {tmp_path} is no run directory; mtpctl runs lists those below a folder\n")
    run_of(tmp_path / "run", ELASTIC).close()
    result = mtpctl("scale", str(tmp_path / "run"), "--replicas", "2")
    assert (result.code, result.err) == (2, f"error: RUN: {tmp_path}/run is not running; start it with mtpctl train {tmp_path}/run\n")


@pytest.mark.parametrize(("refused", "code"), [(False, 0), (True, 2)])
def test_answer_of_the_run_is_printed(mtpctl: Any, tmp_path: Path, refused: bool, code: int) -> None:
    with run_of(tmp_path / "run", ELASTIC) as run:

        def answer() -> None:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                for request in pop_requests(run):
                    return request.answer(Answer(f"{request.replicas} are asked for", refused))
                time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        result = mtpctl("scale", str(run.path), "--replicas", "3")
        thread.join(20)
        assert (result.code, result.err if refused else result.out) == (code, "error: " * refused + "3 are asked for\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([kept(step, step / 10, f"answer\n{step}") for step in (1, 2, 3, 4, 5, 6, 7)])
    log.write([kept(8, None, kind="dropped", note="no reward: boom")])
    log.close()
    return tmp_path


def test_newest_samples_are_first_and_the_environment_is_marked(mtpctl: Any, run: Path) -> None:
    message = mtpctl("samples", str(run), "--n", "2").out
    first, second = message.split("\n\n")
    assert first.startswith("── no reward · dropped before update 8 ·") and first.endswith("  no reward: boom")
    assert second.splitlines() == [
        "── reward 0.7 · update 7 · format 1 · 9 tokens and 1 environment turn(s) · ended by stop · versions 3 to 4 · "
        "3 of 4 drafts accepted",
        "  ?",
        "  →",
        "  answer",
        "  7",
        "  │ <",
        "  answer: <b>",
    ]


def test_an_answer_of_several_lines_is_printed_as_it_is(mtpctl: Any, tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([{**kept(1, 0.5), "answer": "3 * 3 = 9\n#### 9"}])
    log.close()
    assert mtpctl("samples", str(tmp_path)).out.splitlines()[-2:] == ["  answer: 3 * 3 = 9", "          #### 9"]


def test_worst_and_step_select_samples(mtpctl: Any, run: Path) -> None:
    def rewards(*options: str) -> list[float]:
        return [row["reward"] for row in json.loads(mtpctl("samples", str(run), "--json", *options).out)]

    assert rewards("--worst", "--n", "3") == [0.1, 0.2, 0.3]
    assert rewards("--step", "4") == [0.4]
    assert len(rewards()) == 5


def test_missing_samples_are_reported_with_the_nearest_step(mtpctl: Any, run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = mtpctl("samples", str(run), "--step", "40")
    assert (wrong.code, wrong.err) == (2, f"error: --step: {run} has no samples of 40; the nearest step with samples is 8\n")
    empty = tmp_path_factory.mktemp("empty")
    assert "has no samples yet" in mtpctl("samples", str(empty)).err
    assert mtpctl("samples", str(empty / "no")).err == f"error: RUN: no directory {empty / 'no'}; give a run directory\n"


def test_control_characters_are_escaped(mtpctl: Any, tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([kept(1, 0.5, "\x1b[2Jgone\x07 é\t�")])
    log.close()
    assert "  \\x1b[2Jgone\\x07 é\t�" in mtpctl("samples", str(tmp_path)).out.splitlines()
