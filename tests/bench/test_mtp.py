"""Arms are read from their runs' metrics: drafts of the last updates are counted, gains are against the frozen drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtpctl.bench.arms import Outcome
from mtpctl.bench.mtp import ARMS, drafter_arms, figures, gain, summarise, table
from mtpctl.cli.app import app
from mtpctl.plan.placement import Placement
from mtpctl.recipe.loading import load_recipe
from mtpctl.telemetry.history import History, Row
from tests.bench.test_arms import measured

BY_NAME = {arm.name: arm for arm in ARMS}
NOWHERE = Placement("cpu", (), 0)


def run(rates: list[float], *, drafted: int = 1000, accuracy: tuple[float, float] = (0.25, 0.75)) -> History:
    """One update a rate: half of its two seconds with requests, 400 tokens."""
    rows = [Row("rl", 0, 0.0, 1, {"eval/accuracy": accuracy[0]})]
    for step, rate in enumerate(rates, start=1):
        metrics = {"timing_s/step": 2.0, "async/rollout_idle": 0.5, "rollout/tokens_per_s": 200.0}
        if drafted:
            metrics |= {
                "rollout/spec_drafted": float(drafted),
                "rollout/spec_accepted": rate * drafted,
                "rollout/spec_accept_rate": rate,
                "rollout/spec_accept_rate_1": rate,
                "rollout/spec_accept_length": 1 + rate,
                "mtp/expected_rate_1": rate - 0.01,
                "mtp/expected_rate_greedy_1": rate + 0.01,
            }
        rows.append(Row("rl", step, float(step), 1, metrics))
    rows[-1].metrics |= {"eval/accuracy": accuracy[1]} | ({"eval/spec_accept_rate": rates[-1]} if drafted else {})
    return History(rows, [])


def outcome(name: str, history: History, seed: int = 0) -> Outcome:
    return Outcome(BY_NAME[name], seed, history, NOWHERE, wanted=4)


def test_only_the_last_updates_count_and_seeds_are_pooled() -> None:
    outcomes = [outcome("trained", run([0.1, 0.1, 0.8, 0.9])), outcome("trained", run([0.2, 0.2, 0.6, 0.7]), seed=1)]
    (result,) = summarise(outcomes, last=2)
    assert (result.drafted, result.accepted, result.seeds, result.updates) == (4000, 3000, 2, [4, 4])
    assert result.acceptance == pytest.approx(0.75) and result.by_seed == pytest.approx([0.85, 0.65])
    assert result.by_position == pytest.approx([0.75]) and result.accept_length == pytest.approx(1.75)
    assert result.held_out_acceptance == pytest.approx(0.8)
    assert (result.accuracy_before, result.accuracy_after) == (0.25, 0.75)


def test_what_was_expected_stands_beside_what_was_served_by_the_drafts_that_were() -> None:
    greedy, sampled = (outcome("trained", run([0.5] * 2)) for _ in range(2))
    for each, expected in ((greedy, 0.51), (replace(sampled, draft_method="probabilistic"), 0.49)):
        (result,) = summarise([each], last=2)
        assert result.expected_by_position == pytest.approx([expected])
        assert "| 50.0% | " + f"{expected:.1%}" in table([result], 2)


def test_throughput_over_all_time_and_while_requests_are_there() -> None:
    (result,) = summarise([outcome("none", run([0.0, 0.0], drafted=0))], last=2)
    assert (result.tokens_per_s, result.tokens_per_busy_s) == (200, 400)
    assert result.acceptance is None and result.by_position == []


def test_the_gain_in_points_relative_and_in_standard_errors() -> None:
    results = summarise([outcome("frozen", run([0.5] * 3)), outcome("trained", run([0.6] * 3))], last=3)
    found = gain(results)
    assert found is not None
    assert found.points == pytest.approx(10) and found.relative == pytest.approx(0.2)
    assert found.standard_errors == pytest.approx(0.1 / ((0.5 * 0.5 + 0.6 * 0.4) / 3000) ** 0.5)
    assert gain(results[:1]) is None


def test_every_arm_is_a_row_and_a_curve() -> None:
    outcomes = [outcome("none", run([0.0, 0.0], drafted=0)), outcome("trained", run([0.4, 0.6]))]
    text = table(summarise(outcomes, last=2), 2)
    assert "| no speculation | 2 of 4 | – |" in text and "| drafter trained and synced | 2 of 4 | 50.0% (1000/2000)" in text
    assert "+0.0%" in text
    assert "trained" in figures(outcomes)


def test_arms_differ_in_the_mtp_layers_alone() -> None:
    keys = {text.partition("=")[0] for arm in ARMS for text in arm.sets}
    assert keys == {"rollout.speculation.num_tokens", "train.rl.train_mtp", "sync.sections"}


def test_arms_by_how_the_drafter_learns_and_drafts() -> None:
    arms = drafter_arms(["ce", "tv"], ["greedy", "probabilistic"], [1, 3], layers=1)
    assert [arm.name for arm in arms][:3] == ["ce-greedy-k1", "ce-probabilistic-k1", "tv-greedy-k1"] and len(arms) == 9
    recipe = load_recipe("tiny_mtp", sets=list(arms[-2].sets)).recipe
    assert (recipe.mtp.loss, recipe.mtp.repeat) == ("tv", 3)
    assert (recipe.rollout.speculation.draft_method, recipe.rollout.speculation.num_tokens) == ("probabilistic", 3)
    first = load_recipe("tiny_mtp", sets=list(arms[-1].sets)).recipe
    assert (arms[-1].name, first.mtp.loss, first.mtp.repeat, first.rollout.speculation.num_tokens) == ("first-k3", "ce", 1, 3)
    (own,) = drafter_arms(["tv"], ["greedy"], [3], layers=3)
    assert "mtp.repeat=1" in own.sets


@pytest.mark.parametrize(("drafted", "code"), [(1000.0, 0), (0.0, 6)])
def test_arms_that_drafted_nothing_hold_no_bound(tmp_path: Path, drafted: float, code: int) -> None:
    for arm in ("frozen", "trained"):
        measured(tmp_path, f"{arm}-0", 6)
        updates = run([0.5] * 6, drafted=int(drafted)).rows[1:]
        rows = [{"session": 1, "time": float(row.step), "phase": "rl", "step": row.step, **row.metrics} for row in updates]
        (tmp_path / f"{arm}-0" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = CliRunner().invoke(app, ["bench", "mtp", "tiny_mtp", "--measured-only", "--out", str(tmp_path)])
    assert told.exit_code == code, told.output
    assert ("the arm frozen drafted nothing" in told.output) == (code == 6)
