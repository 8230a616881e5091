"""The controller keeps engines busy while rewards and environments of the user's own take their time, since it waits for no response."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from mtpctl.recipe.reward import RewardConfig
from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rl.rewards.rewarder import Rewarder
from mtpctl.rollout.environments import environment_of
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.turns import Turns
from tests.controller.test_rl import World, recipe_of, stage_of
from tests.rollout.fake_chat import NO_CHAT
from tests.rollout.test_busy import PLACES, Bytes, Steady

PLAIN = """\
import time

def score(response, problem, sample, seconds):
    time.sleep(seconds)
    return float(sample.index)

class Tool:
    stop = ["!"]

    def __init__(self, problem, seconds):
        self.seconds = seconds

    def reply(self, turn):
        time.sleep(self.seconds)
        return "?"
"""
COROUTINES = PLAIN.replace("import time", "import asyncio").replace("time.sleep", "await asyncio.sleep").replace("def ", "async def ")
COROUTINES = COROUTINES.replace("async def __init__", "def __init__")
TURN_S = 0.5
BEGUN_S, WATCHED_S = 8.0, 5.0
"""Seconds after which the first responses have gone the whole way, and those over which engines are watched from then on."""


async def busy(folder: Path, *, reward_s: float, turn_s: float) -> float:
    """The share of an engine's places that are taken in a run whose reward and environment take so many seconds.

    Three turns of TURN_S a response. The recipe lets as many responses be under way as those seconds need.
    """
    recipe = recipe_of(steps=10_000, staleness=20.0, max_staleness=100)
    own = f"{folder / 'own.py'}"
    rollout = VllmConfig(environment=f"{own}:Tool", environment_args={"seconds": turn_s}, max_turns=3, engine="vllm")
    reward = RewardConfig(function=f"{own}:score", args={"seconds": reward_s})
    environment, engine = environment_of(rollout), Steady(TURN_S)
    assert environment is not None

    async def start(index: int) -> Any:
        return engine

    turns = Turns(environment, Bytes(), rollout.max_turns, NO_CHAT)
    pool = await ReplicaPool.start(start, 1, max_in_flight=PLACES, turns=turns)
    async with Rewarder(reward) as rewarder:
        stage = stage_of(recipe, World(), folder, generator=pool, reward=rewarder)  # type: ignore[arg-type]
        running = asyncio.create_task(stage.run())
        await asyncio.wait({running}, timeout=BEGUN_S)
        began, before = time.monotonic(), engine.occupied.count(engine.in_flight)
        await asyncio.wait({running}, timeout=WATCHED_S)
        share = (engine.occupied.count(engine.in_flight) - before) / (PLACES * (time.monotonic() - began))
        stage.state.stopping.set()
        await running
    await pool.close()
    return share


@pytest.mark.parametrize("text", [PLAIN, pytest.param(COROUTINES, marks=pytest.mark.slow)], ids=["plain", "coroutines"])
def test_a_reward_of_two_seconds_and_an_environment_of_one_a_turn_leave_engines_as_busy_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.py").write_text(text)

    async def both() -> tuple[float, float]:
        # At the same time, so that a busy machine is as busy for both.
        return await asyncio.gather(busy(tmp_path, reward_s=0.0, turn_s=0.0), busy(tmp_path, reward_s=2.0, turn_s=1.0))

    without, beside = asyncio.run(both())
    print(f"busy: {without:.3f} without, {beside:.3f} with")
    assert without > 0.8
    assert beside > 0.95 * without
