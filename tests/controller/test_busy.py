"""Engines stay busy during slow rewards and environments, and hanging ones do not delay a stop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtpctl.controller.rl import RlStage
from mtpctl.environments.environment import load_environment_class
from mtpctl.environments.turns import TurnSessions
from mtpctl.recipe.reward import RewardConfig
from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.rollout.pool import ReplicaPool
from tests.fakes.busy import PLACES, Bytes, Steady
from tests.fakes.chat import NO_CHAT
from tests.fakes.processes import runs
from tests.fakes.rl_stage import World, recipe_of, stage_of

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


@contextlib.asynccontextmanager
async def running(folder: Path, *, reward_s: float, turn_s: float) -> AsyncIterator[tuple[RlStage, Steady]]:
    """A run whose reward and environment take so many seconds, and its engine. It is stopped as Ctrl-C stops it.

    Three turns of TURN_S a response. The recipe lets as many responses be under way as those seconds need.
    """
    recipe = recipe_of(steps=10_000, staleness=20.0, max_staleness=100)
    own = f"{folder / 'own.py'}"
    rollout = VllmConfig(environment=f"{own}:Tool", environment_args={"seconds": turn_s}, max_turns=3, engine="vllm")
    reward = RewardConfig(function=f"{own}:score", args={"seconds": reward_s}, timeout_s=2000)
    environment, engine = load_environment_class(rollout), Steady(TURN_S)
    assert environment is not None

    async def start(index: int) -> Any:
        return engine

    turns = TurnSessions(environment, Bytes(), rollout.max_turns, NO_CHAT)
    pool = await ReplicaPool.start(start, 1, max_in_flight=PLACES, turn_runner=turns)
    async with Rewarder(reward) as rewarder:
        stage = stage_of(recipe, World(), folder, generator=pool, reward=rewarder)  # type: ignore[arg-type]
        task = asyncio.create_task(stage.run())
        yield stage, engine
        stage.state.stop_requested.set()
        await task
    await pool.close()


async def busy(folder: Path, *, reward_s: float, turn_s: float) -> float:
    """Share of the engine's slots that are in use."""
    async with running(folder, reward_s=reward_s, turn_s=turn_s) as (_, engine):
        await asyncio.sleep(BEGUN_S)
        began, before = time.monotonic(), engine.occupied.record(engine.in_flight)
        await asyncio.sleep(WATCHED_S)
        return (engine.occupied.record(engine.in_flight) - before) / (PLACES * (time.monotonic() - began))


@pytest.mark.parametrize("text", [PLAIN, pytest.param(COROUTINES, marks=pytest.mark.slow)], ids=["plain", "coroutines"])
def test_slow_rewards_and_environments_do_not_make_engines_idle(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.py").write_text(text)

    async def both() -> tuple[float, float]:
        # At the same time, so that a busy machine is as busy for both.
        return await asyncio.gather(busy(tmp_path, reward_s=0.0, turn_s=0.0), busy(tmp_path, reward_s=2.0, turn_s=1.0))

    without, loaded = asyncio.run(both())
    print(f"busy: {without:.3f} without, {loaded:.3f} with")
    assert without > 0.7
    assert loaded > 0.95 * without


@pytest.mark.parametrize("text", [PLAIN, COROUTINES], ids=["plain", "coroutines"])
def test_stop_does_not_wait_for_slow_rewards_or_environments(tmp_path: Path, text: str) -> None:
    others = set(psutil.Process().children())

    async def stopped(slow: str, **seconds: float) -> float:
        folder = tmp_path / slow
        folder.mkdir()
        (folder / "own.py").write_text(text)
        async with running(folder, **seconds):
            await asyncio.sleep(3 * TURN_S + 2.0)  # the first calls are under way
            began = time.monotonic()
        return time.monotonic() - began

    async def both() -> list[float]:
        return await asyncio.gather(stopped("reward", reward_s=1000.0, turn_s=0.0), stopped("environment", reward_s=0.0, turn_s=1000.0))

    took = asyncio.run(asyncio.wait_for(both(), 60))
    print(f"stopped after {took[0]:.2f} s and {took[1]:.2f} s")
    assert max(took) < 20
    assert not [each for each in set(psutil.Process().children()) - others if runs(each)]
