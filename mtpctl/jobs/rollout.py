"""The jobs of `mtpctl rollout`: generates responses to a file of prompts, or serves the engines to any agent through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpctl.data.problems import NO_ANSWER, Problem
from mtpctl.data.prompts import encode_prompt, uses_chat_template
from mtpctl.data.sets import read_problems
from mtpctl.environments.agents import bind_gateway, open_generator
from mtpctl.environments.environment import Failures, load_environment_class
from mtpctl.environments.trial import try_environment
from mtpctl.errors import UserError
from mtpctl.jobs.engines import (
    Report,
    WeightSource,
    engine_cluster,
    find_weights,
    scratch_folder,
    serving,
    with_local_merged_sync,
    without_rl,
)
from mtpctl.recipe.checks import validate
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import Generator, create_request
from mtpctl.rollout.sample_file import Origin, SampleFile, Tally
from mtpctl.samples import GenerationRequest, Sample, ids_of
from mtpctl.signals import stop_signals
from mtpctl.sync.store import VersionStore

Reward = Callable[[str, Sample], Awaitable[float | None]]
"""Rewards one response, given its text and its sample. Returns None if the reward function failed."""
Progress = Callable[[int, int, Tally], None]
"""Called after every sample with the number of samples in the file, their final number, and their tally."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        number: position among the prompts.
        answer: the reference that the reward needs, if any.
        problem: passed to the environment.
    """

    number: int
    prompt_id: str
    text: str
    ids: list[int]
    answer: str | None = None
    problem: object = None


def rollout(
    recipe: Recipe, prompts: Path, out: Path, *, n: int, report: Report, progress: Progress, from_weights: str | None = None
) -> dict[str, Any]:
    """Generate `n` responses per prompt, except those that `out` has already, and append them to it. Returns the summary.

    `from_weights`: run, checkpoint or model folder whose weights are used; default: those of the recipe's run or model.

    Before anything starts, raises UserError for unsuitable prompts, model or file, and PrerequisiteMissing if the recipe's engine is not
    installed. Errors of the cluster and the engines (ClusterResources, RuntimeFailure) are raised unchanged.
    """
    validate(without_rl(recipe))
    recipe = with_local_merged_sync(recipe)
    if n < 1:
        raise UserError(f"--n: must be at least 1, got {n}")
    problems = read_problems(prompts, "--prompts", require_answers=False, columns=recipe.data.columns)
    if out.exists() and out.samefile(prompts):
        raise UserError(f"--out: {out} holds the prompts; name another file")
    with scratch_folder(recipe, "rollout") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        source = find_weights(recipe, from_weights, folder, report)
        report(f"model: {source.name}")
        if source.end_tokens.disagreement:
            report(source.end_tokens.disagreement)
        tools: Sequence[object] = ()
        if (environment := load_environment_class(recipe.rollout)) is not None:
            chat = uses_chat_template(recipe.data, problems)
            trial = try_environment(environment, problems, chat=chat, deadline_s=recipe.rollout.deadline_s)
            trial.check_text(source.tokenizer)
            tools = trial.tools
        prompt_rows = []
        for number, problem in enumerate(problems):
            ids = encode_prompt(source.tokenizer, problem, recipe.data, tools)
            if len(ids) >= source.context:
                raise UserError(
                    f"{problem.prompt_id}: the prompt has {len(ids)} tokens, which leaves no room for a response in the context of "
                    f"{source.context}; shorten or remove it, or raise rollout.context"
                )
            answer = None if problem.answer == NO_ANSWER else problem.answer
            prompt_rows.append(Prompt(number, problem.prompt_id, problem.prompt, ids, answer, problem))
        file = stack.enter_context(
            SampleFile.open(out, origin_of(recipe, source), {prompt.prompt_id: prompt.text for prompt in prompt_rows})
        )
        missing = missing_responses(prompt_rows, n, file.keys)
        old_samples, old_tokens = file.tally.samples, file.tally.tokens
        seconds = 0.0
        if missing:
            if old_samples:
                report(f"{out} has {old_samples} samples; {len(missing)} are missing")
            by_id = {problem.prompt_id: problem for problem in problems}
            seconds = _generate(recipe, source, missing, file, folder, progress, by_id, report)
        else:
            report(f"{out} has all {old_samples} samples")
        new_samples, new_tokens = file.tally.samples - old_samples, file.tally.tokens - old_tokens
        counts = summary(file.tally, new_samples=new_samples, new_tokens=new_tokens, seconds=seconds)
        return counts | {"model": source.name, "out": str(out)}


def origin_of(recipe: Recipe, source: WeightSource) -> Origin:
    """The origin of samples of this recipe and these weights."""
    rollout, data = recipe.rollout, recipe.data
    return Origin(
        recipe.name,
        {
            "model": str(source.model.path.resolve()),
            "checkpoint": None if source.checkpoint is None else str(source.checkpoint.resolve()),
            "version": source.version,
            "tokenizer": recipe.model.tokenizer,
            "precision": [recipe.train.precision, rollout.dtype],
            "context": source.context,
            "seed": recipe.seed,
            "sampling": [rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens, rollout.stop, _extra_end_ids(source)],
            "environment": _environment(rollout),
            "prompt": [data.chat_template, data.system_prompt],
            "checker": recipe.reward.function,
            **({"reward": recipe.reward.args} if recipe.reward.args else {}),
        },
    )


def _extra_end_ids(source: WeightSource) -> list[int]:
    """The end tokens other than EOS. If EOS is not an end token: -1, followed by all end tokens."""
    eos, ids = source.tokenizer.eos_id, list(source.end_tokens.ids)
    return [token for token in ids if token != eos] if eos in ids else [-1, *ids]


def _environment(rollout: RolloutBase) -> list[object]:
    if rollout.uses_agents and rollout.verifiers is None:  # `agent` is None if agents connect over the network
        return [rollout.agent, rollout.max_turns, rollout.agent_args]
    if rollout.environment == "single":
        return []
    return [rollout.environment, rollout.max_turns, *([rollout.environment_args] if rollout.environment_args else [])]


def _generate(
    recipe: Recipe,
    source: WeightSource,
    missing: list[tuple[Prompt, int]],
    file: SampleFile,
    folder: Path,
    progress: Progress,
    problems: Mapping[str, Problem],
    report: Report,
) -> float:
    """Start the engines, generate `missing`, and end the engines. Returns the seconds of generation alone."""
    # The engines must not repeat the random numbers of the samples in the file.
    seed = recipe.seed + 7919 * file.tally.samples

    async def run_engines(store: VersionStore) -> float:
        async with (
            serving(recipe, source, store, seed) as pool,
            Rewarder(recipe.reward, report=report) as rewarder,
            open_generator(
                recipe.rollout, pool, source.tokenizer, context=source.context, name=recipe.name, report=report, trains=False
            ) as generator,
        ):

            async def reward(text: str, sample: Sample) -> float | None:
                outcome = await rewarder(text, problems[sample.prompt_id], sample)
                sample.reward_parts = outcome.parts
                return outcome.reward

            return await generate_responses(
                generator,
                missing,
                file,
                recipe.rollout,
                context=source.context,
                end_ids=source.end_tokens.ids,
                decode=source.tokenizer.decode,
                reward=reward,
                seed=recipe.seed if recipe.async_.deterministic else None,
                progress=progress,
                report=report,
            )

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(engine_cluster(recipe, source, folder))
        return asyncio.run(run_engines(store))


def missing_responses(prompts: Iterable[Prompt], n: int, done: set[tuple[str, int]]) -> list[tuple[Prompt, int]]:
    """The responses that are not in `done`, as prompt and index of the response, in the order of the prompts."""
    return [(prompt, index) for prompt in prompts for index in range(n) if (prompt.prompt_id, index) not in done]


async def generate_responses(
    generator: Generator,
    missing: list[tuple[Prompt, int]],
    out: SampleFile,
    rollout: RolloutBase,
    *,
    context: int,
    end_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    reward: Reward,
    seed: int | None = None,
    progress: Progress = lambda done, total, tally: None,
    report: Report = lambda line: None,
) -> float:
    """Generate the `missing` responses with the sampling parameters of `rollout`, and write each when it is finished. Returns the seconds.

    After an error or an interrupt, the finished samples are in the file. `seed`: seeds every request separately, so that a response does
    not depend on the others. `report`: receives failures of the user's environment.
    """
    prompts = {prompt.prompt_id: prompt for prompt, _ in missing}
    failures = Failures()
    total, started_at = len(out.keys) + len(missing), time.perf_counter()

    async def requests() -> AsyncIterator[GenerationRequest]:
        for prompt, index in missing:
            sample = Sample(prompt.prompt_id, prompt.prompt_id, ids_of(prompt.ids), index=index)
            request_seed = None if seed is None else (seed * 1_000_003 + prompt.number) * 65_537 + index
            yield create_request(rollout, sample, context=context, end_ids=end_ids, seed=request_seed, problem=prompt.problem)

    async def write(sample: Sample) -> None:
        prompt, text = prompts[sample.prompt_id], decode(sample.response_ids)
        if prompt.answer is not None:
            sample.reward = await reward(text, sample)
        out.append(sample, prompt.text, text)
        progress(len(out.keys), total, out.tally)

    write_tasks: list[asyncio.Task[None]] = []
    try:
        async with contextlib.aclosing(generator.generate(requests())) as samples:
            async for sample in samples:
                if (failure := failures.unreported(sample)) is not None:
                    report(failure)
                write_tasks.append(asyncio.create_task(write(sample)))
    finally:
        # Finished samples get their rewards after an error or an interrupt as well.
        await asyncio.gather(*write_tasks)
    return time.perf_counter() - started_at


def summary(tally: Tally, *, new_samples: int, new_tokens: int, seconds: float) -> dict[str, Any]:
    """Counts and means of a rollout: `made`, `seconds` and `tokens_per_s` of this call, the others of the whole file."""
    speculation = tally.speculation
    return {
        "samples": tally.samples,
        "made": new_samples,
        "seconds": seconds,
        "tokens_per_s": new_tokens / seconds if seconds else None,
        "tokens": tally.tokens,
        "length_mean": tally.tokens / tally.samples if tally.samples else None,
        "reward_mean": tally.reward_sum / tally.num_rewarded if tally.num_rewarded else None,
        "rewarded": tally.num_rewarded,
        "drafted": speculation.drafted,
        "accepted": speculation.accepted,
        "accept_rate": speculation.accept_rate if speculation.drafted else None,
        "accept_length": speculation.accept_length if speculation.drafted else None,
        "finish_reasons": dict(sorted(tally.finish_reasons.items())),
    }


def serve(recipe: Recipe, out: Path | None, *, host: str, port: int, report: Report, from_weights: str | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Appends the trajectories that agents finish to `out`. Returns their number.

    `from_weights`: as in `rollout`. Raises UserError if the address is in use, the file cannot be written, or the tokenizer has no chat
    template. Errors of the cluster and the engines are raised unchanged.
    """
    gateway_keys: dict[str, object] = {"agent": None, "agent_args": {}, "environment": "single", "gateway": True}
    gateway_keys |= {"gateway_host": host, "gateway_port": port}
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=gateway_keys)})
    validate(without_rl(recipe))
    recipe, listener = with_local_merged_sync(recipe), bind_gateway(recipe.rollout)
    assert listener is not None, "the gateway is on"
    with contextlib.closing(listener), scratch_folder(recipe, "serve") as scratch, contextlib.ExitStack() as stack:
        source = find_weights(recipe, from_weights, Path(scratch), report)
        report(f"model: {source.name}")
        file = None if out is None else stack.enter_context(SampleFile.open(out, origin_of(recipe, source), {}))
        store = stack.enter_context(engine_cluster(recipe, source, Path(scratch)))
        return asyncio.run(_serve(recipe, source, store, file, listener, report))


