"""Learning measures of the arms, and the time until they hold the synchronous arm's accuracy."""

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
    LEVEL_MARGIN,
    LEVEL_TOLERANCE,
    Result,
    Spread,
    compute_server_gains,
    curve_by_seconds,
    curve_by_updates,
    extract_evaluations,
    find_best_speedup,
    format_table,
    summarize,
    summarize_arms,
    to_document,
    with_evaluations,
)
from mtpctl.bench.report import to_json
from mtpctl.plan.placement import Actor, Placement
from mtpctl.telemetry.metrics_file import History, Row
from mtpctl.telemetry.summary import sustained_from

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
    trainer = Actor("trainer", 0, 0, 0, 1, gpus, gpu_ids=tuple(range(ceil(gpus))))
    return Outcome(BY_NAME[name], seed, history, Placement("cuda", (trainer,), 1), wanted)


def row(text: str, start: str) -> list[str]:
    """The cells of the first line of the tables with this start."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def swing_and_rise(seed: int = 0) -> list[Outcome]:
    return [
        outcome("synchronous", recorded(ON_POLICY, 1.85), seed=seed, wanted=80),
        outcome("partial", recorded(SWINGING, 1.22), seed=seed, wanted=80),
    ]


def test_accuracies_are_by_updates_and_by_seconds() -> None:
    history = run(10, [0.2, 0.4, 0.8])
    assert curve_by_updates(history) == [(0, 0.2), (1, 0.4), (2, 0.8)]
    assert curve_by_seconds(history) == [(0, 0.2), (10, 0.4), (20, 0.8)]


def test_time_of_evaluations_is_separate_and_that_of_the_first_does_not_count() -> None:
    assert [e.seconds_with_evaluations for e in extract_evaluations(run(10, [0.2, 0.4, 0.8]))] == [0, 10, 25]


def test_update_after_an_evaluation_counts_as_the_mean_of_the_others() -> None:
    """Its samples were generated during the evaluation, whose time is excluded. The wall time with evaluations is unchanged."""
    history = run(10, [0.2, 0.4, 0.6, 0.8], every=4)
    for step in (5, 9):
        history.rows[step].metrics["timing_s/step"] = 1.0
    evaluations = extract_evaluations(history)
    assert [e.seconds for e in evaluations] == [0, 40, 80, 120]
    assert [e.seconds_with_evaluations for e in evaluations] == [0, 40, 31 + 45, 31 + 31 + 50]


def test_first_update_counts_with_its_own_time() -> None:
    history = run(10, [0.2, 0.4], every=4)
    history.rows[1].metrics["timing_s/step"] = 30.0
    assert [e.seconds for e in extract_evaluations(history)] == [0, 60]


def test_nan_accuracy_is_ignored() -> None:
    assert curve_by_updates(run(10, [0.2, float("nan"), 0.8])) == [(0, 0.2), (2, 0.8)]


def test_oscillating_run_holds_no_level() -> None:
    """It reaches 70% first, and twice, and its best evaluation is 8 points behind; but it never holds a level."""
    results, levels = summarize(swing_and_rise())
    steady, swinging = results
    assert levels == {0: pytest.approx(0.8175 - 0.02)}
    assert (steady.late_mean, steady.worst_fall, steady.best_accuracy) == pytest.approx((0.8175, 0.05, 0.84))
    assert (swinging.late_mean, swinging.worst_fall, swinging.best_accuracy) == pytest.approx((0.5725, 0.41, 0.76))
    assert swinging.held_updates is None and swinging.held_s is None and swinging.held_with_evaluations_s is None
    assert swinging.area and steady.area and steady.area - swinging.area > 0.15
    assert find_best_speedup(results) == 0
    assert row(format_table(results, levels, LEVEL_TOLERANCE), "| partial | 1 |")[8:] == ["never", "never", "0 of 1", "-24.5", "0.00x"]


def test_sustained_level_reports_its_update_and_seconds() -> None:
    """79.75%, within the tolerance from the evaluation at update 56 on; interpolated from 78% at update 52."""
    (steady, _), _ = summarize(swing_and_rise())
    updates = 52 + 4 * 1.75 / 3
    assert steady.held_updates == pytest.approx(updates) and steady.held_s == pytest.approx(1.85 * updates)
    # Thirteen evaluations of 5 s come before it, the last of them interpolated as well.
    assert steady.held_with_evaluations_s == pytest.approx(1.85 * updates + 5 * (12 + 1.75 / 3))


def test_same_run_holds_no_level_without_tolerance() -> None:
    (steady, _), _ = summarize(swing_and_rise(), tolerance=0.0)
    assert steady.late_mean == pytest.approx(0.8175) and steady.held_updates is None, "it ends at 79%"


def test_noise_of_256_problems_does_not_bias_the_update_of_a_sustained_level() -> None:
    """With margin and tolerance, a run that rises steadily is right in the mean and rarely `never`."""
    generator = random.Random(0)
    heights = [0.45 + 0.37 * (1 - math.exp(-i / 5)) for i in range(17)]
    truth = sustained_from(list(enumerate(heights)), sum(heights[-4:]) / 4 - LEVEL_MARGIN)
    updates = []
    for _ in range(300):
        noisy = [generator.gauss(p, math.sqrt(p * (1 - p) / 256)) for p in heights]
        updates.append(summarize([outcome("synchronous", run(1, noisy))])[0][0].held_updates)
    moments = [x for x in updates if x is not None]
    assert len(moments) > 0.97 * len(updates)
    assert truth is not None and statistics.mean(moments) == pytest.approx(truth, abs=0.6) and statistics.stdev(moments) < 2


def test_explicit_level_applies_to_every_seed() -> None:
    results, levels = summarize([*swing_and_rise(0), *swing_and_rise(1)], 0.76)
    assert levels == {0: 0.76, 1: 0.76}
    assert results[0].held_updates == 36 and "Levels, as given: 76.0% (seed 0), 76.0% (seed 1)." in format_table(
        results, levels, LEVEL_TOLERANCE, is_level_given=True
    )


def test_level_without_a_synchronous_arm_is_the_lowest_arms() -> None:
    outcomes = [outcome("partial", run(4, [0, 0.7, 0.7, 0.7])), outcome("stale", run(4, [0, 0.5, 0.5, 0.5]))]
    results, levels = summarize(outcomes)
    assert levels == {0: pytest.approx(0.48)} and all(r.held_s is not None for r in results)
    assert "48.0% (seed 0, the lowest arm's)" in format_table(results, levels, LEVEL_TOLERANCE)
    assert find_best_speedup(results) is None


def test_unfinished_arm_is_compared_over_common_updates() -> None:
    outcomes = [
        outcome("synchronous", run(10, [0, 0.4, 0.5, 1.0, 1.0]), wanted=4),
        outcome("partial", run(4, [0, 0.4, 0.5]), wanted=4),
    ]
    results, levels = summarize(outcomes)
    assert [(r.updates, r.updates_wanted, r.evaluations) for r in results] == [(4, 4, 4), (2, 4, 2)]
    assert results[0].area == results[1].area == pytest.approx((0.2 + 0.45) / 2)
    text = format_table(results, levels, LEVEL_TOLERANCE)
    assert row(text, "| partial | 0 | 2 of 4 |")[3:5] == ["2", "0.0%"]


def test_arm_without_an_evaluation_after_an_update_sets_no_level() -> None:
    early = run(4, [0.0, 0.5])
    del early.rows[1].metrics["eval/accuracy"]
    results, levels = summarize([outcome("synchronous", run(10, [0, 0.8, 0.8])), outcome("partial", early)])
    assert levels == {0: pytest.approx(0.78)} and results[1].late_mean is None and results[1].held_s is None
    assert row(format_table(results, levels, LEVEL_TOLERANCE), "| partial | 0 | 1 of 2 |")[4:] == ["–"] * 9 + ["0.00x", "0.00x"]
    results, levels = summarize([outcome("partial", early)])
    assert levels == {} and "none, since no run was evaluated" in format_table(results, levels, LEVEL_TOLERANCE)


def test_arms_with_different_evaluation_intervals_compare() -> None:
    outcomes = [
        outcome("synchronous", run(2, [0.0, 0.2, 0.4, 0.8, 0.8], every=2)),
        outcome("partial", run(1, [0.0, 0.4, 0.8, 0.8], every=3)),
    ]
    results, _ = summarize(outcomes, 0.6)
    assert [r.held_updates for r in results] == pytest.approx([5, 4.5])
    assert find_best_speedup(results) == pytest.approx(10 / 4.5)


@pytest.mark.parametrize(("sets", "every"), [(["train.rl.steps=80"], 5), (["train.rl.steps=6"], 2), (["train.eval_every=3"], 3)])
def test_recipe_without_evaluations_gets_sixteen_or_one_every_two_updates(tmp_path: Path, sets: list[str], every: int) -> None:
    experiment = with_evaluations(Experiment("tiny_mtp", (), ["train.eval_every=0", *sets], tmp_path))
    loaded = experiment.load("stale-0", 0)
    assert loaded.train.eval_every == every and loaded.evaluation.wait


def test_seeds_are_summarised_with_their_spread() -> None:
    outcomes = []
    for seed, late in enumerate((0.7, 0.8, 0.9)):
        outcomes.append(outcome("synchronous", run(4, [0.4, 0.8, 0.8, 0.8]), seed=seed))
        outcomes.append(outcome("partial", run(2, [0.4, late, late, late]), seed=seed))
    results, levels = summarize(outcomes)
    synchronous, partial = summarize_arms(results)
    assert synchronous.spreads["against"] == Spread(0, 0, 0)
    late_mean, against, ratio = (partial.spreads[name] for name in ("late_mean", "against", "speedup"))
    assert late_mean and (late_mean.mean, late_mean.least, late_mean.most) == pytest.approx((0.8, 0.7, 0.9))
    assert against and (against.least, against.most) == pytest.approx((-0.1, 0.1))
    assert (partial.seeds, partial.held) == (3, 2), "70% is below the level"
    # 78% on the line to 80% is reached at 0.95 of the first update, and on the line to 90% at 0.76.
    assert ratio and (ratio.least, ratio.most) == pytest.approx((0, 2 * 0.95 / 0.76))
    assert find_best_speedup(results) == pytest.approx((0 + 2 + 2.5) / 3)
    cells = row(format_table(results, levels, LEVEL_TOLERANCE), "| partial | 3 |")
    assert cells[3:5] == ["80.0% (70.0% to 90.0%)", "+40.0 (+30.0 to +50.0)"]
    assert cells[10:12] == ["2 of 3", "+0.0 (-10.0 to +10.0)"]


def test_speedup_is_also_per_unit() -> None:
    outcomes = [outcome("synchronous", run(10, [0, 1.0, 1.0])), outcome("partial-server", run(4, [0, 1.0, 1.0]), gpus=2.5)]
    # Half a GPU counts as a whole one, since no other process uses the rest.
    results, levels = summarize(outcomes)
    text = format_table(results, levels, LEVEL_TOLERANCE)
    assert row(text, "| partial-server | 0 | 2 | 2 |")[-2:] == ["2.50x", "1.67x"]
    assert row(text, "| partial-server | 0 | 3 |")[4] == "0.25"


def test_logprob_server_is_compared_with_the_recompute_per_update_and_per_unit() -> None:
    outcomes = [outcome("partial", run(5, [0, 1.0, 1.0]), gpus=3), outcome("partial-server", run(4, [0, 1.0, 1.0]), gpus=4)]
    results, levels = summarize(outcomes)
    (gain,) = compute_server_gains(results)
    assert (gain.update, gain.update_per_unit, gain.to_level) == pytest.approx((1.25, 0.9375, 1.25))
    ratios = "(seed 0): 1.25x an update, 0.94x per unit, 1.25x to the held level"
    assert f"Log-prob server against the trainer's own recompute {ratios}" in format_table(results, levels, LEVEL_TOLERANCE)
    assert compute_server_gains(results[:1]) == []


def test_logprob_server_is_compared_with_the_engines_log_probs_without_a_recompute() -> None:
    partial = replace(outcome("partial", run(5, [0, 1.0, 1.0])), old_logprobs="behaviour")
    results, levels = summarize([partial, outcome("partial-server", run(4, [0, 1.0, 1.0]))])
    assert compute_server_gains(results)[0].without == "behaviour"
    assert "Log-prob server against the engine's own log-probs, where the trainer recomputes nothing (seed 0)" in format_table(
        results, levels, LEVEL_TOLERANCE
    )


def test_seed_that_never_holds_the_level_has_speedup_zero() -> None:
    """And counts in the mean of an arm that holds the level with another seed."""
    results, levels = summarize([outcome("synchronous", run(1, [0, 0.5, 0.5])), outcome("stale", run(1, [0, 0.6, 0.2]))], 0.4)
    assert find_best_speedup(results) == 0 and "never" in format_table(results, levels, LEVEL_TOLERANCE)
    lucky = [outcome("synchronous", run(4, [0, 0.5, 0.5]), seed=1), outcome("stale", run(1, [0, 0.5, 0.5]), seed=1)]
    assert find_best_speedup([*results, *summarize(lucky, 0.4)[0]]) == pytest.approx(2)


def test_speedup_is_undefined_if_the_synchronous_arm_never_holds_the_level() -> None:
    results, _ = summarize([outcome("synchronous", run(1, [0, 0.5, 0.2])), outcome("stale", run(1, [0, 0.5, 0.5]))], 0.4)
    assert find_best_speedup(results) is None


def test_json_has_the_curves() -> None:
    outcomes = swing_and_rise()
    results, levels = summarize(outcomes)
    document = json.loads(to_json(to_document(outcomes, results, levels, LEVEL_TOLERANCE, {})))
    assert [len(curve["points"]) for curve in document["curves"]] == [21, 21]
    assert document["best_speedup"] == 0 and document["arms"][1]["speedup"]["mean"] == 0 and document["results"][1]["held_s"] is None
    assert {field for field in Result.__slots__} == set(document["results"][0])
