"""`benchmarks/everything.py`: its commands exist, and their outcomes become exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

import everything
from everything import ON_CPU, ON_GPU, Task
from mtpctl.bench.arms import Experiment
from mtpctl.bench.rollout_engines import TINY, write_cycle_model
from mtpctl.cli import bench
from tests.fakes.processes import runs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("task", [*ON_GPU, *ON_CPU], ids=lambda task: task.name)
def test_command_exists_and_its_recipe_is_valid(task: Task, tmp_path: Path) -> None:
    program, *arguments = task.words(tmp_path)
    if program != "mtpctl":
        assert (ROOT / program).is_file()
        assert set(re.findall(r"--[\w-]+", " ".join(arguments))) <= set(re.findall(r'"(--[\w-]+)"', (ROOT / program).read_text()))
        return
    group, name, *rest = arguments
    assert group == "bench"
    benches: Any = typer.main.get_command(bench.app)
    options = benches.commands[name].make_context(task.name, rest).params
    if "recipe" in options:
        if everything.CYCLE_MODEL in task.command:
            write_cycle_model(tmp_path / "cycle7b", TINY, acceptance=0.75, device="cpu")
        Experiment(options["recipe"], options["overlay"] or [], options["sets"] or [], tmp_path).load("probe", 0)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *codes: str, minutes: float = 1.0) -> int:
    """The exit code after a script for each of `codes`, which it runs."""
    tasks = []
    for number, code in enumerate(codes):
        script = tmp_path / f"{number}.py"
        script.write_text(code)
        tasks.append(Task(str(number), 0, minutes, str(script)))
    monkeypatch.setattr(everything, "ON_CPU", tasks)
    monkeypatch.setattr(sys, "argv", ["everything.py", "--on", "cpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        everything.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("codes", "code"),
    [(["print(1)"], 0), (["raise SystemExit(6)", "print(1)"], 6), (["raise SystemExit(5)", "raise SystemExit(6)"], 5)],
)
def test_exit_code_is_of_the_worst_measurement(
    codes: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, monkeypatch, *codes) == code
    assert (tmp_path / "out" / "0.out").exists() and "0: " in capsys.readouterr().out


def test_measurement_that_exceeds_its_minutes_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(p.pid)); p.wait()"
    assert run(tmp_path, monkeypatch, code, minutes=0.05) == 5
    assert "0: exceeded its minutes" in capsys.readouterr().out
    end = time.monotonic() + 10
    while runs(int(child.read_text())):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_plan_prints_commands_and_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(sys, "argv", ["everything.py", "--on", "gpu", "--only", "rl-7b-x4", "--plan", "--out", "here"])
    everything.main()
    assert capsys.readouterr().out.startswith(
        "rl-7b-x4 (4 GPUs, 8 min): mtpctl bench async mimo7b_mtp --overlay h200x4 --out here/rl-7b-x4"
    )
    monkeypatch.setattr(sys, "argv", ["everything.py", "--only", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        everything.main()


def test_measurement_that_needs_more_gpus_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["everything.py", "--on", "gpu", "--only", "rl-7b-x4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="5"):
        everything.main()
    assert capsys.readouterr().out == "rl-7b-x4: needs 4 GPUs\n"
