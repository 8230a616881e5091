"""What a notebook imports from mtpctl: a recipe, a run that is started, and runs that are read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mtpctl
from mtpctl import Run, api, find_runs, load_recipe, train
from mtpctl.errors import MtpctlError, RuntimeFailure, UserError
from mtpctl.recipe.loading import dump_resolved
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.sample_log import SampleLog
from tests.fakes.sample_rows import kept as sample


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two updates, of which each kept a sample."""
    recipe = load_recipe("tiny_mtp", sets=[f"run_dir={tmp_path / 'runs' / 'a'}", "seed=7"])
    RunDirectory.create(recipe.run_path, dump_resolved(recipe)).close()
    rows: list[dict[str, object]] = [{"phase": "sft", "step": 1, "sft/loss": 2.0}]
    rows += [{"phase": "rl", "step": step, "reward/mean": step / 4} for step in (1, 2)]
    rows.append({"event": "alarm", "message": "it swings"})
    lines = [json.dumps({"session": 1, "time": 1.0 + number, **each}) for number, each in enumerate(rows)]
    (recipe.run_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    log = SampleLog(recipe.run_path / "samples", session=1)
    log.write([sample(step, reward) for step, reward in ((1, 0.5), (2, None), (2, 0.25))])
    log.close()
    assert not log.warning
    return Run(recipe.run_path)


def test_recipe_is_loaded_with_sets_and_checked() -> None:
    recipe = load_recipe("tiny_mtp", overlays=[], sets=["train.rl.steps=3"])
    assert recipe.train.rl.steps == 3 and recipe.name == "tiny_mtp"
    with pytest.raises(UserError, match=r"train\.rl\.minibatches: 5 does not divide"):
        load_recipe("tiny_mtp", sets=["train.rl.minibatches=5"])


def test_a_run_is_read(run: Run, tmp_path: Path) -> None:
    assert run.recipe.seed == 7 and run.state == "broken off"
    assert [(row["phase"], row["step"]) for row in run.metrics()] == [("sft", 1), ("rl", 1), ("rl", 2)]
    assert run.metrics("rl")[1]["reward/mean"] == 0.5
    assert run.series("reward/mean") == [(1, 0.25), (2, 0.5)] and run.series("nothing") == []
    assert run.summary() == {"reward/mean": {"before": 0.25, "after": 0.5}}
    assert [event.message for event in run.events] == ["it swings"]
    assert [row["reward"] for row in run.samples()] == [0.5, None, 0.25]
    assert [row["reward"] for row in run.samples(worst=True)] == [0.25, 0.5] and len(run.samples(step=2)) == 2
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert [result.path for result in find_runs(tmp_path)] == [run.path]
    with pytest.raises(UserError, match="is not a run directory"):
        Run(tmp_path)


def test_train_runs_the_command_and_prints_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe that goes in is the one that the command gets, whether by name or as an object."""
    follow, commands = api._follow, list[list[str]]()

    def stand_in(command: list[str]) -> None:
        commands.append(command)
        said = load_recipe(command[4], sets=command[command.index("--set") + 1 :] if "--set" in command else [], check=False)
        RunDirectory.create(said.run_path, dump_resolved(said)).close()
        follow([sys.executable, "-c", "print('rl 1/3')"])

    monkeypatch.setattr(api, "_follow", stand_in)
    place = f"run_dir={tmp_path / 'b'}"
    first = train("tiny_mtp", sets=[place])
    assert (first.path, capsys.readouterr().out) == (tmp_path / "b", "rl 1/3\n")
    assert commands[0][1:5] == ["-m", "mtpctl", "train", "tiny_mtp"] and commands[0][-2:] == ["--set", place]
    recipe = load_recipe("tiny_mtp", sets=[f"run_dir={tmp_path / 'c'}", "seed=3"])
    second = train(recipe, start=first)
    assert second.recipe == recipe
    assert commands[1][-2:] == ["--from", str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("code", "error", "messages"),
    [
        (2, UserError, "seed: must be a number"),
        (130, RuntimeFailure, "stopped on request"),
        (143, RuntimeFailure, "stopped on request"),
        (1, MtpctlError, "seed: must be a number"),
    ],
)
def test_error_of_command_is_raised(code: int, error: type[MtpctlError], messages: str) -> None:
    program = f"import sys; print('error: seed: must be a number', file=sys.stderr); sys.exit({code})"
    with pytest.raises(error, match=messages):
        api._follow([sys.executable, "-c", program])


def test_the_import_is_light() -> None:
    heavy = ("torch", "ray", "vllm", "pydantic", "rich", "yaml", "numpy")
    program = f"import sys, mtpctl; assert 'train' in dir(mtpctl); a = {heavy!r}; print(*(n for n in a if n in sys.modules))"
    program += "; from mtpctl import Run, train; print(*(n for n in a[:3] if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mtpctl.nothing  # type: ignore[attr-defined]
