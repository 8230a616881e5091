"""The sender and receiver of `mtpctl bench sync-weights`: a trainer in a separate process, and an engine under load."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections import deque
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpctl.errors import RuntimeFailure
from mtpctl.families.reading import shape_of
from mtpctl.recipe.schema import Recipe
from mtpctl.sync.protocol import Manifest, PauseMode, Section
from mtpctl.sync.sender import Sender
from mtpctl.sync.transports.base import TransferStats
from mtpctl.sync.update import SyncReport

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm.v1.engine.async_llm import AsyncLLM

    from mtpctl.bench.sync_weights import Options
    from mtpctl.rollout.vllm.engine import VllmEngine

RECOVERED_SHARE = 0.9
"""Throughput has recovered from a sync when it reaches this share of its value before the sync."""


def _run_trainer(pipe: Connection, recipe_json: str, folder: str, visible_gpus: str) -> None:
    if visible_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus
    from mtpctl.compat import cpu_device
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine
    from mtpctl.trainer.sending import WeightExporter

    class BenchSource(WeightExporter):
        """Sends the trainer's weights. The transport can be changed."""

        def use(self, transport: str) -> None:
            """Send the next versions over this transport."""
            if isinstance(self._sender, Sender):
                self._sender.close()
            sync = self.recipe.sync.model_copy(update={"transport": transport})
            super().__init__(self.recipe.model_copy(update={"sync": sync}), self.rank, self.engine)

        def probe(self, number: int) -> TransferStats:
            """Send buckets without packing, to measure the link."""
            return self._pusher.probe(number)

        def memory(self, reset: bool = False) -> dict[str, int]:
            """Read the memory of the trainer's GPU."""
            from mtpctl.sync.receiver import gpu_memory

            return gpu_memory(reset=reset)

    cpu_device.install()
    recipe = Recipe.model_validate_json(recipe_json)
    config = json.loads((Path(folder) / "config.json").read_text())
    settings = EngineConfig(
        parallel=recipe.train.parallel, precision=recipe.train.precision, mtp=recipe.mtp, kernels=recipe.kernels, train=False, random_seed=1
    )
    engine = MegatronEngine(HfFolder(Path(folder), config, shape_of(config)), settings)
    exporter = BenchSource(recipe, 0, engine)
    pipe.send((True, None))
    while (request := pipe.recv()) is not None:
        method, arguments = request
        try:
            pipe.send((True, getattr(exporter, method)(*arguments)))
        except Exception as error:
            pipe.send((False, error))
    engine.close()


class TrainerProcess:
    """Interface to the trainer's process, with the methods of `TrainerGroup` that `WeightSync` calls."""

    def __init__(self, recipe: Recipe, folder: Path, visible_gpus: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=_run_trainer, args=(child_pipe, recipe.model_dump_json(by_alias=True), str(folder), visible_gpus), daemon=True
        )
        self._process.start()
        self._lock = asyncio.Lock()

    async def ready(self) -> None:
        """Wait until the model is loaded."""
        await self._receive_result("creating the model")

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the trainer's `BenchSource`. Returns its result or raises its error."""
        async with self._lock:
            self._pipe.send((method, arguments))
            return await self._receive_result(method)

    async def plan_weights(
        self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]
    ) -> Manifest | None:
        manifest: Manifest | None = await self.call("plan_weights", version, store, members, checksums, sections)
        return manifest

    async def transfer_weights(self) -> TransferStats | None:
        stats: TransferStats | None = await self.call("transfer_weights")
        return stats

    async def persist_weights(self) -> None:
        await self.call("persist_weights")

    async def _receive_result(self, action: str) -> Any:
        while not await asyncio.to_thread(self._pipe.poll, 0.5):
            if not self._process.is_alive():
                raise RuntimeFailure(f"the trainer's process ended during {action}, exit code {self._process.exitcode}")
        succeeded, result = self._pipe.recv()
        if not succeeded:
            raise result
        return result

    def end(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


class SingleEngine:
    """One engine, with the methods of `ReplicaPool` that `WeightSync` calls."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    def quiesce(self, mode: PauseMode) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def rank_names(self, num_ranks: int) -> list[str]:
        return [f"engine {rank}" for rank in range(num_ranks)]

    async def apply_update(self, manifest: Manifest, *, mode: PauseMode, verify: bool, deadline_s: float) -> list[SyncReport]:
        from mtpctl.sync.update import cancel_on_error

        report: SyncReport = await cancel_on_error(manifest, self.engine.update(manifest, mode=mode, verify=verify, deadline_s=deadline_s))
        return [report]


class RequestLoad:
    """Keeps a constant number of requests in flight, and records when their tokens arrive."""

    def __init__(self, llm: AsyncLLM, options: Options) -> None:
        self._llm, self._options = llm, options
        self.arrivals: deque[tuple[float, int]] = deque()
        self._tasks = [asyncio.create_task(self._send(slot)) for slot in range(options.batch)]

    async def _send(self, slot: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        prompt = [3 + (slot * 7 + i) % 200 for i in range(self._options.prompt)]
        turn = 0
        while True:
            sampling = SamplingParams(
                max_tokens=self._options.tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
            )
            async for step in self._llm.generate(tokens_input(prompt), sampling, f"load-{slot}-{turn}"):
                self.arrivals.append((time.perf_counter(), len(step.outputs[0].token_ids)))
            turn += 1

    def check(self) -> None:
        """Raise the error if a request failed: measurements with the remaining requests would be at a lower load."""
        for task in self._tasks:
            if task.done():
                task.result()

    def rate(self, start: float, stop: float) -> float:
        """Tokens per second in `[start, stop)`."""
        return sum(count for arrived_at, count in self.arrivals if start <= arrived_at < stop) / (stop - start)

    def recent_rate(self, seconds: float) -> float:
        """Tokens per second in the last `seconds`. Raises RuntimeFailure if there were none, because a stall could not be measured."""
        now = time.perf_counter()
        if rate := self.rate(now - seconds, now):
            return rate
        raise RuntimeFailure(f"the engine generated nothing in {seconds:g} s, with {self._options.batch} requests in flight")

    def recovery(self, since: float, rate: float) -> float:
        """Seconds from `since` to the end of the first window with a rate of `RECOVERED_SHARE * rate` or more; infinite without one."""
        window = self._options.window_s
        last_arrival = self.arrivals[-1][0]
        window_start = since
        while window_start + window <= last_arrival:
            if self.rate(window_start, window_start + window) >= RECOVERED_SHARE * rate:
                return window_start + window - since
            window_start += window / 20
        return float("inf")

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
