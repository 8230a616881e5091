"""A start of a run in an existing directory, up to its actors, which do nothing here."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtpctl.checkpoint.listing import write_latest
from mtpctl.controller import run, train
from mtpctl.controller.prepare import open_model
from mtpctl.controller.resume import check_model_folder_settings, describe_old_logprobs_change
from mtpctl.errors import ClusterResources, UserError
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.metrics_file import load_history
from mtpctl.telemetry.run_directory import RunDirectory
from tests.fakes.checkpoint_folders import write_checkpoint
from tests.fakes.runs import anywhere, recipe
from tests.fakes.toys import LLAMA_EAGLE3, toy_folder
from tests.fakes.trainer_group import FakeTrainerGroup

SFT = ("train.stages=[sft]", "train.sft.steps=4")


def test_completed_run_prints_its_summary_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an actor, and with its summary; the directory is left as it was."""
    home = tmp_path / "run"
    write_checkpoint(home, "sft-000004", ended=["sft"])
    monkeypatch.setattr(train, "cluster", None)
    monkeypatch.setattr(train, "prepare", None)
    assert train.run(recipe(home, *SFT, "train.sft.until_loss=0")) == 0
    assert "the run is complete (checkpoint sft-000004); raise train.sft.steps to continue" in capsys.readouterr().out
    assert not RunDirectory(home).recipe.exists()
    assert train.run(recipe(home, *SFT, "train.sft.until_loss=0.5", "train.sft.steps=9")) == 0, "it may have ended by its loss"
    assert "raise" not in capsys.readouterr().out
    trained = recipe(home, *SFT)
    RunDirectory(home).recipe.write_text(dump_resolved(trained))
    assert train.run(trained) == train.run(recipe(home, *SFT, "reward.function=math")) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if "the run is complete" in line)
    assert "recipe's" not in first
    assert second.endswith("; it was trained with another reward.function: set another `name` to train with this recipe's value")
    RunDirectory(home).recipe.unlink()
    with pytest.raises(TypeError):  # the stand-in for what starts a run
        train.run(recipe(home, *SFT, "train.sft.until_loss=0", "train.sft.steps=9", "cluster.num_cpus=2"))


def test_removing_a_begun_stage_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", "sft-000003", ended=[])
    with pytest.raises(UserError, match=r"train\.stages: .*sft-000003 is within sft.* train\.sft\.steps: 3 to end it there") as messages:
        train.run(recipe(tmp_path / "run", "train.stages=[rl]", "cluster.num_cpus=2"))
    assert "\n" not in str(messages.value)
    assert not RunDirectory(tmp_path / "run").recipe.exists(), "the directory is left as it was"


def test_rejected_recipe_is_not_recorded(tmp_path: Path) -> None:
    begun = recipe(tmp_path / "run", *SFT, "cluster.num_cpus=2")
    RunDirectory.create(begun.run_path, dump_resolved(begun)).close()
    with pytest.raises(UserError, match=r"rollout\.context: the model has \d+ positions, got 4096"):
        train.run(recipe(begun.run_path, *SFT, "cluster.num_cpus=2", "rollout.context=4096"))
    there = RunDirectory(begun.run_path)
    assert there.recipe.read_text() == dump_resolved(begun) and not list(there.logs.iterdir())


