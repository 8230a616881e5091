"""A hint at the end of a stage in which the trainer waited for samples."""

from __future__ import annotations

import pytest

from mtpctl.controller.idle import MIN_UPDATES, IdleTrainer
from mtpctl.recipe.loading import load_recipe

GPUS = ["cluster.device=cuda", "sync.transport=ipc", "rollout.kv_cache_bytes=null"]


def hint(*sets: str, trainer: float, rollout: float, updates: int = MIN_UPDATES + 1) -> str | None:
    idle = IdleTrainer(load_recipe("tiny_mtp", sets=list(sets)).recipe)
    # The first update includes the start, and does not count.
    idle.observe({"timing_s/step": 1000.0, "async/trainer_idle": 1 - trainer, "async/rollout_idle": 0.0})
    for _ in range(updates - 1):
        idle.observe({"timing_s/step": 2.0, "async/trainer_idle": trainer, "async/rollout_idle": rollout})
    return idle.hint()


def test_an_idle_trainer_is_reported_with_the_keys_to_change() -> None:
    line = hint(*GPUS, trainer=0.9, rollout=0.02)
    assert line is not None
    assert line.startswith("the trainer waited for samples 90% of the time (async/trainer_idle); raise rollout.replicas")
    assert "rollout.on_trainer_gpus: 1" in line
    shared = hint(*GPUS, "rollout.on_trainer_gpus=1", "train.gpus=0.5", trainer=0.9, rollout=0.0)
    assert shared is not None
    assert "on_trainer_gpus" not in shared
    on_cpu = hint(trainer=0.9, rollout=0.0)
    assert on_cpu is not None
    assert "on_trainer_gpus" not in on_cpu


@pytest.mark.parametrize(
    ("trainer", "rollout", "updates"), [(0.4, 0.0, 20), (0.6, 0.4, 20), (0.9, 0.0, MIN_UPDATES)], ids=["busy", "both wait", "too few"]
)
def test_no_hint_without_a_bottleneck_in_generation(trainer: float, rollout: float, updates: int) -> None:
    assert hint(*GPUS, trainer=trainer, rollout=rollout, updates=updates) is None
