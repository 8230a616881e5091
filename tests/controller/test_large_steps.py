"""Steps of many samples: what they cost the controller's event loop and its memory, and that a checkpoint leaves the loop free."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.data.problems import Problem
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Sample, logprobs_of
from tests.fakes.rl_stage import World, recipe_of, stage_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "controller_step.py"


def of_size(groups: int) -> Recipe:
    """One step of so many groups of two, of which none is generated ahead."""
    recipe = recipe_of(steps=1, staleness=0.0)
    rl = recipe.train.rl.model_copy(update={"prompts_per_step": groups})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"rl": rl})})


def executed(groups: int, folder: Path) -> int:
    """The number of Python calls and loop iterations of a step in this thread, including those of the fakes.

    Threads and garbage that other tests have left are not counted.
    """
    world, monitor, count, thread = World(), sys.monitoring, 0, threading.get_ident()
    stage = stage_of(of_size(groups), world, folder)

    def one_more(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == thread

    gc.collect()
    gc.disable()
    monitor.use_tool_id(monitor.PROFILER_ID, "test")
    try:
        for event in (monitor.events.PY_START, monitor.events.JUMP):
            monitor.register_callback(monitor.PROFILER_ID, event, one_more)
        monitor.set_events(monitor.PROFILER_ID, monitor.events.PY_START | monitor.events.JUMP)
        asyncio.run(asyncio.wait_for(stage.run(), 60))
    finally:
        monitor.set_events(monitor.PROFILER_ID, 0)
        monitor.free_tool_id(monitor.PROFILER_ID)
        gc.enable()
    assert len(world.batches[0]) == 2 * groups
    return count


def test_work_of_a_step_grows_at_most_linearly(tmp_path: Path) -> None:
    """Eight times as many groups. One comparison of each pair of groups would make it 9.5 times the work, instead of 8.3.

    The event loop of a busy machine runs more iterations, so one of five attempts suffices.
    """
    executed(16, tmp_path)
    assert any(executed(512, tmp_path) < 8.8 * executed(64, tmp_path) for _ in range(5))


def test_buffer_checkpoint_is_a_snapshot_and_does_not_block_the_loop(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[Group], int]:
        buffer, groups = SampleBuffer(), []
        for number in range(32):
            samples = [Sample(f"p{number}", str(number), [1] * 64, index, reward=0.5) for index in range(4)]
            for sample in samples:
                sample.append([7, 300_000] * 2000, [-0.1, -1.5] * 2000, number)
                sample.old_logprobs, sample.old_version = logprobs_of([-0.25] * 4000), 3
            groups.append(Group(number, Problem(f"p{number}", "1", "1"), 4, samples))
            await buffer.put(groups[-1])
        turns, write = 0, asyncio.ensure_future(asyncio.to_thread(buffer.snapshot_writer(tmp_path / "buffer.jsonl")))
        buffer.take(8)  # what is trained on meanwhile is in the checkpoint, as it was when it was taken
        while not write.done():
            await asyncio.sleep(0)
            turns += 1
        return groups, turns

    groups, turns = asyncio.run(scenario())
    complete, unfinished = SampleBuffer.load(tmp_path / "buffer.jsonl")
    assert [group.samples for group in complete] == [group.samples for group in groups] and not unfinished
    assert turns > 10
    assert (tmp_path / "buffer.jsonl").stat().st_size < 24 * 32 * 4 * 4064


def timed(samples: int) -> dict[str, float]:
    command = [sys.executable, str(SCRIPT), "--samples", str(samples), "--ranks", "64", "--saved", str(samples // 4)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    print(done.stdout.splitlines()[-1])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_step_of_67_million_tokens_fits_two_cores() -> None:
    """16,384 samples of 4,096 tokens and 64 ranks, against a sixteenth of them. Seconds are compared, since other processes may run."""
    small, large = timed(1024), timed(16_384)
    assert large["loop_s"] <= 1.25 * 16 * small["loop_s"]
    assert large["mib_beyond_tokens"] <= 2048
    assert large["bytes_a_token"] <= 24 and large["store_bytes_a_token"] <= 24
    assert large["partition_s"] <= 16 * small["partition_s"]
