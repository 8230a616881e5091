"""Tries an environment of verifiers on a few problems before any engine is started, with a stand-in for the model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

from mtpctl.data.problems import Problem
from mtpctl.data.taskset import FIELD, check_runtimes
from mtpctl.data.tokenizers import Tokenizer, load_byte_tokenizer, make_byte_tokenizer
from mtpctl.environments.agents import playing
from mtpctl.environments.trial import TRIED
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.requests import request_for
from mtpctl.samples import GenerationRequest, Sample

CONTEXT = 1 << 20
"""Tokens of the stand-in's context: more than any prompt of the trial has."""
TRIAL_S = 180.0
"""Seconds that an episode of the trial may take, since its harness may have to be installed first."""
NO_IDEA = "I do not know."
"""What the stand-in says to a problem without an answer."""


class StandIn:
    """Takes the place of the engines. It answers every request with the answer of the problem, or `NO_IDEA`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def sample(self, request: GenerationRequest) -> Sample:
        sample, problem = request.sample.copy(), cast(Problem, request.problem)
        ids = [*self._tokenizer.encode(problem.answer or NO_IDEA), self._tokenizer.eos_id]
        sample.append(ids, [-1.0] * len(ids), 0)
        sample.finish_reason = "stop"
        return sample


def try_episodes(rollout: RolloutBase, problems: Sequence[Problem]) -> None:
    """Play an episode of each of the first `TRIED` problems.

    Raises UserError with the first error where every episode failed, and EnvironmentMissing where a seat would play in a sandbox that
    cannot be had.
    """
    check_runtimes(rollout)
    failures = asyncio.run(_failures(rollout, problems[:TRIED]))
    if failures and all(failures):
        raise UserError(f"{FIELD}: {rollout.environment}: {failures[0]} (with {problems[0].prompt_id})")


async def _failures(rollout: RolloutBase, problems: Sequence[Problem]) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="mtpctl-trial-") as made:
        make_byte_tokenizer(Path(made))
        tokenizer = load_byte_tokenizer(Path(made))
    size = {"max_tokens": CONTEXT // 2, "context": None, "deadline_s": max(rollout.deadline_s, TRIAL_S), "tool_parser": None}
    rollout = rollout.model_copy(update=size)

    async def asked() -> AsyncIterator[GenerationRequest]:
        for problem in problems:
            first = Sample(problem.prompt_id, problem.prompt_id, tokenizer.encode(problem.prompt))
            yield request_for(rollout, first, context=CONTEXT, end_ids=[tokenizer.eos_id], problem=problem)

    engines = cast(ReplicaPool, StandIn(tokenizer))
    found = {}
    async with playing(rollout, engines, tokenizer, context=CONTEXT, name="stand-in", tell=lambda line: None) as agents:
        async for sample in agents.generate(asked()):
            found[sample.prompt_id] = "" if sample.environment is None else sample.environment.failure
    return [found[problem.prompt_id] for problem in problems]
