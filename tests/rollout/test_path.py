"""mtpctl's path compared with vLLM's own offline generation, over a runner of fixed step times: what a GPU adds is left out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench import rollout as bench
from mtpctl.bench import rollout_engines as engines
from mtpctl.rollout import start
from mtpctl.rollout.vllm.patches import IMMEDIATE_ADMISSION
from mtpctl.rollout.vllm.settings import VllmSettings
from tests.environment import with_tree
from tests.fakes import runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BATCH, STEP_S = 64, 0.02


@pytest.fixture
def fixed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engines have a core in a separate process, as with a GPU. Returns where their workers log their steps."""
    (log := tmp_path / "steps").mkdir()
    upstream = engines.build_engine_settings
    # Both admit at once: holding requests back would change the steps that are compared.
    extra = {runner.STEP_S: str(STEP_S), runner.LOG: str(log), IMMEDIATE_ADMISSION: "1", "PYTHONPATH": with_tree()["PYTHONPATH"]}

    def settings(*args: Any, **options: Any) -> VllmSettings:
        created = upstream(*args, **options)
        environment = created.environment | extra | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        worker = {"worker_cls": "tests.fakes.runner.FixedWorker"}
        return replace(created, in_loop=False, environment=environment, args=created.args | worker)

    monkeypatch.setattr(engines, "build_engine_settings", settings)
    monkeypatch.setattr(start, "build_engine_settings", settings)
    return log


def test_slots_are_filled_as_by_vllm(fixed_steps: Path, tmp_path: Path) -> None:
    options = bench.Options("tiny", tmp_path / "model", (BATCH,), 128, 64, 1, 0.75, 3, "cpu")
    created = bench.Bench(options, print, 2)
    table = bench.Table(print)

    async def measure() -> None:
        async with engines.enter_all(created.pool(0), created.offline()) as (plain, offline):
            await bench.measure_path(created, table, [created.queued()], offline, plain)

    with created.cluster():
        asyncio.run(measure())
    ours = next(row for row in table.rows if row.what == bench.POOL)
    assert ours.ratio is not None and ours.ratio >= bench.MIN_PATH_RATIO
    assert ours.idle is not None and ours.idle <= bench.MAX_IDLE
    steps = [[tuple(map(int, line.split())) for line in path.read_text().splitlines()] for path in fixed_steps.iterdir()]
    requests = [sum(requests for requests, _ in each) for each in steps]
    taking_in = [sum(prompts > 0 for _, prompts in each) for each in steps]
    assert len(steps) == 2 and requests[0] == requests[1] > 4 * 4 * BATCH * 50
    assert max(taking_in) <= 1.1 * min(taking_in), "prompts come as bundled as they do from vLLM's own queue"
    assert max(map(len, steps)) <= 1.02 * min(map(len, steps))
