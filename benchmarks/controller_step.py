"""The cost of a step of many long samples for the controller: its event loop, its memory, and a checkpoint of the buffer.

    python benchmarks/controller_step.py --samples 16384 --tokens 4096 --ranks 64

The RL stage runs as in training, with the reward `exact` in its processes, the byte tokenizer and Ray's object store. Engines are replaced
by samples that are unpickled, as those of a rollout replica are; old log-probs by arrays; trainer ranks by a few actors that unpack their
shares. Prints one JSON object:

loop_s                    CPU seconds of the event loop's thread for a step
step_s                    wall seconds of a step, with the fake engines
stall_s                   the longest time for which the loop ran no other task
mib_beyond_tokens         growth of the process's memory, its pages of the object store included, minus 4 bytes a token
bytes_a_token             of one sample in memory
partition_s, share_s      of a step's samples; shares with their transfer into the object store, in a thread
store_bytes_a_token       of all shares
buffer_s, buffer_stall_s  a checkpoint of the buffer with --saved of the samples, and the loop's longest stall meanwhile
"""

from __future__ import annotations

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

from harness import parser
from mtpctl.cluster.process import freeze_heap
from mtpctl.controller.buffer import Group, SampleBuffer
from mtpctl.controller.prepare import Prepared
from mtpctl.controller.rl import RlStage
from mtpctl.controller.services import start_rewards
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.data.problems import Problem
from mtpctl.data.sets import ProblemSets
from mtpctl.data.tokenizers import load_plain_tokenizer, make_byte_tokenizer
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.protocol import Generator
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.telemetry.session import Telemetry
from mtpctl.trainer.share import BatchTable, Share, partition

PROMPT_TOKENS = 256
IN_FLIGHT = 512
NUM_ACTORS = 2


class FakeRanks:
    """Trainer ranks that only unpack their shares."""

    def rl_step(self, table: BatchTable, share: Share, version: int) -> dict[str, float]:
        assert len(share.sequences()) == len(share.indices)
        return {"skipped": 0.0, "perf/tokens": float((table.prompt_lengths + table.response_lengths).sum()), "bytes": float(share.nbytes)}


class FakeTrainer(TrainerGroup):
    """A trainer group of fake ranks, several of which share an actor."""

    def __init__(self, recipe: Recipe) -> None:
        import ray

        self.recipe = recipe
        remote = ray.remote(FakeRanks).options(num_cpus=0)
        actors = [cast(Any, remote).remote() for _ in range(NUM_ACTORS)]
        self.actors = [actors[rank % NUM_ACTORS] for rank in range(recipe.train.parallel.world_size)]
        self.seconds: list[float] = []

    def _put_shares(self, samples: Any) -> Any:
        began = time.perf_counter()
        references = super()._put_shares(samples)
        self.seconds.append(time.perf_counter() - began)
        return references


class FakeEngines:
    """Answers every request with a sample of full length. At most `IN_FLIGHT` samples await their rewards."""

    def __init__(self, tokens: int, responses: int = 0) -> None:
        draw = random.Random(0)
        sample = Sample("p", "g", [draw.randrange(97, 122) for _ in range(PROMPT_TOKENS)])
        for version in (0, 1):
            count = (tokens - PROMPT_TOKENS) // 2
            sample.append([draw.randrange(97, 122) for _ in range(count)], [-draw.random() for _ in range(count)], version)
        sample.finish_reason = "length"
        self.sample, self.message = sample, pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
        self.slots, self.remaining = asyncio.Semaphore(IN_FLIGHT), responses

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        async for request in requests:
            await self.slots.acquire()
            if not self.remaining:  # The request is not part of a measured step.
                await asyncio.Event().wait()
            self.remaining -= 1
            sample: Sample = pickle.loads(self.message)
            requested = request.sample
            sample.prompt_id, sample.group_id, sample.index = requested.prompt_id, requested.group_id, requested.index
            yield sample

    async def score(self, sample: Sample) -> Sample:
        sample.old_logprobs, sample.old_version = sample.behaviour_logprobs[:], 1
        return sample


