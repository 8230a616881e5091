"""`mtpctl samples`: which samples it prints, and in what form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpctl.telemetry.sample_log import SampleLog
from tests.cli.test_commands import mtpctl as mtpctl
from tests.telemetry.test_sample_page import kept


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([kept(step, step / 10, f"answer\n{step}") for step in (1, 2, 3, 4, 5, 6, 7)])
    log.write([kept(8, None, kind="dropped", note="no reward: boom")])
    log.close()
    return tmp_path


def test_the_newest_come_first_and_the_environment_is_behind_a_bar(mtpctl: Any, run: Path) -> None:
    told = mtpctl("samples", str(run), "--n", "2").out
    first, second = told.split("\n\n")
    assert first.startswith("── no reward · dropped before update 8 ·") and first.endswith("  no reward: boom")
    assert second.splitlines() == [
        "── reward 0.7 · update 7 · format 1 · 9 tokens and 1 environment turn(s) · ended by stop · versions 3 to 4 · "
        "3 of 4 drafts accepted",
        "  ?",
        "  →",
        "  answer",
        "  7",
        "  │ <",
        "  wanted: <b>",
    ]


def test_an_answer_of_several_lines_is_printed_as_it_is(mtpctl: Any, tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([{**kept(1, 0.5), "answer": "3 * 3 = 9\n#### 9"}])
    log.close()
    assert mtpctl("samples", str(tmp_path)).out.splitlines()[-2:] == ["  wanted: 3 * 3 = 9", "          #### 9"]


def test_the_worst_and_those_of_a_step(mtpctl: Any, run: Path) -> None:
    def rewards(*options: str) -> list[float]:
        return [row["reward"] for row in json.loads(mtpctl("samples", str(run), "--json", *options).out)]

    assert rewards("--worst", "--n", "3") == [0.1, 0.2, 0.3]
    assert rewards("--step", "4") == [0.4]
    assert len(rewards()) == 5


def test_what_is_not_there_is_told_with_what_is(mtpctl: Any, run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = mtpctl("samples", str(run), "--step", "40")
    assert (wrong.code, wrong.err) == (2, f"error: --step: {run} holds no samples of 40; the nearest step that has some is 8\n")
    empty = tmp_path_factory.mktemp("empty")
    assert "holds no samples yet" in mtpctl("samples", str(empty)).err
    assert mtpctl("samples", str(empty / "no")).err == f"error: RUN: no directory {empty / 'no'}; give a run directory\n"


def test_a_terminal_obeys_nothing_that_a_model_wrote(mtpctl: Any, tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([kept(1, 0.5, "\x1b[2Jgone\x07 é\t�")])
    log.close()
    assert "  \\x1b[2Jgone\\x07 é\t�" in mtpctl("samples", str(tmp_path)).out.splitlines()
