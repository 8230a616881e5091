"""Hints: each has a series of metrics that triggers it, and one that does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mtpctl.controller.hints import MIN_UPDATES, REPEAT, WINDOW, HintWatch, IdleTrainer
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


def test_still_policy_is_told_to_raise_the_learning_rate() -> None:
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
    assert [t for t, _ in hints(2 * REPEAT + 10, truncated_fraction=constant(0.4), reward=lambda t: 0.2 + 0.003 * t)] == [4, 104, 204]
    once = hints(2 * REPEAT, truncated_fraction=lambda t: 0.4 if t < 50 else 0.0, reward=lambda t: 0.2 + 0.003 * t)
    assert [t for t, _ in once] == [4]


def test_updates_of_one_group_have_no_hint() -> None:
    watch = HintWatch(load_recipe("tiny_mtp").recipe)
    assert not any(watch.update([0.0], {"response/truncated_fraction": 1.0, "reward/signal_fraction": 0.0}) for _ in range(30))


GPUS = ["cluster.device=cuda", "sync.transport=ipc", "rollout.kv_cache_bytes=null"]


def idle_hint(*sets: str, trainer: float, rollout: float, updates: int = MIN_UPDATES + 1) -> str | None:
    idle = IdleTrainer(load_recipe("tiny_mtp", sets=list(sets)).recipe)
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
    ("trainer", "rollout", "updates"), [(0.4, 0.0, 20), (0.6, 0.4, 20), (0.9, 0.0, MIN_UPDATES)], ids=["busy", "both wait", "too few"]
)
def test_no_hint_without_a_bottleneck_in_generation(trainer: float, rollout: float, updates: int) -> None:
    assert idle_hint(*GPUS, trainer=trainer, rollout=rollout, updates=updates) is None
