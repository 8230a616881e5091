"""Times the controller on steps of many long samples: its event loop, its memory, and what a checkpoint of the buffer costs.

    python scripts/time_controller.py --samples 16384 --tokens 4096 --ranks 64

The RL stage runs as in a training run, with the reward `exact` in its processes, the byte tokenizer and Ray's object store. Engines are
replaced by samples that are unpickled, as those of a rollout replica are; old log-probs of a log-prob server by arrays; trainer ranks by a
few actors that take their shares apart. One JSON object is printed:

loop_s                  processor seconds of the event loop's thread a step
step_s                  wall seconds a step, the fake engines' included
stall_s                 the longest time for which the loop ran no other task
mib_beyond_tokens       growth of the process's memory, its pages of the object store included, less 4 bytes a token
bytes_a_token           of one sample in memory
partition_s, share_s    of a step's samples; shares with their way into the object store, in a thread
store_bytes_a_token     of all shares
buffer_s, buffer_stall_s  a checkpoint of the buffer with --saved of the samples, and the loop's longest pause meanwhile
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import random
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from pathlib import Path
from typing import Any, cast

import psutil

from mtpctl.cluster.process import settle_heap
from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.rl import RlStage
from mtpctl.controller.starting import start_rewards
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets
from mtpctl.data.tokenizers import load_byte_tokenizer, make_byte_tokenizer
from mtpctl.plan.partition import partition
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.protocol import Generator
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.telemetry.session import Telemetry
from mtpctl.trainer.share import BatchTable, Share

PROMPT = 256
IN_FLIGHT = 512
ACTORS = 2


class Ranks:
    """Stands for trainer ranks: takes their shares apart, and counts."""

    def rl_step(self, table: BatchTable, share: Share, version: int) -> dict[str, float]:
        assert len(share.sequences()) == len(share.indices)
        return {"skipped": 0.0, "perf/tokens": float((table.prompts + table.responses).sum()), "bytes": float(share.nbytes)}


class Trainer(TrainerGroup):
    """The trainer's group with the fake ranks, each actor being many of them."""

    def __init__(self, recipe: Recipe) -> None:
        import ray

        self.recipe = recipe
        remote = ray.remote(Ranks).options(num_cpus=0)
        actors = [cast(Any, remote).remote() for _ in range(ACTORS)]
        self.ranks = [actors[rank % ACTORS] for rank in range(recipe.train.parallel.world_size)]
        self.seconds: list[float] = []

    def _put(self, samples: Any) -> Any:
        began = time.perf_counter()
        found = super()._put(samples)
        self.seconds.append(time.perf_counter() - began)
        return found


class Engines:
    """Answers every request with a sample of the full length, at most `IN_FLIGHT` of them ahead of their rewards."""

    def __init__(self, tokens: int, responses: int = 0) -> None:
        draw = random.Random(0)
        made = Sample("p", "g", [draw.randrange(97, 122) for _ in range(PROMPT)])
        for version in (0, 1):
            count = (tokens - PROMPT) // 2
            made.append([draw.randrange(97, 122) for _ in range(count)], [-draw.random() for _ in range(count)], version)
        made.finish_reason = "length"
        self.sample, self.message = made, pickle.dumps(made, pickle.HIGHEST_PROTOCOL)
        self.room, self.left = asyncio.Semaphore(IN_FLIGHT), responses

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        async for request in requests:
            await self.room.acquire()
            if not self.left:  # what comes now belongs to no step that is measured
                await asyncio.Event().wait()
            self.left -= 1
            sample: Sample = pickle.loads(self.message)
            asked = request.sample
            sample.prompt_id, sample.group_id, sample.index = asked.prompt_id, asked.group_id, asked.index
            yield sample

    async def score(self, sample: Sample) -> Sample:
        sample.old_logprobs, sample.old_version = sample.behaviour_logprobs[:], 1
        return sample


class Rows:
    """Telemetry that keeps the metrics of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float], phase: str) -> None:
        self.rows.append(metrics)

    def event(self, kind: str, message: str) -> None:
        print(f"{kind}: {message}", file=sys.stderr)

    def samples(self, rows: list[Any]) -> None: ...


class Memory:
    """The most memory that this process held, sampled from a thread."""

    def __init__(self) -> None:
        self._process, self._ended = psutil.Process(), threading.Event()
        self.before = self.most = self._process.memory_info().rss
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.most = max(self.most, self._process.memory_info().rss)

    def grown(self) -> int:
        """Bytes since the start."""
        self._ended.set()
        return self.most - self.before


@contextlib.asynccontextmanager
async def stalls(found: list[float]) -> AsyncIterator[None]:
    """Appends the longest time for which no other task of the loop ran while the block does."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.02)
            longest = max(longest, time.perf_counter() - began - 0.02)

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
        found.append(longest)


