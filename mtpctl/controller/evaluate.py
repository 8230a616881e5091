"""Held-out accuracy and drafter acceptance, measured on the rollout engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from mtpctl.controller.metrics import cut_share, speculation
from mtpctl.controller.prepare import Prepared
from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_prompt
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.rewards import Checker
from mtpctl.rollout.protocol import DEADLINE, Generator
from mtpctl.samples import GenerationRequest, Sample, response_limit


async def evaluate(recipe: Recipe, prepared: Prepared, generator: Generator, checker: Checker) -> dict[str, float]:
    """`eval/*`: accuracy of one response to each held-out problem, sampled as in rollout, and draft acceptance over these responses.

    Empty where there are no held-out problems.
    """
    problems = {p.prompt_id: p for p in prepared.problems.evaluation}
    if not problems:
        return {}

    async def requests() -> AsyncIterator[GenerationRequest]:
        for number, problem in enumerate(problems.values()):
            yield request_of(recipe, prepared, problem, group_id=f"eval-{number}", index=0, seed=number)

    samples, hits = [], 0.0
    async with contextlib.aclosing(generator.generate(requests())) as answers:
        async for sample in answers:
            text = prepared.tokenizer.decode(sample.response_ids)
            # In a thread: a checker may take seconds, and the event loop has other work meanwhile.
            hits += await asyncio.to_thread(checker, text, problems[sample.prompt_id].answer)
            samples.append(sample)
    metrics = {"eval/accuracy": hits / len(samples), "eval/problems": float(len(samples))}
    metrics |= {name.replace("rollout/", "eval/"): value for name, value in speculation(samples).items()}
    metrics["eval/length_mean"] = sum(len(s.response_ids) for s in samples) / len(samples)
    metrics |= {"eval/truncated_fraction": cut_share(samples, "length"), "eval/deadline_fraction": cut_share(samples, DEADLINE)}
    return metrics


def request_of(recipe: Recipe, prepared: Prepared, problem: Problem, *, group_id: str, index: int, seed: int | None) -> GenerationRequest:
    """The request for one response to one problem, with the sampling parameters of the recipe."""
    rollout = recipe.rollout
    prompt = encode_prompt(prepared.tokenizer, problem, recipe.data, prepared.tools)
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
        problem=problem,
    )
