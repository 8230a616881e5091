"""A run that swings is told from one that is only noisy, and the key that turns it is named."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from mtpctl.controller.stability import MIN_UPDATES, WINDOW, StabilityWatch, autocorrelation, residuals
from mtpctl.recipe.loading import load_recipe

GROUPS, SIZE = 16, 8


def groups(draw: random.Random, level: float) -> list[float]:
    """Mean rewards of an update's groups: problems of unlike difficulty, right or wrong answers."""
    means = []
    for _ in range(GROUPS):
        chance = min(1.0, max(0.0, draw.gauss(level, 0.3)))
        means.append(sum(draw.random() < chance for _ in range(SIZE)) / SIZE)
    return means


def run(level, updates: int, seed: int = 0, sets: tuple[str, ...] = ()) -> tuple[list[float], list[str]]:
    """`rl/stability` of every update that has it, and what was said."""
    watch, draw = StabilityWatch(load_recipe("tiny_mtp", sets=list(sets)).recipe), random.Random(seed)
    values, said = [], []
    for t in range(updates):
        metrics, warning = watch.update(groups(draw, level(t)), {"async/staleness_mean": 0.99})
        values += list(metrics.values())
        said += [] if warning is None else [warning]
    return values, said


def rising(t: int) -> float:
    return 0.45 + 0.35 * (1 - math.exp(-t / 25))


def swinging(t: int) -> float:
    """One update late, uncorrected: a limit cycle of some ten updates."""
    return 0.55 + 0.3 * math.sin(2 * math.pi * t / 10)


@pytest.mark.parametrize("seed", range(20))
def test_steady_run_has_no_warning(seed: int) -> None:
    values, said = run(rising, 80, seed)
    assert not said
    assert len(values) == 80 - MIN_UPDATES + 1 and statistics.fmean(values) > 0.6


@pytest.mark.parametrize("seed", range(20))
def test_cycle_is_reported_once_per_window(seed: int) -> None:
    values, said = run(swinging, 3 * WINDOW, seed)
    assert statistics.fmean(values) < 0.35
    assert 2 <= len(said) <= 3 and all("swings" in each for each in said)


@pytest.mark.parametrize("seed", range(20))
def test_fast_learning_is_not_a_cycle(seed: int) -> None:
    _, said = run(lambda t: 0.1 + 0.8 / (1 + math.exp(-(t - 25) / 2)), 60, seed)
    assert not said


def test_warning_names_the_key_to_change() -> None:
    assert "train.rl.old_logprobs at auto" in run(swinging, 20, sets=("train.rl.old_logprobs=recompute",))[1][0]
    assert "async.staleness_threshold" not in run(swinging, 20)[1][0]


def test_lasting_fall_is_reported() -> None:
    _, said = run(lambda t: 0.8 if t < 30 else max(0.3, 0.8 - 0.03 * (t - 30)), 60)
    assert any("has fallen by" in each for each in said)


def test_growing_entropy_is_reported() -> None:
    watch, draw, said = StabilityWatch(load_recipe("tiny_mtp").recipe), random.Random(0), []
    for t in range(40):
        said.append(watch.update(groups(draw, 0.6), {"actor/entropy": 0.02 * (1.08**t)})[1])
    assert any(each and "entropy has grown" in each for each in said)


def test_constant_rewards_give_no_metric() -> None:
    watch = StabilityWatch(load_recipe("tiny_mtp").recipe)
    assert watch.update([], {}) == ({}, None) and watch.update([0.5], {}) == ({}, None)
    values = [watch.update([0.5, 0.5], {})[0] for _ in range(MIN_UPDATES)]
    assert values[-1] == {"rl/stability": 1.0}


def test_parabola_has_no_residuals() -> None:
    assert max(map(abs, residuals([3 + 2 * i - 0.5 * i * i for i in range(12)]))) < 1e-9


def test_autocorrelation_of_an_alternating_series() -> None:
    values = [1.0, -1.0] * 8
    assert autocorrelation(values, 1) == -1 and autocorrelation(values, 2) == 1
