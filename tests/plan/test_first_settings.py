"""The settings of a first run: learning rates by size, and settings that fit machine and rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mtpctl.plan.first_settings import Machine, Setting, Workload, cautions, choose, learning_rate, signal, tree

SMALL = Workload(134_515_008, 134_515_008, 8192, prompt_tokens=68, answer_tokens=5, rows=20_000)
LARGE = replace(SMALL, parameters=7_600_000_000, active=7_600_000_000)
GPU = Machine(cores=16, gpus=1, gpu_gib=79.6)


def values(work: Workload, machine: Machine) -> dict[str, object]:
    return {setting.key: setting.value for setting in choose(work, machine)}


@pytest.mark.parametrize(
    ("parameters", "rate"), [(1e5, 2e-4), (2e6, 2e-4), (134_515_008, 3e-5), (4.9e8, 1e-5), (1.5e9, 4e-6), (7e9, 1e-6), (3e10, 1e-6)]
)
def test_learning_rate_is_interpolated_between_measured_sizes(parameters: float, rate: float) -> None:
    assert learning_rate(parameters) == rate


def test_learning_rate_falls_with_size() -> None:
    rates = [learning_rate(1e6 * 1.5**step) for step in range(30)]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 10


def test_signal_is_the_probability_of_different_rewards() -> None:
    """Of all outcomes of a group of 3 at a success rate of 0.2, all but none and all."""
    outcomes = [math.comb(3, k) * 0.2**k * 0.8 ** (3 - k) for k in (1, 2)]
    assert signal(0.2, 3) == pytest.approx(sum(outcomes))
    assert signal(0.0, 8) == signal(1.0, 8) == 0


def test_small_model_on_one_gpu_has_the_measured_settings() -> None:
    chosen = values(SMALL, GPU)
    assert chosen["train.rl.optimizer.lr"] == 3e-5 and chosen["train.rl.minibatches"] == 4
    assert (chosen["rollout.max_tokens"], chosen["rollout.context"]) == (160, 256)
    engines, share = chosen["rollout.replicas"], chosen["rollout.gpus"]
    assert isinstance(engines, int) and isinstance(share, float) and engines * share + 0.4 <= 1


def test_fewer_cores_have_fewer_engines() -> None:
    counts = [values(SMALL, Machine(cores, 1, 80.0))["rollout.replicas"] for cores in (2, 8, 16, 128)]
    assert counts == [1, 1, 2, 2]


@pytest.mark.parametrize(("gpus", "trainers", "engines"), [(2, 1, 1), (8, 4, 4)])
def test_large_model_divides_the_gpus(gpus: int, trainers: int, engines: int) -> None:
    chosen = values(LARGE, Machine(64, gpus, 80.0))
    assert (chosen["train.parallel.dp"], chosen["rollout.replicas"]) == (trainers, engines)
    assert chosen["train.rl.optimizer.lr"] == 1e-6 and "sync.transport" not in chosen


def test_few_rows_make_small_updates() -> None:
    assert values(replace(SMALL, rows=40), GPU)["train.rl.prompts_per_step"] == 4
    chosen = values(replace(SMALL, rows=5), GPU)
    assert (chosen["train.rl.prompts_per_step"], chosen["train.rl.minibatches"]) == (2, 2)


def test_response_fits_the_positions_of_the_model() -> None:
    chosen = values(replace(SMALL, positions=100), Machine(2))
    assert (chosen["rollout.max_tokens"], chosen["rollout.context"]) == (32, 100)


def test_model_that_does_not_fit_has_a_caution() -> None:
    assert "use an adapter" in cautions(LARGE, GPU)[0]
    assert not cautions(LARGE, Machine(64, 8, 80.0)) and not cautions(SMALL, GPU) and not cautions(SMALL, Machine(2))
    assert "one of 2 GPUs" in cautions(SMALL, replace(GPU, gpus=2))[0]


def test_tree_nests_keys() -> None:
    assert tree([Setting("a.b.c", 1), Setting("a.d", 2), Setting("e", 3)]) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
