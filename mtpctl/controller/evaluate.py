"""Held-out sets, measured on the rollout engines: accuracy, avg@n and pass@k, and drafter acceptance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from mtpctl.controller.metrics import cut_share, speculation
from mtpctl.controller.prepare import Prepared
from mtpctl.data.problems import Problem
from mtpctl.data.sets import UNNAMED
from mtpctl.recipe.evaluation import EvaluationSetConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rl.groups import mean_pass_at_k
from mtpctl.rl.rewards.function import Reward
from mtpctl.rollout.protocol import DEADLINE, Generator, request_for
from mtpctl.samples import GenerationRequest, Sample, response_limit

TakeAnswers = Callable[[Mapping[str, list[tuple[Problem, list[Sample]]]]], None]
"""Takes the responses to the problems of each held-out set, by the name of the set."""


@dataclass(slots=True)
class HeldOut:
    """One held-out set in an evaluation: its problems, the responses to each so far, and how many of them could not be rewarded."""

    name: str
    config: EvaluationSetConfig
    problems: list[Problem]
    answers: list[list[Sample]] = field(init=False)
    errors: int = 0

    def __post_init__(self) -> None:
        self.answers = [[] for _ in self.problems]

    @property
    def samples(self) -> list[Sample]:
        """All responses, problem after problem."""
        return [sample for each in self.answers for sample in each]

    def metrics(self) -> dict[str, float]:
        """`eval/*` of the set of the section `data`, `eval/NAME/*` of a set by name."""
        prefix, samples, n = f"eval/{self.name}/" if self.name else "eval/", self.samples, self.config.n
        rewards = [[sample.reward or 0.0 for sample in each] for each in self.answers]
        mean = sum(map(sum, rewards)) / len(samples)
        found = {"accuracy": mean} if self.name == UNNAMED else {}
        if self.name != UNNAMED or n > 1:
            right = [sum(reward >= self.config.right_from for reward in each) for each in rewards]
            found |= {f"avg@{n}": mean} | {f"pass@{k}": value for k, value in mean_pass_at_k(right, n).items()}
        found |= {"problems": float(len(self.problems)), "length_mean": sum(len(s.response_ids) for s in samples) / len(samples)}
        found |= {"truncated_fraction": cut_share(samples, "length"), "deadline_fraction": cut_share(samples, DEADLINE)}
        if self.errors:
            found["reward_errors"] = float(self.errors)
        metrics = {prefix + name: value for name, value in found.items()}
        return metrics | {name.replace("rollout/", prefix): value for name, value in speculation(samples).items()}


async def evaluate(
    recipe: Recipe,
    prepared: Prepared,
    generator: Generator,
    rewards: Mapping[str, Reward],
    *,
    version: int = 0,
    n: int | None = None,
    asked: Callable[[], None] = lambda: None,
    sampled: Callable[[Sample], None] = lambda sample: None,
    progressed: Callable[[], None] = lambda: None,
    answered: TakeAnswers = lambda answers: None,
) -> dict[str, float]:
    """`eval/*`: what the responses to all held-out problems are worth, and draft acceptance over them. Empty without such problems.

    Responses are sampled as in rollout, but where their set says otherwise, and rewarded while others are generated; `rewards` are by the
    names of sets, and that of `UNNAMED` serves those that have none. A reward that failed counts as 0. `version` is the weight version
    that the engines have at the begin: `eval/mixed_fraction` is the share of responses with a token of another one. `n` replaces the
    number of responses that the sets ask for. `asked` is called at every request, `sampled` with every response, `progressed` whenever one
    gets further, `answered` at the end, with all of them.
    """
    sets = []
    for name, problems in prepared.problems.held_out.items():
        config = recipe.evaluation.of(name)
        sets.append(HeldOut(name, config if n is None else config.model_copy(update={"n": n}), problems))
    if not sets:
        return {}
    places: dict[str, tuple[HeldOut, int]] = {}

    async def requests() -> AsyncIterator[GenerationRequest]:
        for held_out in sets:
            for number, problem in enumerate(held_out.problems):
                group = f"eval-{held_out.name}-{number}" if held_out.name else f"eval-{number}"
                places[group] = held_out, number
                for index in range(held_out.config.n):
                    asked()
                    yield _request(recipe, prepared, held_out.config, problem, group, index, seed=number * held_out.config.n + index)

    async def reward(sample: Sample) -> None:
        held_out, number = places[sample.group_id]
        text = await prepared.text_of(sample)
        outcome = await rewards.get(held_out.name, rewards[UNNAMED])(text, held_out.problems[number], sample)
        sample.reward, sample.reward_parts = outcome.reward or 0.0, outcome.parts
        held_out.errors += bool(outcome.error)
        held_out.answers[number].append(sample)
        progressed()

    try:
        async with asyncio.TaskGroup() as tasks, contextlib.aclosing(generator.generate(requests())) as samples:
            async for sample in samples:
                sampled(sample)
                progressed()
                tasks.create_task(reward(sample))
    except ExceptionGroup as group:
        raise _first(group) from group
    answered({each.name: list(zip(each.problems, each.answers, strict=True)) for each in sets})
    every = [sample for held_out in sets for sample in held_out.samples]
    mixed = sum(any(span.version != version for span in sample.version_spans) for sample in every)
    metrics = {"eval/version": float(version), "eval/mixed_fraction": mixed / len(every)}
    for held_out in sets:
        metrics |= held_out.metrics()
    return metrics


def cut_responses(recipe: Recipe, metrics: Mapping[str, float]) -> tuple[int, int]:
    """How many responses of an evaluation `rollout.deadline_s` cut, and how many there were."""
    cut = all_ = 0
    for name, share in metrics.items():
        if name.endswith("/deadline_fraction"):
            prefix = name.removesuffix("deadline_fraction")
            each = recipe.evaluation.sets.get(prefix.removeprefix("eval/").strip("/"), EvaluationSetConfig())
            responses = round(metrics[f"{prefix}problems"]) * each.n
            cut, all_ = cut + round(share * responses), all_ + responses
    return cut, all_


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


def _request(
    recipe: Recipe, prepared: Prepared, config: EvaluationSetConfig, problem: Problem, group: str, index: int, seed: int
) -> GenerationRequest:
    """The request for one response, sampled as the set says."""
    request = request_of(recipe, prepared, problem, group_id=group, index=index, seed=seed)
    if config.temperature is not None:
        request = replace(request, temperature=config.temperature)
    if config.max_tokens is not None:
        limit = response_limit(request.sample, max_tokens=config.max_tokens, context=prepared.context)
        request = replace(request, max_tokens=limit)
    return request


def request_of(recipe: Recipe, prepared: Prepared, problem: Problem, *, group_id: str, index: int, seed: int | None) -> GenerationRequest:
    """The request for one response to one problem, with the sampling parameters of the recipe."""
    prompt = prepared.prompt_ids(problem, recipe.data)
    sample = Sample(prompt_id=problem.prompt_id, group_id=group_id, prompt_ids=prompt, index=index)
    return request_for(recipe.rollout, sample, context=prepared.context, end_ids=prepared.end_ids, seed=seed, problem=problem)