def test_missing_resources_are_reported_before_the_run_directory_is_created(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        page = f"telemetry.http={other.getsockname()[1]}"
        with pytest.raises(UserError, match=r"^telemetry\.http: cannot listen on 127\.0\.0\.1:"):
            train.run(recipe(tmp_path / "run", *SFT, "cluster.num_cpus=2", page))
    with pytest.raises(ClusterResources, match=r"5 CPUs are needed .* lower rollout\.replicas\.max: 4, or use a cluster that"):
        train.run(recipe(tmp_path / "run", "rollout.replicas={min: 1, max: 4}", "cluster.num_cpus=3"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("now", "messages"),
    [
        ("seed=1", "seed: is 1, but .*/model was created with 0; restore it"),
        ("model.config.hidden_size=128", r"model\.config\.hidden_size: is 128, but .*/model was created with 64"),
        ("model.config.extra=1", r"model\.config\.extra: is 1, but .*/model was created with None"),
    ],
)
def test_random_weights_of_another_recipe_are_rejected(tmp_path: Path, now: str, messages: str) -> None:
    """There is no checkpoint to compare with: the run ended before its first one."""
    begun = recipe(tmp_path / "run", *SFT, "cluster.num_cpus=2")
    with RunDirectory.create(begun.run_path, dump_resolved(begun)):
        open_model(begun, begun.run_path)
    check_model_folder_settings(begun, RunDirectory(begun.run_path))
    with pytest.raises(UserError, match=messages):
        train.run(recipe(begun.run_path, *SFT, "cluster.num_cpus=2", now))
    assert RunDirectory(begun.run_path).recipe.read_text() == dump_resolved(begun), "what is there is what its recipe says"


def test_drafter_of_another_recipe_is_rejected(tmp_path: Path) -> None:
    model = toy_folder({name: value for name, value in LLAMA_EAGLE3.items() if name != "drafter"}, tmp_path / "model", 0, "fp32")
    sets = [*SFT, "cluster.num_cpus=2", "model.config=null", "model.init=weights", f"model.path={model}", "model.drafter={}"]
    begun = recipe(tmp_path / "run", *sets)
    with RunDirectory.create(begun.run_path, dump_resolved(begun)):
        folder = open_model(begun, begun.run_path)
    assert folder.path == begun.run_path / "model_with_drafter" and open_model(begun, begun.run_path).shape == folder.shape
    check_model_folder_settings(begun, RunDirectory(begun.run_path))
    for key, now, before in (("seed", "1", "0"), ("model.drafter.layers", "2", "1")):
        with pytest.raises(UserError) as caught:
            check_model_folder_settings(recipe(begun.run_path, *sets, f"{key}={now}"), RunDirectory(begun.run_path))
        assert str(caught.value).startswith(f"{key}: is {now}, but {folder.path} was created with {before}; restore it")


@pytest.mark.parametrize("contents", [b"", b"name: x\n", b"name: \xff\n", b"seed: ["])
def test_damaged_recipe_of_a_run_is_a_one_line_error(tmp_path: Path, contents: bytes) -> None:
    begun = recipe(tmp_path / "run", *SFT, "cluster.num_cpus=2")
    with RunDirectory.create(begun.run_path, dump_resolved(begun)) as run:
        open_model(begun, begun.run_path)
    run.recipe.write_bytes(contents)
    with pytest.raises(UserError) as caught:
        train.run(begun)
    assert "\n" not in str(caught.value)


STALE = "async.staleness_threshold=0.5"


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (["train.rl.old_logprobs=recompute"], [], "is behaviour now, and was recompute before; set it to recompute"),
        (["async.staleness_threshold=0"], [], "is behaviour now, and was recompute before"),
        ([], [], ""),
        (["train.rl.old_logprobs=behaviour"], [], ""),
    ],
)
def test_changed_old_log_probs_are_reported(tmp_path: Path, then: list[str], now: list[str], said: str) -> None:
    """Also if the default has changed instead of the recipe: the run's resolved recipe contains the old default."""
    requested = recipe(tmp_path / "run", STALE, *now)
    assert describe_old_logprobs_change(requested, RunDirectory(requested.run_path)) == "", "there is no run yet"
    begun = recipe(tmp_path / "run", STALE, *then)
    RunDirectory.create(begun.run_path, dump_resolved(begun)).close()
    messages = describe_old_logprobs_change(requested, RunDirectory(requested.run_path))
    assert said in messages and bool(messages) == bool(said)


def test_actors_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of a joined cluster do not work on the machine of the command."""
    monkeypatch.chdir(tmp_path)
    messages: list[Path] = []

    class Trainer(FakeTrainerGroup):
        def __init__(self, recipe: Recipe, *args: Any) -> None:
            super().__init__(recipe, *args)
            messages.append(recipe.run_path)

        async def build(self, folder: Path) -> dict[str, Any]:
            messages.append(folder)
            return await super().build(folder)

        async def begin_stage(self, stage: str, reference: Path, *, resumed: bool) -> None:
            messages.append(reference)

        async def begin_save(self, path: Path) -> Path:
            messages.append(path)
            return await super().begin_save(path)

    monkeypatch.setattr(run, "TrainerGroup", Trainer)
    monkeypatch.setattr(run, "reserve_bundles", anywhere)
    monkeypatch.setattr(train, "cluster", lambda *_, **__: contextlib.nullcontext())
    assert train.run(recipe(Path("runs/here"), *SFT, "cluster.num_cpus=2", "train.sft.batch_size=1"), plain=True) == 0
    assert [path.relative_to(tmp_path / "runs" / "here") for path in messages] == [
        Path(),
        Path("model"),
        Path("reference"),
        Path("checkpoints/sft-000004-end"),
    ]
    assert "run_dir: runs/here" in (tmp_path / "runs" / "here" / "recipe.resolved.yaml").read_text(), "as it was written"


def test_run_without_its_directory_resumes_from_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Trainer(FakeTrainerGroup):
        async def publish_checkpoint(self, path: Path, keep: int, needed: Sequence[str]) -> None:
            write_latest(path)

    monkeypatch.setattr(run, "TrainerGroup", Trainer)
    monkeypatch.setattr(run, "reserve_bundles", anywhere)
    monkeypatch.setattr(train, "cluster", lambda *_, **__: contextlib.nullcontext())
    home, copy = tmp_path / "run", tmp_path / "copy"
    sets = (f"train.checkpoint_copy=file://{copy}", "cluster.num_cpus=2", "train.sft.batch_size=1", "train.sft.until_loss=0")
    assert train.run(recipe(home, *SFT, *sets), plain=True) == 0
    assert (copy / "checkpoints" / "sft-000004-end" / "files.json").is_file()
    shutil.rmtree(home)
    capsys.readouterr()
    assert train.run(recipe(home, *SFT, *sets, "train.sft.steps=6"), plain=True) == 0
    messages = capsys.readouterr().out
    assert f"fetching sft-000004-end, 0.0 MiB, from file://{copy}" in messages
    assert f"copy: sft-000004-end was fetched from file://{copy} in " in messages
    assert "resume: sft resumes after step 4, from sft-000004-end" in messages
    assert [row.step for row in load_history(home).rows] == [1, 2, 3, 4, 5, 6]
    assert (copy / "checkpoints" / "latest").read_text() == "sft-000006-end"


def test_path_of_a_model_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_model(recipe(tmp_path), tmp_path)
    named = recipe(tmp_path / "run", "model.config=null", "model.path=model", "model.init=weights")
    assert open_model(named, named.run_path).path == tmp_path / "model"
