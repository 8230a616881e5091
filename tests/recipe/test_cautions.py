"""Which log-probs anchor the ratio, and what is told of combinations that are known to swing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.cli.app import main
from mtpctl.recipe.checks import cautions_of, validate
from mtpctl.recipe.loading import available, load_recipe
from mtpctl.recipe.rl import PRESETS

STALE = "async.staleness_threshold=1"
ON_POLICY = "async.staleness_threshold=0"
TRUNCATE = "train.rl.correction.mode=truncate"
STALE_GRPO = [STALE, "train.rl.preset=grpo", "train.rl.minibatches=1"]


@pytest.mark.parametrize(
    ("sets", "anchor"),
    [
        ([STALE], "behaviour"),
        ([ON_POLICY], "recompute"),
        ([STALE, "async.deterministic=true"], "recompute"),
        ([ON_POLICY, "async.sync_every=2"], "behaviour"),
        ([STALE, "logprob.standalone=true"], "recompute"),
        ([STALE, TRUNCATE], "recompute"),
        ([STALE, "train.rl.loss=decoupled"], "recompute"),
        ([STALE, "train.rl.old_logprobs=recompute"], "recompute"),
        ([ON_POLICY, "train.rl.old_logprobs=behaviour"], "behaviour"),
        ([STALE, "train.rl.loss=cispo"], "behaviour"),
        ([STALE, "train.rl.loss=sapo"], "behaviour"),
        ([STALE, "train.rl.loss=cispo", TRUNCATE], "recompute"),
    ],
)
def test_recompute_of_stale_samples_without_correction_is_cautioned(sets: list[str], anchor: str) -> None:
    recipe = load_recipe("tiny_mtp", sets=sets).recipe
    validate(recipe)
    assert recipe.old_logprobs == anchor


@pytest.mark.parametrize(
    ("sets", "caution"),
    [
        ([STALE, "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute, with correction.mode: off"),
        ([*STALE_GRPO, "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute, with correction.mode: off"),
        ([ON_POLICY, "async.sync_every=4", "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute"),
        ([STALE, "train.rl.loss=decoupled"], "train.rl.correction.mode: off leaves the importance weights"),
        ([STALE, "train.rl.loss=cispo", "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute, with correction.mode: off"),
        (["train.rl.loss=gspo"], "train.rl.clip_high: 0.28 clips almost nothing with loss: gspo"),
        (["sync.delta=true", "train.precision=fp32"], "sync.delta: an update changes almost every trained element in fp32"),
        (["train.rl.advantage=reinforce_pp"], "train.rl.dynamic_sampling: drops groups of equal rewards"),
        (["train.rl.preset=sapo", "train.rl.aggregate=token"], "train.rl.aggregate: token overrides sequence of preset: sapo"),
    ],
)
def test_unstable_settings_are_cautioned(sets: list[str], caution: str) -> None:
    result = list(cautions_of(load_recipe("tiny_mtp", sets=sets).recipe))
    assert len(result) == 1 and result[0].startswith(caution) and "\n" not in result[0]


@pytest.mark.parametrize(
    "sets",
    [
        [STALE],
        [ON_POLICY, "train.rl.old_logprobs=recompute"],
        [STALE, TRUNCATE],
        [*STALE_GRPO, "train.rl.old_logprobs=recompute", TRUNCATE],
        STALE_GRPO,
        [STALE, "train.rl.loss=decoupled", TRUNCATE],
        ["train.stages=[sft]", "train.rl.old_logprobs=recompute"],
    ],
)
def test_stable_settings_have_no_caution(sets: list[str]) -> None:
    assert not list(cautions_of(load_recipe("tiny_mtp", sets=sets).recipe))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_needs_none_and_fits(preset: str) -> None:
    recipe = load_recipe("tiny_mtp", sets=[f"train.rl.preset={preset}", "train.rl.overlong.buffer=8"]).recipe
    validate(recipe)
    assert not list(cautions_of(recipe))


@pytest.mark.parametrize("path", available(), ids=lambda path: path.stem)
def test_our_recipes_need_none(path: Path) -> None:
    assert not list(cautions_of(load_recipe(path).recipe))


def test_the_command_line_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--set", "train.rl.old_logprobs=recompute", "--set", "cluster.num_cpus=8"])
        assert not ended.value.code
        return capsys.readouterr().out

    for command in ("check", "validate"):
        assert "caution: train.rl.old_logprobs" in told("recipe", command, "tiny_mtp")
    assert len(json.loads(told("recipe", "check", "tiny_mtp", "--json"))["cautions"]) == 1
    assert "caution    train.rl.old_logprobs" in told("train", "tiny_mtp", "--dry-run")
