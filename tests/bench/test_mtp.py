"""Acceptance of the last updates by arm, and the gain over the frozen drafter."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtpctl.bench.mtp import ARMS, compute_gain, format_table, make_drafter_arms, summarize
from mtpctl.cli.app import app
from mtpctl.recipe.loading import load_recipe
from tests.fakes.bench_results import drafting_run, mtp_outcome, write_run


def test_last_updates_of_all_seeds_are_pooled() -> None:
    outcomes = [
        mtp_outcome("trained", drafting_run([0.1, 0.1, 0.8, 0.9])),
        mtp_outcome("trained", drafting_run([0.2, 0.2, 0.6, 0.7]), seed=1),
    ]
    (result,) = summarize(outcomes, last_updates=2)
    assert (result.drafted, result.accepted, result.seeds, result.updates) == (4000, 3000, 2, [4, 4])
    assert result.acceptance == pytest.approx(0.75) and result.by_seed == pytest.approx([0.85, 0.65])
    assert result.by_position == pytest.approx([0.75]) and result.accept_length == pytest.approx(1.75)
    assert result.held_out_acceptance == pytest.approx(0.8)
    assert (result.accuracy_before, result.accuracy_after) == (0.25, 0.75)


def test_expected_acceptance_is_of_the_draft_method() -> None:
    greedy, sampled = (mtp_outcome("trained", drafting_run([0.5] * 2)) for _ in range(2))
    for each, expected in ((greedy, 0.51), (replace(sampled, draft_method="probabilistic"), 0.49)):
        (result,) = summarize([each], last_updates=2)
        assert result.expected_by_position == pytest.approx([expected])
        assert "| 50.0% | " + f"{expected:.1%}" in format_table([result], 2)


def test_throughput_is_over_all_time_and_over_time_with_requests() -> None:
    (result,) = summarize([mtp_outcome("none", drafting_run([0.0, 0.0], drafted=0))], last_updates=2)
    assert (result.tokens_per_s, result.tokens_per_busy_s) == (200, 400)
    assert result.acceptance is None and result.by_position == []


def test_gain_is_in_points_relative_and_in_standard_errors() -> None:
    results = summarize([mtp_outcome("frozen", drafting_run([0.5] * 3)), mtp_outcome("trained", drafting_run([0.6] * 3))], last_updates=3)
    difference = compute_gain(results)
    assert difference is not None
    assert difference.points == pytest.approx(10) and difference.relative == pytest.approx(0.2)
    assert difference.standard_errors == pytest.approx(0.1 / ((0.5 * 0.5 + 0.6 * 0.4) / 3000) ** 0.5)
    assert compute_gain(results[:1]) is None


def test_every_arm_is_a_row() -> None:
    outcomes = [mtp_outcome("none", drafting_run([0.0, 0.0], drafted=0)), mtp_outcome("trained", drafting_run([0.4, 0.6]))]
    text = format_table(summarize(outcomes, last_updates=2), 2)
    assert "| no speculation | 2 of 4 | – |" in text and "| drafter trained and synced | 2 of 4 | 50.0% (1000/2000)" in text
    assert "+0.0%" in text


def test_arms_differ_only_in_the_mtp_layers() -> None:
    keys = {text.partition("=")[0] for arm in ARMS for text in arm.sets}
    assert keys == {"rollout.speculation.num_tokens", "train.rl.train_mtp", "sync.sections"}


def test_arms_combine_loss_draft_method_and_number_of_drafts() -> None:
    arms = make_drafter_arms(["ce", "tv"], ["greedy", "probabilistic"], [1, 3], layers=1)
    assert [arm.name for arm in arms][:3] == ["ce-greedy-k1", "ce-probabilistic-k1", "tv-greedy-k1"] and len(arms) == 9
    recipe = load_recipe("tiny_mtp", sets=list(arms[-2].sets)).recipe
    assert (recipe.mtp.loss, recipe.mtp.repeat) == ("tv", 3)
    assert (recipe.rollout.speculation.draft_method, recipe.rollout.speculation.num_tokens) == ("probabilistic", 3)
    first = load_recipe("tiny_mtp", sets=list(arms[-1].sets)).recipe
    assert (arms[-1].name, first.mtp.loss, first.mtp.repeat, first.rollout.speculation.num_tokens) == ("first-k3", "ce", 1, 3)
    (several_layers,) = make_drafter_arms(["tv"], ["greedy"], [3], layers=3)
    assert "mtp.repeat=1" in several_layers.sets
    (block,) = make_drafter_arms(["tv"], ["greedy"], [3], layers=1, is_block=True)
    assert "mtp.repeat=3" in block.sets


@pytest.mark.parametrize(("drafted", "code"), [(1000.0, 0), (0.0, 6)])
def test_arm_that_drafted_nothing_misses_the_bound(tmp_path: Path, drafted: float, code: int) -> None:
    for arm in ("frozen", "trained"):
        recipe = load_recipe("tiny_mtp", sets=["train.rl.steps=6"]).recipe
        write_run(tmp_path / f"{arm}-0", recipe, drafting_run([0.5] * 6, drafted=int(drafted)).rows[1:])
    done = CliRunner().invoke(app, ["bench", "mtp", "tiny_mtp", "--measured-only", "--out", str(tmp_path)])
    assert done.exit_code == code, done.output
    assert ("the arm frozen drafted nothing" in done.output) == (code == 6)


@pytest.mark.parametrize(("frozen", "trained", "expected"), [(0.0, 0.0, 0.0), (1.0, 0.0, -math.inf), (0.0, 1.0, math.inf)])
def test_gain_without_variance_is_zero_or_infinite_in_its_direction(frozen: float, trained: float, expected: float) -> None:
    results = summarize(
        [mtp_outcome("frozen", drafting_run([frozen] * 2)), mtp_outcome("trained", drafting_run([trained] * 2))], last_updates=2
    )
    gain = compute_gain(results)
    assert gain is not None and gain.standard_errors == expected
    assert gain.relative == (expected if not frozen else -1.0)


def test_positions_are_in_numeric_order() -> None:
    outcome = mtp_outcome("trained", drafting_run([0.5] * 2))
    for row in outcome.history.rows:
        if "rollout/spec_drafted" in row.metrics:
            row.metrics.update({f"rollout/spec_accept_rate_{position}": 1 / position for position in range(1, 12)})
    (result,) = summarize([outcome], last_updates=2)
    assert result.by_position == pytest.approx([1 / position for position in range(1, 12)])
