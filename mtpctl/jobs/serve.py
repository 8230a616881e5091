"""The job of `mtpctl rollout --serve`: serves the recipe's engines to any agent through the gateway, until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.environments.agents import gateway_socket, playing
from mtpctl.environments.environment import Failures
from mtpctl.jobs.engines import Report, Source, room_for_engines, serving, source_of, with_merged_sync, without_training
from mtpctl.jobs.rollout import origin_of
from mtpctl.recipe.checks import validate
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import Generator, request_for
from mtpctl.rollout.sample_file import SampleFile
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.signals import stop_signals
from mtpctl.sync.store import VersionStore


def serve(recipe: Recipe, out: Path | None, *, host: str, port: int, report: Report, start: str | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Appends the trajectories that agents finish to `out`. Returns their number.

    `start`: as in `source_of`. Raises UserError if the address is in use, the file cannot be written, or the tokenizer has no chat
    template. Errors of the cluster and the engines are raised unchanged.
    """
    served: dict[str, object] = {"agent": None, "agent_args": {}, "environment": "single", "gateway": True}
    served |= {"gateway_host": host, "gateway_port": port}
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=served)})
    validate(without_training(recipe))
    recipe, bound = with_merged_sync(recipe), gateway_socket(recipe.rollout)
    assert bound is not None, "the gateway is on"
    with contextlib.closing(bound), tempfile.TemporaryDirectory(prefix="mtpctl-serve-") as scratch, contextlib.ExitStack() as stack:
        source = source_of(recipe, start, Path(scratch), report)
        report(f"model: {source.name}")
        file = None if out is None else stack.enter_context(SampleFile.open(out, origin_of(recipe, source), {}))
        store = stack.enter_context(room_for_engines(recipe, source, Path(scratch)))
        return asyncio.run(_serve(recipe, source, store, file, bound, report))


async def _serve(recipe: Recipe, source: Source, store: VersionStore, file: SampleFile | None, bound: socket.socket, report: Report) -> int:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for each in stop_signals():
        loop.add_signal_handler(each, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    finished = 0
    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.create_task(_started(recipe, source, store, stack, bound, report))
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        generator = starting.result()
        failures = Failures()
        samples = await stack.enter_async_context(contextlib.aclosing(generator.generate(_trajectories(recipe, source, file))))
        while True:
            next_sample = asyncio.ensure_future(anext(samples))
            await asyncio.wait({next_sample, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not next_sample.done():
                next_sample.cancel()
                await asyncio.gather(next_sample, return_exceptions=True)
                break
            sample = next_sample.result()
            if (failure := failures.first(sample)) is not None:
                report(failure)
            finished += 1
            if file is not None:
                _write(file, sample, source)
    report("stopped")
    return finished


async def _started(
    recipe: Recipe, source: Source, store: VersionStore, stack: contextlib.AsyncExitStack, bound: socket.socket, report: Report
) -> Generator:
    pool: ReplicaPool = await stack.enter_async_context(serving(recipe, source, store, recipe.seed))
    return await stack.enter_async_context(
        playing(
            recipe.rollout,
            pool,
            source.tokenizer,
            context=source.context,
            name=recipe.name,
            report=report,
            trains=False,
            single_requests=lambda: _trajectory(recipe, source, "request"),
            bound=bound,
        )
    )


async def _trajectories(recipe: Recipe, source: Source, file: SampleFile | None) -> AsyncIterator[GenerationRequest]:
    """Requests for trajectories whose problems are unknown, endlessly."""
    names = set() if file is None else {prompt_id for prompt_id, _ in file.done}
    for number in itertools.count():
        if (name := f"trajectory/{number}") not in names:
            yield _trajectory(recipe, source, name)


def _trajectory(recipe: Recipe, source: Source, name: str) -> GenerationRequest:
    problem = Problem(name, "", NO_ANSWER)
    return request_for(recipe.rollout, Sample(name, name, []), context=source.context, end_ids=source.ends.ids, problem=problem)


def _write(file: SampleFile, sample: Sample, source: Source) -> None:
    """Write a trajectory, if its agent sent at least one request."""
    if sample.response_ids:
        sample.reward = sample.environment_reward
        file.append(sample, source.tokenizer.decode(sample.prompt_ids, special=True), source.tokenizer.decode(sample.response_ids))
