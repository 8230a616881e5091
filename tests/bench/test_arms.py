"""Every arm is a run of its own that begins where the warm start ended; what is finished is not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.bench.arms import WARM, Arm, Experiment, chosen
from mtpctl.errors import UserError
from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.telemetry.versions import collect_versions
from tests.fakes.checkpoint_folders import write_checkpoint

ARM = Arm("frozen", "", ("train.rl.train_mtp=false",))


def experiment(out: Path, *sets: str) -> Experiment:
    return Experiment("tiny_mtp", (), sets, out)


def converted(out: Path) -> Path:
    """A warm start's folder, as far as a recipe's checks look at it."""
    folder = out / f"{WARM}-0.hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_recipe("tiny_mtp").recipe.model.config))
    (folder / "model.safetensors").touch()
    return folder


def checkpoint(run: Path, name: str, ended: list[str]) -> None:
    write_checkpoint(run, name, ended=ended)
    (run / "versions.json").write_text(json.dumps(collect_versions()))


OTHERS = (ARM, Arm("trained", ""), Arm("none", ""))


def test_arms_are_named_or_are_all_of_them() -> None:
    assert chosen(OTHERS, None) == list(OTHERS)
    assert [arm.name for arm in chosen(OTHERS, ["none", "frozen"])] == ["frozen", "none"]


def test_an_arm_of_ones_own_is_a_name_and_the_keys_it_sets() -> None:
    asked = ["clip: async.staleness_threshold=2 'train.rl.correction={mode: truncate, high: 2.0}'", "trained", "as-it-is:"]
    trained, clip, plain = chosen(OTHERS, asked, own=True)
    assert trained.name == "trained" and plain == Arm("as-it-is", "the recipe as it is")
    assert (clip.name, clip.sets) == ("clip", ("async.staleness_threshold=2", "train.rl.correction={mode: truncate, high: 2.0}"))


@pytest.mark.parametrize(
    ("wanted", "own", "told"),
    [
        (["foo"], True, "there is no foo; the arms are frozen, trained, none; one of your own is NAME: KEY=VALUE …$"),
        (["foo: a=1"], False, "there is no foo: a=1; the arms are frozen, trained, none$"),
        (["frozen: a=1"], True, "'frozen' is no name for an arm of your own"),
        (["a: x=1", "a: x=2"], True, "'a' is no name for an arm of your own"),
        ([f"{WARM}: x=1"], True, "is no name for an arm of your own"),
        (["../a: x=1"], True, "'../a' is no name"),
        (["a: 'x=1"], True, "no closing quotation; write NAME: KEY=VALUE"),
    ],
)
def test_an_arm_that_cannot_be_is_told_in_one_line(wanted: list[str], own: bool, told: str) -> None:
    with pytest.raises(UserError, match=told):
        chosen(OTHERS, wanted, own=own)


def test_a_run_has_its_own_place_and_its_arms_keys(tmp_path: Path) -> None:
    recipe = experiment(tmp_path, "train.rl.steps=7").load("frozen-3", 3, ARM.sets)
    assert recipe.run_path == tmp_path / "frozen-3" and recipe.seed == 3
    assert recipe.train.rl.steps == 7 and not recipe.train.rl.train_mtp


def test_an_arm_begins_with_what_the_warm_start_left(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    start = experiment(tmp_path)._warm_start(0, say=print)
    recipe = experiment(tmp_path).load("frozen-0", 0, [*ARM.sets, *start])
    assert recipe.model.path == str(folder) and recipe.model.config is None
    assert recipe.model.init == "weights" and recipe.train.stages == ["rl"]


def test_without_a_supervised_stage_it_begins_with_the_recipes_model(tmp_path: Path) -> None:
    assert experiment(tmp_path, "train.stages=[rl]")._warm_start(0, say=print) == []


def test_what_is_finished_is_only_read(tmp_path: Path) -> None:
    converted(tmp_path)
    checkpoint(tmp_path / "frozen-0", "end", ["rl"])
    told: list[str] = []
    (outcome,) = experiment(tmp_path).run([ARM], [0], say=told.append)
    assert outcome.history.rows == [] and not (tmp_path / "frozen-0.log").exists()
    assert told == ["seed 0: frozen"]


def measured(out: Path, run: str, updates: int) -> None:
    """A run as its directory tells of it, some updates into its six."""
    folder = out / run
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(dump_resolved(experiment(out, "train.rl.steps=6").load(run, 0, ARM.sets)))
    (folder / "versions.json").write_text(json.dumps(collect_versions()))
    rows = [{"session": 1, "time": float(step), "phase": "rl", "step": step, "timing_s/step": 2.0} for step in range(1, updates + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_one_that_kept_no_checkpoint_is_finished_when_it_has_all_its_updates(tmp_path: Path) -> None:
    finished(tmp_path, "train.rl.steps=6", "train.keep_checkpoints=0")
    (outcome,) = experiment(tmp_path, "train.rl.steps=6", "train.keep_checkpoints=0").run([ARM], [0], say=print)
    assert outcome.updates == 6 and not (tmp_path / "frozen-0.log").exists()
    assert outcome.versions == collect_versions()


def finished(out: Path, *sets: str) -> None:
    """An arm after a warm start, to its end."""
    converted(out)
    measured(out, "frozen-0", 6)
    made = experiment(out, *sets)
    (out / "frozen-0" / "recipe.resolved.yaml").write_text(
        dump_resolved(made.load("frozen-0", 0, [*ARM.sets, *made._warm_start(0, say=print)]))
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [("train.rl.steps=4", "train.rl.steps 6, and 4 is asked for"), ("rollout.temperature=0.5", r"rollout.temperature 1\.0, and 0\.5")],
)
def test_a_finished_run_of_another_recipe_is_not_told_as_one_of_this(tmp_path: Path, more: str, told: str) -> None:
    sets = ("train.rl.steps=6", "train.keep_checkpoints=0")
    finished(tmp_path, *sets)
    with pytest.raises(UserError, match=rf"--out: .*frozen-0 was made with {told}.*; name another --out, or remove that run"):
        experiment(tmp_path, *sets, more).run([ARM], [0], say=print)
    assert not (tmp_path / "frozen-0.log").exists()


def warmed(out: Path, *sets: str) -> None:
    """A warm start that has ended, with the recipe that made it."""
    converted(out)
    run = out / f"{WARM}-0"
    checkpoint(run, "end", ["sft"])
    (run / "recipe.resolved.yaml").write_text(dump_resolved(experiment(out, *sets, "train.stages=[sft]").load(run.name, 0)))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("train.sft.steps=9", "train.sft.steps 8, and 9"),
        ("mtp.loss_scale=0.5", r"mtp.loss_scale 0\.\d+, and 0\.5"),
    ],
)
@pytest.mark.parametrize("both", [True, False], ids=["converted", "to be converted"])
def test_a_warm_start_of_another_recipe_is_not_taken(tmp_path: Path, more: str, told: str, both: bool) -> None:
    warmed(tmp_path, "train.sft.steps=8")
    if not both:
        (tmp_path / f"{WARM}-0.hf").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"--out: .*{WARM}-0 was made with {told} is asked for; .*remove that run and .*{WARM}-0\.hf"):
        experiment(tmp_path, "train.sft.steps=8", more).run([ARM], [0], say=print)
    assert not (tmp_path / f"{WARM}-0.log").exists() and not (tmp_path / "frozen-0.log").exists()


@pytest.mark.parametrize("more", ["train.rl.steps=3", "train.eval_every=7", "rollout.temperature=0.5", "async.sync_every=2"])
def test_a_warm_start_serves_every_recipe_that_differs_in_rl_alone(tmp_path: Path, more: str) -> None:
    warmed(tmp_path, "train.sft.steps=8")
    assert experiment(tmp_path, "train.sft.steps=8", more)._warm_start(0, say=print)


def test_what_is_measured_is_read_by_each_runs_own_recipe_and_nothing_starts(tmp_path: Path) -> None:
    measured(tmp_path, "frozen-3", 6)
    measured(tmp_path, "frozen-12", 2)
    measured(tmp_path, "frozen-13", 0)
    measured(tmp_path, "other-3", 1)
    (tmp_path / "frozen-14").mkdir()
    before = sorted(tmp_path.rglob("*"))
    told: list[str] = []
    outcomes = experiment(tmp_path).measured([ARM], None, say=told.append)
    assert [(o.seed, o.updates, o.wanted) for o in outcomes] == [(3, 6, 6), (12, 2, 6)]
    assert told == ["frozen-3: 6 updates", "frozen-12: 2 of 6 updates", "frozen-13: 0 of 6 updates, left out"]
    assert [o.seed for o in experiment(tmp_path).measured([ARM], [12], say=print)] == [12]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out .*holds no run with an update of the arms frozen; leave --measured-only out"):
        experiment(tmp_path / "none").measured([ARM], None, say=print)


def test_an_arm_that_the_recipe_does_not_allow_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.stages"):
        experiment(tmp_path, "train.stages=[sft]").run([ARM], [0], say=print)
    with pytest.raises(UserError):
        experiment(tmp_path, "rollout.max_tokens=0").run([ARM], [0], say=print)
    assert not list(tmp_path.iterdir())
