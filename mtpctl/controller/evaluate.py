"""Held-out accuracy and drafter acceptance, measured on the rollout engines."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator

from mtpctl.controller.metrics import cut_share, speculation
from mtpctl.controller.prepare import Prepared
from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_prompt
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards.outcome import Outcome, Reward
from mtpctl.rollout.protocol import DEADLINE, Generator
from mtpctl.samples import GenerationRequest, Sample, response_limit


async def evaluate(recipe: Recipe, prepared: Prepared, generator: Generator, reward: Reward) -> dict[str, float]:
    """`eval/*`: accuracy of one response to each held-out problem, sampled as in rollout, and draft acceptance over these responses.

    The accuracy is the mean reward, which is taken of each response while others are generated; a reward that failed counts as 0.
    Empty where there are no held-out problems.
    """
    problems = {p.prompt_id: p for p in prepared.problems.evaluation}
    if not problems:
        return {}

    async def requests() -> AsyncIterator[GenerationRequest]:
        for number, problem in enumerate(problems.values()):
            yield request_of(recipe, prepared, problem, group_id=f"eval-{number}", index=0, seed=number)

    async def rewarded(sample: Sample) -> Outcome:
        return await reward(prepared.tokenizer.decode(sample.response_ids), problems[sample.prompt_id], sample)

    samples: list[Sample] = []
    rewards: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as tasks, contextlib.aclosing(generator.generate(requests())) as answers:
        async for sample in answers:
            samples.append(sample)
            rewards.append(tasks.create_task(rewarded(sample)))
    outcomes = [task.result() for task in rewards]
    metrics = {"eval/accuracy": statistics.fmean(each.reward or 0.0 for each in outcomes), "eval/problems": float(len(samples))}
    if failed := sum(bool(each.error) for each in outcomes):
        metrics["eval/reward_errors"] = float(failed)
    metrics |= {name.replace("rollout/", "eval/"): value for name, value in speculation(samples).items()}
    metrics["eval/length_mean"] = sum(len(s.response_ids) for s in samples) / len(samples)
    metrics |= {"eval/truncated_fraction": cut_share(samples, "length"), "eval/deadline_fraction": cut_share(samples, DEADLINE)}
    return metrics


def request_of(recipe: Recipe, prepared: Prepared, problem: Problem, *, group_id: str, index: int, seed: int | None) -> GenerationRequest:
    """The request for one response to one problem, with the sampling parameters of the recipe."""
    rollout = recipe.rollout
    prompt = encode_prompt(prepared.tokenizer, problem, recipe.data)
    sample = Sample(prompt_id=problem.prompt_id, group_id=group_id, prompt_ids=prompt, index=index)
    return GenerationRequest(
        sample=sample,
        max_tokens=response_limit(sample, max_tokens=rollout.max_tokens, context=prepared.context),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=seed,
        stop=rollout.stop,
        stop_token_ids=[prepared.tokenizer.eos_id, *rollout.stop_ids],
        deadline_s=rollout.deadline_s,
    )
