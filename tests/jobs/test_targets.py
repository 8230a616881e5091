"""A run directory can replace a recipe: its recipe is used, and changes are reported."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from mtpctl.controller import train
from mtpctl.errors import UserError
from mtpctl.jobs.targets import load_target
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.runs import leave_checkpoint, recipe
from tests.fakes.runs import run as model_run

run = model_run


@pytest.fixture
def trained(run: Path) -> Path:
    """A run that was started with another seed."""
    (run / "recipe.resolved.yaml").write_text(dump_resolved(recipe(run, "seed=5", "cluster.num_cpus=2")))
    return run


def test_run_target_keeps_its_recipe_and_lists_changes(trained: Path) -> None:
    as_it_was = load_target(trained)
    assert (as_it_was.recipe.seed, as_it_was.changed, as_it_was.run) == (5, (), trained)
    assert as_it_was.summary == f"{trained} resumes with its recipe"
    assert dump_resolved(as_it_was.recipe) == (trained / "recipe.resolved.yaml").read_text(), "a resumed run is no other recipe"
    steps = as_it_was.recipe.train.rl.steps
    result = load_target(trained, sets=["train.rl.steps=7", "seed=5"])
    assert result.summary == f"{trained} resumes with train.rl.steps: {steps} → 7"


def test_moved_run_uses_its_current_directory(trained: Path) -> None:
    moved = trained.rename(trained.with_name("moved: here"))
    result = load_target(moved)
    assert result.recipe.run_path == moved and result.changed == ()


def test_run_directory_can_be_changed_by_set(trained: Path) -> None:
    result = load_target(trained, sets=["run_dir=elsewhere"])
    assert result.recipe.run_path == Path("elsewhere") and result.changed == (f'run_dir: "{trained}" → "elsewhere"',)


def test_checkpoint_target_selects_its_run_and_weights(trained: Path) -> None:
    checkpoint = leave_checkpoint(trained, "rl-000003", 3)
    result = load_target(checkpoint)
    assert (result.run, result.weights, result.recipe.seed) == (trained, str(checkpoint), 5)


def test_train_resumes_a_run_and_reports_it_first(mtpctl: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Recipe] = []
    monkeypatch.setattr(train, "run", lambda recipe, plain: requested.append(recipe) or 0)
    message = mtpctl("train", str(trained), "--set", "train.rl.optimizer.lr=0.5")
    assert (message.code, requested[0].seed, requested[0].train.rl.optimizer.lr) == (0, 5, 0.5)
    assert message.err.startswith(f"{trained} resumes with train.rl.optimizer.lr: ") and message.err.endswith(" → 0.5\n")


def test_start_over_flag_keeps_the_earlier_run(mtpctl: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = leave_checkpoint(trained, "rl-000003", 3)
    shard = next(checkpoint.glob("*.distcp")).read_bytes()
    requested: list[Recipe] = []
    monkeypatch.setattr(train, "run", lambda recipe, plain: requested.append(recipe) or 0)
    message = mtpctl("train", str(trained), "--start-over")
    retained = trained.with_name(f"{trained.name}.1")
    assert (message.code, requested[0].run_path, requested[0].seed) == (0, trained, 5)
    assert message.err == f"{trained} starts over; the previous run was renamed to {retained}\n"
    assert next((retained / "checkpoints" / "rl-000003").glob("*.distcp")).read_bytes() == shard
    assert not (trained / "checkpoints").exists()
    for other, said in (
        ("--dry-run", "cannot be combined with --dry-run"),
        (f"--from={retained}", "cannot be combined with --from; name a new run_dir"),
    ):
        message = mtpctl("train", str(retained), "--start-over", other)
        assert (message.code, message.err) == (2, f"error: --start-over: {said}\n")


def test_train_and_diff_reject_checkpoints(mtpctl: Any, trained: Path) -> None:
    checkpoint = leave_checkpoint(trained, "rl-000003", 3)
    message = mtpctl("train", str(checkpoint))
    assert (message.code, message.err) == (
        2,
        f"error: {checkpoint} is a checkpoint of {trained}; name the run to use its newest checkpoint\n",
    )


def test_recipes_of_runs_are_shown_and_compared(mtpctl: Any, trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "recipe.resolved.yaml").write_text(dump_resolved(recipe(other, "seed=6", "cluster.num_cpus=2")))
    differences = json.loads(mtpctl("recipe", "diff", str(trained), str(other), "--json").out)
    assert differences.keys() == {"seed", "run_dir"} and differences["seed"] == {"first": 5, "second": 6}
    assert json.loads(mtpctl("recipe", "show", str(trained), "--resolved", "--json").out)["seed"] == 5


def test_rollout_takes_a_run_a_checkpoint_and_weights(mtpctl: Any, trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").touch()
    handed: list[tuple[int, str | None]] = []

    def generate(recipe: Recipe, *_: Any, from_weights: str | None, **__: Any) -> dict[str, Any]:
        handed.append((recipe.seed, from_weights))
        raise UserError("enough")

    monkeypatch.setattr("mtpctl.jobs.rollout.rollout", generate)
    checkpoint = leave_checkpoint(trained, "rl-000003", 3)
    for target in (trained, checkpoint, trained / "model"):
        assert mtpctl("rollout", str(target), "--prompts", "p.jsonl", "--out", "o.jsonl").err == "error: enough\n"
    mtpctl("rollout", str(trained), "--prompts", "p.jsonl", "--out", "o.jsonl", "--from", "x")
    assert handed == [(5, None), (5, str(checkpoint)), (0, str(trained / "model")), (5, "x")]


def test_sync_weights_takes_a_run_with_its_weights(mtpctl: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[tuple[int, Path | None]] = []

    def sync(recipe: Recipe, weights: tuple[Path, Path] | None, *_: Any, **__: Any) -> Any:
        handed.append((recipe.seed, weights and weights[1]))
        raise UserError("enough")

    monkeypatch.setattr("mtpctl.jobs.sync.sync_manually", sync)
    mtpctl("sync-weights", str(trained), "--json")
    newest = leave_checkpoint(trained, "rl-000003", 3)
    for arguments in ((str(trained),), ("--from", str(trained)), (str(newest),)):
        assert mtpctl("sync-weights", *arguments, "--json").err == "error: enough\n"
    assert handed == [(5, None), (5, newest), (5, newest), (5, newest)]
    assert mtpctl("sync-weights").err == "error: RECIPE: name a recipe or a run, or a run with --from\n"


def test_moved_run_can_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--set name=…` without a run_dir creates another run, wherever the first one was moved."""
    monkeypatch.chdir(tmp_path)
    begun = recipe(tmp_path, "cluster.num_cpus=2", "name=a", "run_dir=runs/{name}")
    lies = tmp_path / "disk" / "a"
    lies.mkdir(parents=True)
    (lies / "recipe.resolved.yaml").write_text(dump_resolved(begun))
    assert load_target(lies).recipe.run_path == lies and load_target(lies).changed == ()
    result = load_target(lies, sets=["name=b"])
    assert result.recipe.run_path == tmp_path / "disk" / "b"
    assert result.summary == f'{tmp_path / "disk" / "b"} begins with the recipe of {lies} and name: "a" → "b"'


