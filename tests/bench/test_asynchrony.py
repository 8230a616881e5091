"""How well and how steadily each arm learns, and the seconds and updates until it holds the synchronous arm's accuracy."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from mtpctl.bench.arms import Experiment, Outcome
from mtpctl.bench.asynchrony import (
    ARMS,
    MARGIN,
    TOLERANCE,
    Result,
    as_json,
    best_speedup,
    by_arm,
    by_seconds,
    by_updates,
    evaluated,
    evaluations_of,
    server_gains,
    summarise,
)
from mtpctl.bench.asynchrony_tables import figures, table
from mtpctl.bench.document import text
from mtpctl.plan.placement import Actor, Placement
from mtpctl.telemetry.history import History, Row
from mtpctl.telemetry.summary import held_at

BY_NAME = {arm.name: arm for arm in ARMS}
SWINGING = "45 51 47 60 46 62 44 66 33 72 43 49 61 45 68 31 59 67 43 76 43"
ON_POLICY = "45 52 58 66 62 65 71 74 75 76 77 79 76 78 81 80 79 84 82 82 79"


def run(step_s: float, accuracies: list[float], *, evaluation_s: float = 5.0, every: int = 1) -> History:
    """`every` updates of `step_s` seconds before each accuracy but the first."""
    rows = [Row("rl", 0, 0.0, 1, {"eval/accuracy": accuracies[0], "timing_s/evaluation": evaluation_s})]
    for step in range(1, every * (len(accuracies) - 1) + 1):
        metrics = {"timing_s/step": step_s, "async/overlap": 0.5, "timing_s/old_log_prob": 0.25}
        if step % every == 0:
            metrics |= {"eval/accuracy": accuracies[step // every], "timing_s/evaluation": evaluation_s}
        rows.append(Row("rl", step, float(step), 1, metrics))
    return History(rows, [])


def recorded(percent: str, step_s: float) -> History:
    """A run of 80 updates with an evaluation every four."""
    return run(step_s, [float(value) / 100 for value in percent.split()], every=4)


def outcome(name: str, history: History, *, gpus: float = 2, seed: int = 0, wanted: int = 2) -> Outcome:
    trainer = Actor("trainer", 0, 0, 0, 1, gpus, cards=tuple(range(ceil(gpus))))
    return Outcome(BY_NAME[name], seed, history, Placement("cuda", (trainer,), 1), wanted)


def row(shown: str, begins: str) -> list[str]:
    """The cells of the first line of the tables that begins so."""
    line = next(line for line in shown.splitlines() if line.startswith(begins))
    return [cell.strip() for cell in line.strip("|").split("|")]


def swing_and_rise(seed: int = 0) -> list[Outcome]:
    return [
        outcome("synchronous", recorded(ON_POLICY, 1.85), seed=seed, wanted=80),
        outcome("partial", recorded(SWINGING, 1.22), seed=seed, wanted=80),
    ]


def test_evaluations_are_told_by_updates_and_by_seconds() -> None:
    history = run(10, [0.2, 0.4, 0.8])
    assert by_updates(history) == [(0, 0.2), (1, 0.4), (2, 0.8)]
    assert by_seconds(history) == [(0, 0.2), (10, 0.4), (20, 0.8)]


def test_the_time_of_evaluations_is_kept_apart_and_that_of_the_first_never_counts() -> None:
    assert [e.seconds_with_evaluations for e in evaluations_of(run(10, [0.2, 0.4, 0.8]))] == [0, 10, 25]


def test_an_update_after_an_evaluation_counts_as_the_others() -> None:
    """Its samples were made beside the evaluation, whose time is excluded; the wall time with evaluations has it as it was."""
    history = run(10, [0.2, 0.4, 0.6, 0.8], every=4)
    for step in (5, 9):
        history.rows[step].metrics["timing_s/step"] = 1.0
    found = evaluations_of(history)
    assert [e.seconds for e in found] == [0, 40, 80, 120]
    assert [e.seconds_with_evaluations for e in found] == [0, 40, 31 + 45, 31 + 31 + 50]


def test_the_first_update_waits_as_any_other_and_counts_as_it_is() -> None:
    history = run(10, [0.2, 0.4], every=4)
    history.rows[1].metrics["timing_s/step"] = 30.0
    assert [e.seconds for e in evaluations_of(history)] == [0, 60]


def test_an_accuracy_that_is_no_number_is_none() -> None:
    assert by_updates(run(10, [0.2, float("nan"), 0.8])) == [(0, 0.2), (2, 0.8)]


def test_a_run_that_swings_is_seen_for_what_it_is() -> None:
    """It crosses 70% first, twice, and by its best evaluation stands 8 points behind: by what it holds it has won nothing."""
    results, levels = summarise(swing_and_rise())
    steady, swinging = results
    assert levels == {0: pytest.approx(0.8175 - 0.02)}
    assert (steady.late_mean, steady.worst_fall, steady.best_accuracy) == pytest.approx((0.8175, 0.05, 0.84))
    assert (swinging.late_mean, swinging.worst_fall, swinging.best_accuracy) == pytest.approx((0.5725, 0.41, 0.76))
    assert swinging.held_updates is None and swinging.held_s is None and swinging.held_with_evaluations_s is None
    assert swinging.area and steady.area and steady.area - swinging.area > 0.15
    assert best_speedup(results) == 0
    assert row(table(results, levels, TOLERANCE), "| partial | 1 |")[9:] == ["never", "never", "0.00x"]


def test_the_level_is_held_at_an_update_and_after_seconds() -> None:
    """79.75%, from the evaluation at update 56 on up to the tolerance; read off the line from 78% at update 52."""
    (steady, _), _ = summarise(swing_and_rise())
    updates = 52 + 4 * 1.75 / 3
    assert steady.held_updates == pytest.approx(updates) and steady.held_s == pytest.approx(1.85 * updates)
    # Thirteen evaluations after an update lie before it, of 5 s each; what the line adds to them is read off the same way.
    assert steady.held_with_evaluations_s == pytest.approx(1.85 * updates + 5 * (12 + 1.75 / 3))


def test_without_tolerance_the_same_run_never_holds_it() -> None:
    (steady, _), _ = summarise(swing_and_rise(), tolerance=0.0)
    assert steady.late_mean == pytest.approx(0.8175) and steady.held_updates is None, "it ends at 79%"


def test_noise_of_256_problems_moves_the_moment_little_and_to_no_side() -> None:
    """Margin and tolerance are such that a run which rises steadily is told so: right in the mean, and seldom `never`."""
    drawn = random.Random(0)
    heights = [0.45 + 0.37 * (1 - math.exp(-i / 5)) for i in range(17)]
    truth = held_at(list(enumerate(heights)), sum(heights[-4:]) / 4 - MARGIN)
    found = []
    for _ in range(300):
        noisy = [drawn.gauss(p, math.sqrt(p * (1 - p) / 256)) for p in heights]
        found.append(summarise([outcome("synchronous", run(1, noisy))])[0][0].held_updates)
    held = [x for x in found if x is not None]
    assert len(held) > 0.97 * len(found)
    assert truth is not None and statistics.mean(held) == pytest.approx(truth, abs=0.6) and statistics.stdev(held) < 2


def test_a_level_that_is_asked_for_counts_for_every_seed() -> None:
    results, levels = summarise([*swing_and_rise(0), *swing_and_rise(1)], 0.76)
    assert levels == {0: 0.76, 1: 0.76}
    assert results[0].held_updates == 36 and "Levels, as asked for: 76.0% (seed 0), 76.0% (seed 1)." in table(
        results, levels, TOLERANCE, asked=True
    )


def test_without_a_synchronous_arm_the_level_is_the_lowest_ones() -> None:
    outcomes = [outcome("partial", run(4, [0, 0.7, 0.7, 0.7])), outcome("stale", run(4, [0, 0.5, 0.5, 0.5]))]
    results, levels = summarise(outcomes)
    assert levels == {0: pytest.approx(0.48)} and all(r.held_s is not None for r in results)
    assert "48.0% (seed 0, the lowest arm's)" in table(results, levels, TOLERANCE)
    assert best_speedup(results) is None


def test_an_arm_that_was_cut_short_is_told_up_to_where_it_came() -> None:
    """The areas are over what both made."""
    outcomes = [
        outcome("synchronous", run(10, [0, 0.4, 0.5, 1.0, 1.0]), wanted=4),
        outcome("partial", run(4, [0, 0.4, 0.5]), wanted=4),
    ]
    results, levels = summarise(outcomes)
    assert [(r.updates, r.updates_wanted, r.evaluations) for r in results] == [(4, 4, 4), (2, 4, 2)]
    assert results[0].area == results[1].area == pytest.approx((0.2 + 0.45) / 2)
    shown = table(results, levels, TOLERANCE)
    assert row(shown, "| partial | 0 | 2 of 4 |")[3:5] == ["2", "0.0%"]


def test_an_arm_without_an_evaluation_after_an_update_sets_no_level() -> None:
    early = run(4, [0.0, 0.5])
    del early.rows[1].metrics["eval/accuracy"]
    results, levels = summarise([outcome("synchronous", run(10, [0, 0.8, 0.8])), outcome("partial", early)])
    assert levels == {0: pytest.approx(0.78)} and results[1].late_mean is None and results[1].held_s is None
    assert row(table(results, levels, TOLERANCE), "| partial | 0 | 1 of 2 |")[4:] == ["–"] * 9 + ["0.00x", "0.00x"]
    results, levels = summarise([outcome("partial", early)])
    assert levels == {} and "none, since no run was evaluated" in table(results, levels, TOLERANCE)


def test_evaluations_at_other_steps_compare() -> None:
    """Of runs that were made before, or with another train.eval_every."""
    outcomes = [
        outcome("synchronous", run(2, [0.0, 0.2, 0.4, 0.8, 0.8], every=2)),
        outcome("partial", run(1, [0.0, 0.4, 0.8, 0.8], every=3)),
    ]
    results, _ = summarise(outcomes, 0.6)
    assert [r.held_updates for r in results] == pytest.approx([5, 4.5])
    assert best_speedup(results) == pytest.approx(10 / 4.5)


@pytest.mark.parametrize(("sets", "every"), [(["train.rl.steps=80"], 5), (["train.rl.steps=6"], 2), (["train.eval_every=3"], 3)])
def test_a_recipe_without_evaluations_gets_sixteen_or_one_every_two_updates(tmp_path: Path, sets: list[str], every: int) -> None:
    experiment = evaluated(Experiment("tiny_mtp", (), ["train.eval_every=0", *sets], tmp_path))
    loaded = experiment.load("stale-0", 0)
    assert loaded.train.eval_every == every and loaded.evaluation.wait


def test_seeds_are_summed_up_with_their_spread() -> None:
    outcomes = []
    for seed, late in enumerate((0.7, 0.8, 0.9)):
        outcomes.append(outcome("synchronous", run(4, [0.4, 0.8, 0.8, 0.8]), seed=seed))
        outcomes.append(outcome("partial", run(2, [0.4, late, late, late]), seed=seed))
    results, levels = summarise(outcomes)
    synchronous, partial = by_arm(results)
    assert synchronous.against is not None and synchronous.against.mean == 0
    assert partial.late_mean and (partial.late_mean.mean, partial.late_mean.least, partial.late_mean.most) == pytest.approx((0.8, 0.7, 0.9))
    assert partial.against and (partial.against.least, partial.against.most) == pytest.approx((-0.1, 0.1))
    assert (partial.seeds, partial.held) == (3, 2), "70% is below the level"
    # 78% on the way to 80% is reached at 0.95 of the first update, and on the way to 90% at 0.76.
    assert partial.speedup and (partial.speedup.least, partial.speedup.most) == pytest.approx((0, 2 * 0.95 / 0.76))
    assert best_speedup(results) == pytest.approx((0 + 2 + 2.5) / 3)
    cells = row(table(results, levels, TOLERANCE), "| partial | 3 |")
    assert cells[3:6] == ["80.0% (70.0% to 90.0%)", "+40.0 (+30.0 to +50.0)", "+0.0 (-10.0 to +10.0)"]
    assert cells[9].startswith("2 of 3: 1")


def test_speed_ups_are_per_unit_too() -> None:
    outcomes = [outcome("synchronous", run(10, [0, 1.0, 1.0])), outcome("partial-server", run(4, [0, 1.0, 1.0]), gpus=2.5)]
    # Half a card is a card that nobody else has.
    results, levels = summarise(outcomes)
    shown = table(results, levels, TOLERANCE)
    assert row(shown, "| partial-server | 0 | 2 | 2 |")[-2:] == ["2.50x", "1.67x"]
    assert row(shown, "| partial-server | 0 | 3 |")[4] == "0.25"


def test_the_log_prob_server_is_compared_with_own_recompute_per_update_and_per_unit() -> None:
    outcomes = [outcome("partial", run(5, [0, 1.0, 1.0]), gpus=3), outcome("partial-server", run(4, [0, 1.0, 1.0]), gpus=4)]
    results, levels = summarise(outcomes)
    (gain,) = server_gains(results)
    assert (gain.update, gain.update_per_unit, gain.to_level) == pytest.approx((1.25, 0.9375, 1.25))
    ratios = "(seed 0): 1.25x an update, 0.94x per unit, 1.25x to the held level"
    assert f"Log-prob server against the trainer's own recompute {ratios}" in table(results, levels, TOLERANCE)
    assert server_gains(results[:1]) == []


def test_without_a_recompute_the_server_is_compared_with_the_engines_own_log_probs() -> None:
    partial = replace(outcome("partial", run(5, [0, 1.0, 1.0])), old_logprobs="behaviour")
    results, levels = summarise([partial, outcome("partial-server", run(4, [0, 1.0, 1.0]))])
    assert server_gains(results)[0].without == "behaviour"
    assert "Log-prob server against the engine's own log-probs, where the trainer recomputes nothing (seed 0)" in table(
        results, levels, TOLERANCE
    )


def test_an_arm_that_never_holds_it_has_won_nothing() -> None:
    """And is no arm that passes: of one that held it by one seed out of two, the other counts too."""
    results, levels = summarise([outcome("synchronous", run(1, [0, 0.5, 0.5])), outcome("stale", run(1, [0, 0.6, 0.2]))], 0.4)
    assert best_speedup(results) == 0 and "never" in table(results, levels, TOLERANCE)
    lucky = [outcome("synchronous", run(4, [0, 0.5, 0.5]), seed=1), outcome("stale", run(1, [0, 0.5, 0.5]), seed=1)]
    assert best_speedup([*results, *summarise(lucky, 0.4)[0]]) == pytest.approx(2)


def test_where_the_synchronous_arm_never_holds_it_nobody_can_say() -> None:
    results, _ = summarise([outcome("synchronous", run(1, [0, 0.5, 0.2])), outcome("stale", run(1, [0, 0.5, 0.5]))], 0.4)
    assert best_speedup(results) is None


def test_the_page_shows_every_seed() -> None:
    one, two = figures(swing_and_rise()), figures([*swing_and_rise(0), *swing_and_rise(1)])
    assert one.count('class="raw ') == 0 and one.count('class="line ') == 4
    assert two.count('class="raw ') == 8 and two.count('class="line ') == 4


def test_the_document_holds_the_curves_themselves() -> None:
    outcomes = swing_and_rise()
    results, levels = summarise(outcomes)
    found = json.loads(text(as_json(outcomes, results, levels, TOLERANCE, {})))
    assert [len(curve["points"]) for curve in found["curves"]] == [21, 21]
    assert found["best_speedup"] == 0 and found["arms"][1]["speedup"]["mean"] == 0 and found["results"][1]["held_s"] is None
    assert {field for field in Result.__slots__} == set(found["results"][0])
