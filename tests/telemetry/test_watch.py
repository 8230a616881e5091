"""`mtpctl runs --watch`: the table of several runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.runs import runs_table
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.runs import RECIPE


def run(path: Path, *rows: dict[str, Any]) -> Path:
    RunDirectory.create(path, RECIPE).close()
    RunDirectory(path).metrics.write_text("".join(json.dumps({"session": 1, "time": 1.7e9, **row}) + "\n" for row in rows))
    return path


def rendered(folder: Path) -> dict[str, str]:
    """The line of each run, by its name."""
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(runs_table(folder))
    return {line.split()[0]: line for line in capture.get().splitlines()[2:] if line.strip()}


def test_row_shows_progress_curve_throughput_and_the_newest_error(tmp_path: Path) -> None:
    steps = [
        {"phase": "rl", "step": step, "reward/unfiltered_mean": step / 10, "perf/tokens_per_s": 1500.0, "eval/accuracy": 0.25}
        for step in range(1, 5)
    ]
    failed = [{"event": "restart", "message": "replica 0: killed"}, {"event": "error", "message": "trainer rank 1: no answer"}]
    run(tmp_path / "a", *steps, *failed)
    run(tmp_path / "group" / "b", {"phase": "sft", "step": 2, "sft/loss": 1.0})
    lines = rendered(tmp_path)
    for text in ("failed", "rl 4/10", "0.4", "▁▃▆█", "25.0%", "1.5k tok/s", "trainer rank 1: no answer"):
        assert text in lines["a"]
    assert "killed" not in lines["a"] and "sft 2/5" in lines["group/b"]


def test_unreadable_run_shows_its_fault_and_not_the_others(tmp_path: Path) -> None:
    broken = run(tmp_path / "a")
    (broken / "metrics.jsonl").write_text('{"session": 1}\nnonsense\n{"session": 1}\n')
    run(tmp_path / "b", {"phase": "rl", "step": 3})
    lines = rendered(tmp_path)
    assert "unreadable" in lines["a"] and "metrics.jsonl" in lines["a"]
    assert "rl 3/10" in lines["b"]


def test_watching_without_a_terminal_is_exit_code_2(mtpctl: Any, tmp_path: Path) -> None:
    result = mtpctl("runs", str(tmp_path), "--watch")
    assert (result.code, result.err) == (2, "error: --watch: needs a terminal, without --json; run it without a pipe\n")
