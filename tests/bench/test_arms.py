"""Arms start from the warm start's weights, and finished runs are reused if their recipe is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.bench import arms
from mtpctl.bench.arms import WARM_START, Arm, Experiment, _check_recipe, select_arms
from mtpctl.errors import UserError
from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.telemetry.metrics_file import Row
from mtpctl.telemetry.versions import collect_versions
from tests.fakes.bench_results import write_run
from tests.fakes.checkpoint_folders import write_checkpoint

ARM = Arm("frozen", "", ("train.rl.train_mtp=false",))


def experiment(out: Path, *sets: str) -> Experiment:
    return Experiment("tiny_mtp", (), sets, out)


def converted(out: Path) -> Path:
    """The converted folder of a warm start, with what the checks of a recipe read."""
    folder = out / f"{WARM_START}-0.hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_recipe("tiny_mtp").recipe.model.config))
    (folder / "model.safetensors").touch()
    return folder


def checkpoint(run: Path, name: str, ended: list[str]) -> None:
    write_checkpoint(run, name, ended=ended)
    (run / "versions.json").write_text(json.dumps(collect_versions()))


OTHERS = (ARM, Arm("trained", ""), Arm("none", ""))


def test_named_arms_or_all_are_selected() -> None:
    assert select_arms(OTHERS, None) == list(OTHERS)
    assert [arm.name for arm in select_arms(OTHERS, ["none", "frozen"])] == ["frozen", "none"]


def test_custom_arm_has_a_name_and_keys() -> None:
    texts = ["clip: async.staleness_threshold=2 'train.rl.correction={mode: truncate, high: 2.0}'", "trained", "as-it-is:"]
    trained, clip, plain = select_arms(OTHERS, texts, custom=True)
    assert trained.name == "trained" and plain == Arm("as-it-is", "the recipe as it is")
    assert (clip.name, clip.sets) == ("clip", ("async.staleness_threshold=2", "train.rl.correction={mode: truncate, high: 2.0}"))


@pytest.mark.parametrize(
    ("texts", "custom", "message"),
    [
        (["foo"], True, "there is no foo; the arms are frozen, trained, none; define a custom one as NAME: KEY=VALUE …$"),
        (["foo: a=1"], False, "there is no foo: a=1; the arms are frozen, trained, none$"),
        (["frozen: a=1"], True, "'frozen' cannot name a custom arm"),
        (["a: x=1", "a: x=2"], True, "'a' cannot name a custom arm"),
        ([f"{WARM_START}: x=1"], True, "cannot name a custom arm"),
        (["../a: x=1"], True, "'../a' cannot name"),
        (["a: 'x=1"], True, "no closing quotation; write NAME: KEY=VALUE"),
    ],
)
def test_invalid_arm_is_rejected(texts: list[str], custom: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        select_arms(OTHERS, texts, custom=custom)


def test_run_has_its_directory_and_the_keys_of_its_arm(tmp_path: Path) -> None:
    recipe = experiment(tmp_path, "train.rl.steps=7").load("frozen-3", 3, ARM.sets)
    assert recipe.run_path == tmp_path / "frozen-3" and recipe.seed == 3
    assert recipe.train.rl.steps == 7 and not recipe.train.rl.train_mtp


def test_arm_starts_from_the_converted_warm_start(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    start = experiment(tmp_path)._warm_start(0, report=print)
    recipe = experiment(tmp_path).load("frozen-0", 0, [*ARM.sets, *start])
    assert recipe.model.path == str(folder) and recipe.model.config is None
    assert recipe.model.init == "weights" and recipe.train.stages == ["rl"]


def test_arm_without_a_supervised_stage_starts_from_the_recipes_model(tmp_path: Path) -> None:
    assert experiment(tmp_path, "train.stages=[rl]")._warm_start(0, report=print) == []


def test_finished_run_is_not_started_again(tmp_path: Path) -> None:
    converted(tmp_path)
    checkpoint(tmp_path / "frozen-0", "end", ["rl"])
    messages: list[str] = []
    (outcome,) = experiment(tmp_path).run([ARM], [0], report=messages.append)
    assert outcome.history.rows == [] and not (tmp_path / "frozen-0.log").exists()
    assert messages == ["seed 0: frozen"]


def measured(out: Path, run: str, updates: int) -> None:
    """The directory of a run with `updates` of its six updates."""
    rows = [Row("rl", step, float(step), 1, {"timing_s/step": 2.0}) for step in range(1, updates + 1)]
    write_run(out / run, experiment(out, "train.rl.steps=6").load(run, 0, ARM.sets), rows)


def test_run_without_checkpoints_is_finished_after_all_updates(tmp_path: Path) -> None:
    finished(tmp_path, "train.rl.steps=6", "train.keep_checkpoints=0")
    (outcome,) = experiment(tmp_path, "train.rl.steps=6", "train.keep_checkpoints=0").run([ARM], [0], report=print)
    assert outcome.updates == 6 and not (tmp_path / "frozen-0.log").exists()
    assert outcome.versions == collect_versions()


def finished(out: Path, *sets: str) -> None:
    """A finished run of an arm after a warm start."""
    converted(out)
    measured(out, "frozen-0", 6)
    settings = experiment(out, *sets)
    (out / "frozen-0" / "recipe.resolved.yaml").write_text(
        dump_resolved(settings.load("frozen-0", 0, [*ARM.sets, *settings._warm_start(0, report=print)]))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [("train.rl.steps=4", "train.rl.steps 6, but 4 is requested"), ("rollout.temperature=0.5", r"rollout.temperature 1\.0, but 0\.5")],
)
def test_finished_run_of_another_recipe_is_rejected(tmp_path: Path, change: str, message: str) -> None:
    sets = ("train.rl.steps=6", "train.keep_checkpoints=0")
    finished(tmp_path, *sets)
    with pytest.raises(UserError, match=rf"--out: .*frozen-0 has {message}.*; name another --out, or remove that run"):
        experiment(tmp_path, *sets, change).run([ARM], [0], report=print)
    assert not (tmp_path / "frozen-0.log").exists()


def warmed(out: Path, *sets: str) -> None:
    """A finished warm start and its recipe."""
    converted(out)
    run = out / f"{WARM_START}-0"
    checkpoint(run, "end", ["sft"])
    (run / "recipe.resolved.yaml").write_text(dump_resolved(experiment(out, *sets, "train.stages=[sft]").load(run.name, 0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.sft.steps=9", "train.sft.steps 8, but 9"),
        ("mtp.loss_scale=0.5", r"mtp.loss_scale 0\.\d+, but 0\.5"),
    ],
)
@pytest.mark.parametrize("both", [True, False], ids=["converted", "to be converted"])
def test_warm_start_of_another_recipe_is_rejected(tmp_path: Path, change: str, message: str, both: bool) -> None:
    warmed(tmp_path, "train.sft.steps=8")
    if not both:
        (tmp_path / f"{WARM_START}-0.hf").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"--out: .*{WARM_START}-0 has {message} is requested; .*remove that run and .*{WARM_START}-0\.hf"):
        experiment(tmp_path, "train.sft.steps=8", change).run([ARM], [0], report=print)
    assert not (tmp_path / f"{WARM_START}-0.log").exists() and not (tmp_path / "frozen-0.log").exists()


@pytest.mark.parametrize("change", ["train.rl.steps=3", "train.eval_every=7", "rollout.temperature=0.5", "async.sync_every=2"])
def test_warm_start_is_reused_for_recipes_that_differ_only_in_rl(tmp_path: Path, change: str) -> None:
    warmed(tmp_path, "train.sft.steps=8")
    assert experiment(tmp_path, "train.sft.steps=8", change)._warm_start(0, report=print)


def test_measured_runs_are_read_by_their_own_recipes_without_starting_any(tmp_path: Path) -> None:
    measured(tmp_path, "frozen-3", 6)
    measured(tmp_path, "frozen-12", 2)
    measured(tmp_path, "frozen-13", 0)
    measured(tmp_path, "other-3", 1)
    (tmp_path / "frozen-14").mkdir()
    before = sorted(tmp_path.rglob("*"))
    messages: list[str] = []
    outcomes = experiment(tmp_path).load_outcomes([ARM], None, report=messages.append)
    assert [(o.seed, o.updates, o.requested_updates) for o in outcomes] == [(3, 6, 6), (12, 2, 6)]
    assert messages == ["frozen-3: 6 updates", "frozen-12: 2 of 6 updates", "frozen-13: 0 of 6 updates, skipped"]
    assert [o.seed for o in experiment(tmp_path).load_outcomes([ARM], [12], report=print)] == [12]
    assert sorted(tmp_path.rglob("*")) == before


def test_folder_without_runs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out .*contains no run with an update of the arms frozen; remove --measured-only"):
        experiment(tmp_path / "none").load_outcomes([ARM], None, report=print)


def test_arm_that_the_recipe_does_not_allow_is_rejected_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.stages"):
        experiment(tmp_path, "train.stages=[sft]").run([ARM], [0], report=print)
    with pytest.raises(UserError):
        experiment(tmp_path, "rollout.max_tokens=0").run([ARM], [0], report=print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changed_first", [True, False])
def test_finished_run_with_or_without_an_optional_section_is_another_recipe(tmp_path: Path, changed_first: bool) -> None:
    sets, lora = ("train.rl.steps=6", "train.keep_checkpoints=0"), ("train.lora={rank: 4}",)
    converted(tmp_path)
    measured(tmp_path, "frozen-0", 6)
    first, second = ((*sets, *lora), sets) if changed_first else (sets, (*sets, *lora))
    start = experiment(tmp_path)._warm_start(0, report=print)
    recipe = experiment(tmp_path, *first).load("frozen-0", 0, [*ARM.sets, *start])
    (tmp_path / "frozen-0" / "recipe.resolved.yaml").write_text(dump_resolved(recipe))
    with pytest.raises(UserError, match=r"frozen-0 has train\.lora"):
        experiment(tmp_path, *second).run([ARM], [0], report=print)


def test_unfinished_run_of_another_recipe_is_rejected_but_may_get_more_updates(tmp_path: Path) -> None:
    sets = ("train.rl.steps=6", "train.keep_checkpoints=0")
    finished(tmp_path, *sets)
    with pytest.raises(UserError, match=r"frozen-0 has rollout\.temperature 1\.0, but 0\.5"):
        experiment(tmp_path, *sets, "train.rl.steps=9", "rollout.temperature=0.5").run([ARM], [0], report=print)
    recipe = experiment(tmp_path, *sets, "train.rl.steps=9").load("frozen-0", 0, ARM.sets)
    _check_recipe(
        recipe.model_copy(update={"model": load_recipe(tmp_path / "frozen-0" / "recipe.resolved.yaml").recipe.model}),
        ignored_keys={
            ("train", "rl", "steps"),
            ("train", "stages"),
        },
    )


def test_run_that_was_killed_before_its_start_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "frozen-0").mkdir()
    (tmp_path / "frozen-0" / "recipe.resolved.yaml").write_text(dump_resolved(experiment(tmp_path).load("frozen-0", 0)))
    with pytest.raises(UserError, match="contains no run with an update"):
        experiment(tmp_path).load_outcomes([ARM], [0], report=print)


def test_stages_before_rl_and_an_adapter_are_part_of_the_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(arms, "_start_command", lambda arguments, log: commands.append(list(arguments)))
    monkeypatch.setattr(arms, "_wait_for", lambda running: None)
    experiment(tmp_path, "train.stages=[draft, sft, rl]", "train.draft.steps=2", "train.lora={rank: 4}")._warm_start(0, report=print)
    train, convert = commands
    assert load_recipe(train[1]).recipe.train.stages == ["draft", "sft"]
    assert convert[0] == "convert-hf" and convert[-1] == "--merge"


def test_files_of_arms_with_dots_in_their_names_are_separate(tmp_path: Path) -> None:
    assert {arms._log_of(tmp_path / name).name for name in ("lr1.5-0", "lr1.6-0")} == {"lr1.5-0.log", "lr1.6-0.log"}