class FakeTelemetry:
    """Telemetry that stores the metrics of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float], phase: str) -> None:
        self.rows.append(metrics)

    def event(self, kind: str, message: str) -> None:
        print(f"{kind}: {message}", file=sys.stderr)

    def samples(self, rows: list[Any]) -> None: ...


class Memory:
    """The peak memory of this process, sampled by a thread."""

    def __init__(self) -> None:
        self._process, self._ended = psutil.Process(), threading.Event()
        self.start_bytes = self.peak = self._process.memory_info().rss
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def growth(self) -> int:
        """Growth of the peak since the start, in bytes."""
        self._ended.set()
        return self.peak - self.start_bytes


@contextlib.asynccontextmanager
async def record_stall(stalls: list[float]) -> AsyncIterator[None]:
    """Append the longest delay of the event loop within the block to `stalls`, in seconds."""
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
        stalls.append(longest)


def make_recipe(samples: int, ranks: int, group: int, steps: int) -> Recipe:
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


async def run_steps(recipe: Recipe, tokens: int, folder: Path) -> dict[str, float]:
    """Run the RL stage. Returns figures per step, except for memory, which is that of all steps."""
    count, samples = recipe.train.rl.steps, recipe.train.rl.prompts_per_step * recipe.train.rl.group_size
    make_byte_tokenizer(folder / "tokenizer")
    problems = [Problem(f"p{i}", "a" * PROMPT_TOKENS, "1") for i in range(2 * recipe.train.rl.prompts_per_step)]
    prepared = Prepared(cast(Any, None), load_plain_tokenizer(folder / "tokenizer"), ProblemSets(problems, [], []), context=tokens)
    engines, trainer, rows, stalls = FakeEngines(tokens, count * samples), FakeTrainer(recipe), FakeTelemetry(), list[float]()

    async def sync(version: int) -> dict[str, float]:
        return {"sync/seconds": 0.0}

    async with contextlib.AsyncExitStack() as stack:
        rewards = await start_rewards(recipe, stack, report=print, log=folder / "reward.log")
        freeze_heap()  # As in a run.
        state = RunState(folder, recipe.train)
        stage = RlStage(recipe, prepared, trainer, cast(Generator, engines), sync, rewards, cast(Telemetry, rows), state, engines.score)
        add = stage.buffer.add

        def add_and_release(sample: Sample) -> Group | None:
            engines.slots.release()
            return add(sample)

        stage.buffer.add = add_and_release  # type: ignore[method-assign]
        memory, wall_seconds, loop_seconds = Memory(), time.perf_counter(), time.thread_time()
        async with record_stall(stalls):
            await stage.run()
        loop_seconds, wall_seconds = time.thread_time() - loop_seconds, time.perf_counter() - wall_seconds
    assert len(rows.rows) == count and all(row["perf/tokens_per_s"] > 0 for row in rows.rows)
    return {
        "loop_s": loop_seconds / count,
        "step_s": wall_seconds / count,
        "stall_s": stalls[0],
        "mib_beyond_tokens": (memory.growth() - 4 * samples * tokens) / 2**20,
        "share_s": sum(trainer.seconds) / count,
        "store_bytes_a_token": rows.rows[-1]["bytes"] * recipe.train.parallel.dp / (samples * tokens),
    }


async def save_buffer(count: int, tokens: int, group: int, folder: Path) -> dict[str, float]:
    """Measure a checkpoint of a buffer with `count` samples."""
    engines, buffer, stalls = FakeEngines(tokens), SampleBuffer(), list[float]()
    for number in range(count // group):
        samples = [await engines.score(pickle.loads(engines.message)) for _ in range(group)]
        await buffer.put(Group(number, Problem(f"p{number}", "1", "1"), group, samples))
    began = time.perf_counter()
    async with record_stall(stalls):
        await asyncio.to_thread(buffer.snapshot_writer(folder / "buffer.jsonl"))
    return {"buffer_s": time.perf_counter() - began, "buffer_stall_s": stalls[0]}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=16384)
    arguments.add_argument("--tokens", type=int, default=4096, help="of each sample, prompt and response")
    arguments.add_argument("--ranks", type=int, default=64)
    arguments.add_argument("--group", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=1)
    arguments.add_argument("--saved", type=int, default=0, help="samples in the checkpoint of the buffer; 0: no checkpoint")
    options = arguments.parse_args()
    import ray

    draw = random.Random(0)
    lengths = [draw.randint(options.tokens // 4, options.tokens) for _ in range(options.samples)]
    began = time.process_time()
    partition(lengths, 2 * options.tokens, options.ranks)
    figures = {"partition_s": time.process_time() - began}
    engines = FakeEngines(options.tokens)
    sample = asyncio.run(engines.score(engines.sample))
    columns = (sample.prompt_ids, sample.response_ids, sample.loss_mask, sample.behaviour_logprobs, sample.old_logprobs)
    figures["bytes_a_token"] = sum(sys.getsizeof(column) for column in columns) / options.tokens
    store = max(256 << 20, 24 * options.samples * options.tokens)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address="local", num_cpus=2, object_store_memory=store, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            recipe = make_recipe(options.samples, options.ranks, options.group, options.steps)
            figures |= asyncio.run(run_steps(recipe, options.tokens, Path(folder)))
            if options.saved:
                figures |= asyncio.run(save_buffer(options.saved, options.tokens, options.group, Path(folder)))
    finally:
        ray.shutdown()
    sizes = {"samples": options.samples, "tokens": options.tokens, "ranks": options.ranks}
    print(json.dumps(sizes | {name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