def recipe_of(samples: int, ranks: int, group: int, steps: int) -> Recipe:
    rl = {"steps": steps, "prompts_per_step": samples // group, "group_size": group, "dynamic_sampling": False}
    return Recipe.model_validate(
        {
            "model": {"path": "anywhere"},
            "train": {"rl": rl, "parallel": {"dp": ranks}, "tokens_per_microbatch": 8192, "keep_checkpoints": 0},
            "async": {"staleness_threshold": 0.0, "sync_every": 1},
            "reward": {"function": "exact"},
            "telemetry": {"samples": 0},
        }
    )


async def steps_of(recipe: Recipe, tokens: int, folder: Path) -> dict[str, float]:
    """Run the stage. The memory is that of all its steps."""
    count, samples = recipe.train.rl.steps, recipe.train.rl.prompts_per_step * recipe.train.rl.group_size
    make_byte_tokenizer(folder / "tokenizer")
    problems = [Problem(f"p{i}", "a" * PROMPT, "1") for i in range(2 * recipe.train.rl.prompts_per_step)]
    prepared = Prepared(cast(Any, None), load_byte_tokenizer(folder / "tokenizer"), ProblemSets(problems, [], []), context=tokens)
    engines, trainer, rows, longest = Engines(tokens, count * samples), Trainer(recipe), Rows(), list[float]()

    async def sync(version: int) -> dict[str, float]:
        return {"sync/seconds": 0.0}

    async with contextlib.AsyncExitStack() as stack:
        rewards = await start_rewards(recipe, stack, tell=print, log=folder / "reward.log")
        settle_heap()  # as a run does
        state = RunState(folder, recipe.train)
        stage = RlStage(recipe, prepared, trainer, cast(Generator, engines), sync, rewards, cast(Telemetry, rows), state, engines.score)
        add = stage.buffer.add

        def added(sample: Sample) -> Group | None:
            engines.room.release()
            return add(sample)

        stage.buffer.add = added  # type: ignore[method-assign]
        memory, wall, busy = Memory(), time.perf_counter(), time.thread_time()
        async with stalls(longest):
            await stage.run()
        busy, wall = time.thread_time() - busy, time.perf_counter() - wall
    assert len(rows.rows) == count and all(row["perf/tokens_per_s"] > 0 for row in rows.rows)
    return {
        "loop_s": busy / count,
        "step_s": wall / count,
        "stall_s": longest[0],
        "mib_beyond_tokens": (memory.grown() - 4 * samples * tokens) / 2**20,
        "share_s": sum(trainer.seconds) / count,
        "store_bytes_a_token": rows.rows[-1]["bytes"] * recipe.train.parallel.dp / (samples * tokens),
    }


async def saved(count: int, tokens: int, group: int, folder: Path) -> dict[str, float]:
    """A checkpoint of a buffer with `count` samples."""
    engines, buffer, longest = Engines(tokens), SampleBuffer(), list[float]()
    for number in range(count // group):
        samples = [await engines.score(pickle.loads(engines.message)) for _ in range(group)]
        await buffer.put(Group(number, Problem(f"p{number}", "1", "1"), group, samples))
    began = time.perf_counter()
    async with stalls(longest):
        await asyncio.to_thread(buffer.saving(folder / "buffer.jsonl"))
    return {"buffer_s": time.perf_counter() - began, "buffer_stall_s": longest[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=4096, help="of each sample, prompt and response")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--saved", type=int, default=0, help="samples in the checkpoint of the buffer; 0: none is taken")
    given = parser.parse_args()
    import ray

    draw = random.Random(0)
    lengths = [draw.randint(given.tokens // 4, given.tokens) for _ in range(given.samples)]
    began = time.process_time()
    partition(lengths, 2 * given.tokens, given.ranks)
    found = {"partition_s": time.process_time() - began}
    sample = asyncio.run(Engines(given.tokens).score(Engines(given.tokens).sample))
    held = (sample.prompt_ids, sample.response_ids, sample.loss_mask, sample.behaviour_logprobs, sample.old_logprobs)
    found["bytes_a_token"] = sum(sys.getsizeof(each) for each in held) / given.tokens
    store = max(256 << 20, 24 * given.samples * given.tokens)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address="local", num_cpus=2, object_store_memory=store, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            recipe = recipe_of(given.samples, given.ranks, given.group, given.steps)
            found |= asyncio.run(steps_of(recipe, given.tokens, Path(folder)))
            if given.saved:
                found |= asyncio.run(saved(given.saved, given.tokens, given.group, Path(folder)))
    finally:
        ray.shutdown()
    print(json.dumps({"samples": given.samples, "tokens": given.tokens, "ranks": given.ranks} | {k: round(v, 4) for k, v in found.items()}))


if __name__ == "__main__":
    main()