def test_copied_run_has_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, copy = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    first.mkdir(parents=True)
    (first / "recipe.resolved.yaml").write_text(dump_resolved(recipe(tmp_path, "cluster.num_cpus=2", "name=a", "run_dir=runs/{name}")))
    shutil.copytree(first, copy)
    result = load_target(copy, sets=["seed=9"])
    assert (result.recipe.name, result.recipe.run_dir) == ("b", "runs/{name}")
    assert result.summary == f"{copy} resumes with seed: 0 → 9"
    (copy / "recipe.resolved.yaml").write_text(dump_resolved(result.recipe))
    assert load_target(copy, sets=["name=c"]).recipe.run_path.absolute() == tmp_path / "runs" / "c"
    elsewhere = copy.rename(tmp_path / "d")
    assert (load_target(elsewhere).recipe.name, load_target(elsewhere).recipe.run_path) == ("d", elsewhere)
    assert load_target(elsewhere, sets=["name=e"]).recipe.run_path == tmp_path / "e"


def test_a_new_run_begins_from_the_weights_of_another(mtpctl: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Recipe] = []
    monkeypatch.setattr(train, "run", lambda recipe, plain: requested.append(recipe) or 0)
    converted: list[list[str]] = []

    def convert(command: list[str], **_: Any) -> Any:
        converted.append(command[4:])
        shutil.copytree(trained / "model", command[5])
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr("mtpctl.jobs.targets.subprocess.run", convert)
    checkpoint = leave_checkpoint(trained, "rl-000003", 3)
    new = trained.with_name("new")
    message = mtpctl("train", "--from", str(trained), "--set", f"run_dir={new}", "--set", "train.rl.optimizer.lr=0.5")
    assert message.code == 0, message.err
    assert converted == [[str(checkpoint), str(new / "start"), "--force"]]
    (started,) = requested
    assert (started.model.path, started.model.config, started.model.init) == (str(new / "start"), None, "weights")
    assert (started.seed, started.train.rl.optimizer.lr, started.run_path) == (5, 0.5, new)
    first, second = message.err.splitlines()
    assert first.startswith(f"{new} begins with the recipe of {trained} and ") and "model." not in first
    assert second == f"{new} begins from the weights of {trained}, rl-000003"


def test_start_weights_move_with_the_run(trained: Path) -> None:
    shutil.copytree(trained / "model", trained / "start")
    began = recipe(trained, "model.config=null", "model.init=weights", f"model.path={trained / 'start'}", "cluster.num_cpus=2")
    (trained / "recipe.resolved.yaml").write_text(dump_resolved(began))
    assert load_target(trained).recipe.model.path == str(trained / "start")
    moved = trained.rename(trained.with_name("moved"))
    assert load_target(moved).recipe.model.path == str(moved / "start") and load_target(moved).changed == ()


def test_weights_folder_is_used_in_place(mtpctl: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Recipe] = []
    monkeypatch.setattr(train, "run", lambda recipe, plain: requested.append(recipe) or 0)
    new, folder = trained.with_name("new"), trained / "model"
    sets = [part for each in (f"run_dir={new}", "cluster.num_cpus=2") for part in ("--set", each)]
    assert mtpctl("train", str(trained), "--from", str(folder), *sets).code == 0
    assert (requested[0].model.path, new.exists()) == (str(folder), False)
    message = mtpctl("train", "--from", str(folder))
    assert (message.code, message.err) == (2, f"error: --from: {folder} contains no recipe; name a recipe before it\n")


def test_begun_run_rejects_other_weights(mtpctl: Any, trained: Path) -> None:
    leave_checkpoint(trained, "rl-000003", 3)
    message = mtpctl("train", "--from", str(trained))
    assert message.code == 2 and message.err.startswith(f"error: --from: {trained} is an existing run; name a new one with --set ")
