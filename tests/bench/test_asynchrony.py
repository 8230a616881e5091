"""Time to a fixed held-out accuracy: evaluations apart, interpolated between them, the level one that every arm reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.bench.arms import Experiment, Outcome
from mtpctl.bench.asynchrony import ARMS, accuracy, best_speedup, evaluated, server_gains, summarise, table, time_to
from mtpctl.plan import Placement
from mtpctl.plan.placement import Actor
from mtpctl.telemetry import History, Row

BY_NAME = {arm.name: arm for arm in ARMS}


def run(step_s: float, accuracies: list[float], *, evaluation_s: float = 5.0) -> History:
    """An update of `step_s` seconds before each accuracy but the first."""
    rows = []
    for step, value in enumerate(accuracies):
        metrics = {"eval/accuracy": value, "timing_s/evaluation": evaluation_s}
        if step:
            metrics |= {"timing_s/step": step_s, "async/overlap": 0.5, "timing_s/old_log_prob": 0.25}
        rows.append(Row("rl", step, float(step), 1, metrics))
    return History(rows, [])


def outcome(name: str, history: History, *, gpus: float = 2, seed: int = 0, wanted: int = 2) -> Outcome:
    return Outcome(BY_NAME[name], seed, history, Placement("cuda", (Actor("trainer", 0, 0, 0, 1, gpus),), 1), wanted)


def test_the_moment_is_read_off_the_line_between_evaluations() -> None:
    points = accuracy(run(10, [0.2, 0.4, 0.8]))
    assert points == [(0, 0.2), (10, 0.4), (20, 0.8)]
    assert time_to(points, 0.6) == pytest.approx(15)
    assert time_to(points, 0.1) == 0 and time_to(points, 0.9) is None


def test_evaluations_count_where_they_are_asked_for_and_the_first_never() -> None:
    assert accuracy(run(10, [0.2, 0.4, 0.8]), evaluations=True) == [(0, 0.2), (10, 0.4), (25, 0.8)]


def test_the_level_is_what_every_arm_of_a_seed_reaches() -> None:
    outcomes = [outcome("synchronous", run(10, [0, 0.5, 1.0])), outcome("partial", run(4, [0, 0.4, 0.8]))]
    results, levels = summarise(outcomes, None)
    assert levels == {0: 0.8}
    assert [r.to_level_s for r in results] == pytest.approx([16, 8])
    assert best_speedup(results) == pytest.approx(2)
    assert summarise(outcomes, 0.4)[1] == {0: 0.4}


def test_an_arm_that_was_cut_short_counts_up_to_what_it_reached() -> None:
    outcomes = [outcome("synchronous", run(10, [0, 0.4, 0.5, 1.0]), wanted=3), outcome("partial", run(4, [0, 0.5]), wanted=3)]
    results, levels = summarise(outcomes, None)
    assert levels == {0: 0.5} and best_speedup(results) == pytest.approx(5)
    assert [(r.updates, r.updates_wanted) for r in results] == [(3, 3), (1, 3)]
    text = table(results, levels)
    assert "| synchronous | 0 | 2 | 3 |" in text and "| partial | 0 | 2 | 1 of 3 |" in text


def test_an_arm_without_an_evaluation_after_an_update_sets_no_level() -> None:
    early = run(4, [0.0, 0.5])
    del early.rows[1].metrics["eval/accuracy"]
    results, levels = summarise([outcome("synchronous", run(10, [0, 0.8])), outcome("partial", early)], None)
    assert levels == {0: 0.8} and results[1].to_level_s is None


@pytest.mark.parametrize(("sets", "every"), [([], 8), (["train.rl.steps=6"], 1), (["train.eval_every=3"], 3)])
def test_a_recipe_without_evaluations_gets_ten(tmp_path: Path, sets: list[str], every: int) -> None:
    experiment = evaluated(Experiment("tiny_mtp", (), ["train.eval_every=0", *sets], tmp_path))
    assert experiment.load("stale-0", 0).train.eval_every == every


def test_speed_ups_are_per_unit_too() -> None:
    outcomes = [outcome("synchronous", run(10, [0, 1.0])), outcome("partial-server", run(4, [0, 1.0]), gpus=2.5)]
    # Half a card is a card that nobody else has.
    results, levels = summarise(outcomes, None)
    text = table(results, levels)
    assert "| partial-server | 0 | 3 | 1 of 2 |" in text and "2.50x | 1.67x" in text
    assert results[0].old_logprob_s == 0.25


def test_the_log_prob_server_is_compared_with_own_recompute_per_update_and_per_unit() -> None:
    outcomes = [outcome("partial", run(5, [0, 1.0]), gpus=3), outcome("partial-server", run(4, [0, 1.0]), gpus=4)]
    results, levels = summarise(outcomes, None)
    (gain,) = server_gains(results)
    assert (gain.update, gain.update_per_unit, gain.to_level) == pytest.approx((1.25, 0.9375, 1.25))
    assert "1.25x an update, 0.94x per unit, 1.25x to accuracy" in table(results, levels)
    assert server_gains(results[:1]) == []


def test_an_arm_that_never_gets_there_has_no_speed_up() -> None:
    """And is no arm that passes: of one that got there by one seed out of two, the other counts too."""
    results, levels = summarise([outcome("synchronous", run(1, [0, 0.5])), outcome("stale", run(1, [0, 0.2]))], 0.4)
    assert best_speedup(results) == 0 and "never" in table(results, levels)
    lucky = [outcome("synchronous", run(4, [0, 0.5]), seed=1), outcome("stale", run(1, [0, 0.5]), seed=1)]
    assert best_speedup([*results, *summarise(lucky, 0.4)[0]]) == pytest.approx(2)


def test_where_the_synchronous_arm_never_gets_there_nobody_can_say() -> None:
    results, _ = summarise([outcome("synchronous", run(1, [0, 0.2])), outcome("stale", run(1, [0, 0.5]))], 0.4)
    assert best_speedup(results) is None