async def _serve(
    recipe: Recipe, source: WeightSource, store: VersionStore, file: SampleFile | None, listener: socket.socket, report: Report
) -> int:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for signal_number in stop_signals():
        loop.add_signal_handler(signal_number, stopping.set)
    stop_task = asyncio.create_task(stopping.wait())
    finished = 0
    async with contextlib.AsyncExitStack() as stack:
        start_task = asyncio.create_task(_start_generator(recipe, source, store, stack, listener, report))
        await asyncio.wait({start_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        if not start_task.done():
            start_task.cancel()
            await asyncio.gather(start_task, return_exceptions=True)
            return 0
        generator = start_task.result()
        failures = Failures()
        samples = await stack.enter_async_context(contextlib.aclosing(generator.generate(_trajectory_requests(recipe, source, file))))
        while True:
            next_sample = asyncio.ensure_future(anext(samples))
            await asyncio.wait({next_sample, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            if not next_sample.done():
                next_sample.cancel()
                await asyncio.gather(next_sample, return_exceptions=True)
                break
            sample = next_sample.result()
            if (failure := failures.unreported(sample)) is not None:
                report(failure)
            finished += 1
            if file is not None:
                _write(file, sample, source)
    report("stopped")
    return finished


async def _start_generator(
    recipe: Recipe, source: WeightSource, store: VersionStore, stack: contextlib.AsyncExitStack, listener: socket.socket, report: Report
) -> Generator:
    pool: ReplicaPool = await stack.enter_async_context(serving(recipe, source, store, recipe.seed))
    return await stack.enter_async_context(
        open_generator(
            recipe.rollout,
            pool,
            source.tokenizer,
            context=source.context,
            name=recipe.name,
            report=report,
            trains=False,
            create_single_request=lambda: _trajectory_request(recipe, source, "request"),
            listener=listener,
        )
    )


async def _trajectory_requests(recipe: Recipe, source: WeightSource, file: SampleFile | None) -> AsyncIterator[GenerationRequest]:
    """An endless series of requests, one for each trajectory of an external agent. Their problems are not known here."""
    names = set() if file is None else {prompt_id for prompt_id, _ in file.keys}
    for number in itertools.count():
        if (name := f"trajectory/{number}") not in names:
            yield _trajectory_request(recipe, source, name)


def _trajectory_request(recipe: Recipe, source: WeightSource, name: str) -> GenerationRequest:
    problem = Problem(name, "", NO_ANSWER)
    return create_request(recipe.rollout, Sample(name, name, []), context=source.context, end_ids=source.end_tokens.ids, problem=problem)


def _write(file: SampleFile, sample: Sample, source: WeightSource) -> None:
    """Write a trajectory, unless it has no response because its agent sent no request."""
    if sample.response_ids:
        sample.reward = sample.environment_reward
        file.append(sample, source.tokenizer.decode(sample.prompt_ids, special=True), source.tokenizer.decode(sample.response_ids))
