"""Hints: each has a series of metrics that triggers it, and one that does not."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from mtpctl.controller.hints import (
    MIN_IDLE_UPDATES,
    MIN_STABILITY_UPDATES,
    REPEAT_UPDATES,
    WINDOW,
    HintWatch,
    IdleWatch,
    StabilityWatch,
    autocorrelation,
    fit_residuals,
)
from mtpctl.recipe.loading import load_recipe

GROUPS = 32
HEALTHY = {
    "actor/entropy": 1.0,
    "actor/ratio_mean": 1.0,
    "actor/ppo_kl": 0.01,
    "reward/signal_fraction": 0.5,
    "response/truncated_fraction": 0.02,
}
Series = Callable[[int], float]


def hints(
    updates: int = 60, reward: Series = lambda t: 0.3 + 0.005 * t, sets: tuple[str, ...] = (), **series: Series
) -> list[tuple[int, str]]:
    """(update, hint) of a run. series: metrics by the part of their name after the slash; the others are healthy."""
    watch, draw, lines = HintWatch(load_recipe("tiny_mtp", sets=list(sets)).recipe), random.Random(0), []
    for t in range(updates):
        means = [sum(draw.random() < reward(t) for _ in range(8)) / 8 for _ in range(GROUPS)]
        metrics = {name: series[short](t) if (short := name.partition("/")[2]) in series else value for name, value in HEALTHY.items()}
        if "ref_kl" in series:
            metrics["actor/ref_kl"] = series["ref_kl"](t)
        lines += [(t, line) for line in watch.update(means, metrics)]
    return lines


def constant(value: float) -> Series:
    return lambda t: value


def test_healthy_run_has_no_hint() -> None:
    assert hints(200, reward=lambda t: min(0.9, 0.3 + 0.003 * t)) == []


def test_stagnant_policy_gets_a_hint_to_raise_the_learning_rate() -> None:
    lines = hints(reward=constant(0.3), ppo_kl=constant(2e-5))
    assert [t for t, _ in lines] == [WINDOW - 1]
    assert "nothing moves" in lines[0][1] and "raise train.rl.optimizer.lr: 0.0002 by a factor of 3" in lines[0][1]
    assert "KL to the start is 5.0e-04" in hints(reward=constant(0.3), ref_kl=constant(5e-4))[0][1]


@pytest.mark.parametrize(
    "series",
    [
        {"reward": lambda t: 0.1 + 0.01 * t, "ppo_kl": constant(2e-5)},
        {"reward": constant(0.3), "ppo_kl": constant(0.01)},
        {"reward": constant(0.3), "ppo_kl": constant(2e-5), "ratio_mean": constant(0.97)},
        {"reward": constant(0.3), "ppo_kl": constant(2e-5), "entropy": lambda t: 0.98**t},
        {"reward": constant(0.3), "ppo_kl": constant(2e-5), "ref_kl": constant(0.05)},
        {"reward": constant(0.3), "ppo_kl": constant(2e-5), "signal_fraction": constant(0.01)},
    ],
    ids=["reward rises", "KL", "ratio", "entropy falls", "far from the start", "nothing to learn from"],
)
def test_moving_policy_is_not_still(series: dict[str, Series]) -> None:
    assert not [line for _, line in hints(**series) if "nothing moves" in line]


def test_collapsed_entropy_without_progress_is_reported() -> None:
    lines = hints(reward=constant(0.3), entropy=lambda t: max(0.02, 0.8**t))
    assert len(lines) == 1 and "the entropy has collapsed from 0.67 to 0.0" in lines[0][1]
    assert "train.rl.clip_high: 0.28" in lines[0][1]


@pytest.mark.parametrize(
    "series",
    [
        {"reward": lambda t: 0.1 + 0.012 * t, "entropy": lambda t: max(0.02, 0.8**t)},
        {"reward": constant(0.3), "entropy": lambda t: max(0.3, 0.95**t)},
    ],
    ids=["reward rises", "entropy stays"],
)
def test_falling_entropy_alone_is_no_collapse(series: dict[str, Series]) -> None:
    assert hints(**series) == []


def test_groups_without_signal_are_reported() -> None:
    lines = hints(reward=constant(0.02), signal_fraction=constant(0.05))
    assert len(lines) == 1 and "equal rewards in 95% of the groups" in lines[0][1] and "train.rl.group_size: 8" in lines[0][1]
    assert hints(reward=lambda t: 0.02 + 0.01 * t, signal_fraction=constant(0.15)) == []


def test_truncated_responses_are_reported() -> None:
    lines = hints(truncated_fraction=constant(0.4))
    assert len(lines) == 1 and lines[0][1].startswith("40% of the responses are truncated at rollout.max_tokens: 48 ")
    assert hints(truncated_fraction=lambda t: 0.7 if t % 10 == 0 else 0.05) == [], "a single update triggers none"


def test_hint_is_repeated_only_if_it_persists() -> None:
    assert [t for t, _ in hints(2 * REPEAT_UPDATES + 10, truncated_fraction=constant(0.4), reward=lambda t: 0.2 + 0.003 * t)] == [
        4,
        104,
        204,
    ]
    once = hints(2 * REPEAT_UPDATES, truncated_fraction=lambda t: 0.4 if t < 50 else 0.0, reward=lambda t: 0.2 + 0.003 * t)
    assert [t for t, _ in once] == [4]


def test_updates_of_one_group_have_no_hint() -> None:
    watch = HintWatch(load_recipe("tiny_mtp").recipe)
    assert not any(watch.update([0.0], {"response/truncated_fraction": 1.0, "reward/signal_fraction": 0.0}) for _ in range(30))


GPUS = ["cluster.device=cuda", "sync.transport=ipc", "rollout.kv_cache_bytes=null"]


def idle_hint(*sets: str, trainer: float, rollout: float, updates: int = MIN_IDLE_UPDATES + 1) -> str | None:
    idle = IdleWatch(load_recipe("tiny_mtp", sets=list(sets)).recipe)
    # The first update includes the start, and does not count.
    idle.observe({"timing_s/step": 1000.0, "async/trainer_idle": 1 - trainer, "async/rollout_idle": 0.0})
    for _ in range(updates - 1):
        idle.observe({"timing_s/step": 2.0, "async/trainer_idle": trainer, "async/rollout_idle": rollout})
    return idle.hint()


def test_an_idle_trainer_is_reported_with_the_keys_to_change() -> None:
    line = idle_hint(*GPUS, trainer=0.9, rollout=0.02)
    assert line is not None
    assert line.startswith("the trainer waited for samples 90% of the time (async/trainer_idle); raise rollout.replicas")
    assert "rollout.on_trainer_gpus: 1" in line
    shared = idle_hint(*GPUS, "rollout.on_trainer_gpus=1", "train.gpus=0.5", trainer=0.9, rollout=0.0)
    assert shared is not None
    assert "on_trainer_gpus" not in shared
    on_cpu = idle_hint(trainer=0.9, rollout=0.0)
    assert on_cpu is not None
    assert "on_trainer_gpus" not in on_cpu


@pytest.mark.parametrize(
    ("trainer", "rollout", "updates"), [(0.4, 0.0, 20), (0.6, 0.4, 20), (0.9, 0.0, MIN_IDLE_UPDATES)], ids=["busy", "both wait", "too few"]
)
def test_no_hint_without_a_bottleneck_in_generation(trainer: float, rollout: float, updates: int) -> None:
    assert idle_hint(*GPUS, trainer=trainer, rollout=rollout, updates=updates) is None


GROUPS, SIZE = 16, 8


def groups(draw: random.Random, level: float) -> list[float]:
    """Mean rewards of an update's groups: problems of unlike difficulty, right or wrong answers."""
    means = []
    for _ in range(GROUPS):
        chance = min(1.0, max(0.0, draw.gauss(level, 0.3)))
        means.append(sum(draw.random() < chance for _ in range(SIZE)) / SIZE)
    return means


def run(level, updates: int, seed: int = 0, sets: tuple[str, ...] = ()) -> tuple[list[float], list[str]]:
    """`rl/stability` of every update that has it, and the hints."""
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
    assert len(values) == 80 - MIN_STABILITY_UPDATES + 1 and statistics.fmean(values) > 0.6


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
    values = [watch.update([0.5, 0.5], {})[0] for _ in range(MIN_STABILITY_UPDATES)]
    assert values[-1] == {"rl/stability": 1.0}


def test_parabola_has_no_residuals() -> None:
    assert max(map(abs, fit_residuals([3 + 2 * i - 0.5 * i * i for i in range(12)]))) < 1e-9


def test_autocorrelation_of_an_alternating_series() -> None:
    values = [1.0, -1.0] * 8
    assert autocorrelation(values, 1) == -1 and autocorrelation(values, 2) == 1
