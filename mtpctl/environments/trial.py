"""Trying an environment on a few problems before anything is started, so that a mistake in it ends no run that is under way."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from mtpctl.data.problems import Problem
from mtpctl.data.taskset import check_runtimes
from mtpctl.data.tokenizers import Tokenizer, load_byte_tokenizer, make_byte_tokenizer
from mtpctl.environments.environment import CLOSE_S, FIELD, EnvironmentClass, EnvironmentFailure, Instance, Message, UserLoops
from mtpctl.environments.turns import ChatReplies, ChatText, Text
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.rollout.protocol import request_for
from mtpctl.samples import GenerationRequest, Sample

if TYPE_CHECKING:
    from mtpctl.rollout.pool import ReplicaPool

TRIED = 3
"""Problems that an environment is tried on."""
TRIAL_S = 60.0
"""Seconds that the trial on one problem may take."""


class ChatTokenizer(Text, ChatText, Protocol):
    """A tokenizer that encodes, decodes and knows the chat template."""


@dataclass(frozen=True)
class EnvironmentTrial:
    """What an environment said when it was tried. `tools`: the JSON schemas of its `tools()` for the first problem, those of the run.

    `rewards`: whether it has `reward()`; True where there was no problem to try it on.
    """

    tools: list[object] = field(default_factory=list)
    stops: frozenset[str] = frozenset()
    replies: tuple[list[Message], ...] = ()
    rewards: bool = True

    def check_text(self, tokenizer: ChatTokenizer) -> None:
        """Raise UserError for a stop text that the model's text cannot hold, and for chat messages that the template does not take."""
        for stop in sorted(self.stops):
            if not tokenizer.decode(tokenizer.encode(stop)).strip():
                raise UserError(
                    f"{FIELD}: stop: {stop!r} is a special token, which is no text and never ends a turn; with stop = [] the end token does"
                )
        try:
            for said in self.replies:
                ChatReplies(tokenizer).tokens(said, None)
        except EnvironmentFailure as failure:
            raise UserError(f"{FIELD}: {failure}") from failure


def try_environment(
    environment: EnvironmentClass, problems: Sequence[object], *, chat: bool, deadline_s: float = TRIAL_S
) -> EnvironmentTrial:
    """Make the environment for the first problems, have it reply to a turn that is its stop string alone, reward and close it.

    `chat`: whether the chat template is used. `deadline_s` is what a response may take in the run; a problem's trial takes no longer, and
    TRIAL_S at most. Raises UserError for the first thing that fails.
    """
    seconds = min(deadline_s, TRIAL_S)

    async def drive() -> list[EnvironmentTrial]:
        loops = UserLoops()
        try:
            return [await _try_one(environment, Instance(environment, each, loops), chat, seconds) for each in problems[:TRIED]]
        finally:
            loops.end()

    try:
        found = asyncio.run(drive())
    except EnvironmentFailure as failure:
        raise UserError(f"{FIELD}: {failure}") from failure
    tools = found[0].tools if found else []
    if tools and not chat:
        raise UserError(f"{FIELD}: {environment.where('tools')} is for the chat template; set data.chat_template: true, or remove it")
    return EnvironmentTrial(
        tools,
        frozenset().union(*(each.stops for each in found)),
        tuple(said for each in found for said in each.replies),
        all(each.rewards for each in found),
    )


async def _try_one(environment: EnvironmentClass, instance: Instance, chat: bool, seconds: float) -> EnvironmentTrial:
    method = "__init__"

    async def play() -> EnvironmentTrial:
        nonlocal method
        await instance.make()
        method = "tools"
        tools = await instance.tools()
        method = "reply"
        said = await instance.reply(instance.stop[0] if instance.stop else "")
        if isinstance(said, list) and said and not chat:
            raise EnvironmentFailure("it replies with chat messages; set data.chat_template: true, or return text")
        method = "reward"
        await instance.reward()
        replies = (said,) if isinstance(said, list) and said else ()
        return EnvironmentTrial(tools, frozenset(instance.stop), replies, instance.has("reward"))

    try:
        found = await asyncio.wait_for(play(), seconds)
        method = "close"
        await asyncio.wait_for(instance.close(), CLOSE_S)
    except TimeoutError as error:
        limit = CLOSE_S if method == "close" else seconds
        raise UserError(f"{FIELD}: {environment.where(method)} took longer than {limit:g} s; make it return") from error
    finally:
        if method != "close":
            with contextlib.suppress(TimeoutError, EnvironmentFailure):  # what went wrong before is told
                await asyncio.wait_for(instance.close(), CLOSE_S)
    return found


# Tries an environment of verifiers on a few problems before any engine is started, with a stand-in for the model.

CONTEXT = 1 << 20
"""Tokens of the stand-in's context: more than any prompt of the trial has."""
EPISODE_S = 180.0
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
    failures = asyncio.run(_episode_failures(rollout, problems[:TRIED]))
    if failures and all(failures):
        raise UserError(f"{FIELD}: {rollout.environment}: {failures[0]} (with {problems[0].prompt_id})")


async def _episode_failures(rollout: RolloutBase, problems: Sequence[Problem]) -> list[str]:
    from mtpctl.environments.agents import playing

    with tempfile.TemporaryDirectory(prefix="mtpctl-trial-") as made:
        make_byte_tokenizer(Path(made))
        tokenizer = load_byte_tokenizer(Path(made))
    size = {"max_tokens": CONTEXT // 2, "context": None, "deadline_s": max(rollout.deadline_s, EPISODE_S), "tool_parser": None}
    rollout = rollout.model_copy(update=size)

    async def asked() -> AsyncIterator[GenerationRequest]:
        for problem in problems:
            first = Sample(problem.prompt_id, problem.prompt_id, tokenizer.encode(problem.prompt))
            yield request_for(rollout, first, context=CONTEXT, end_ids=[tokenizer.eos_id], problem=problem)

    engines = cast("ReplicaPool", StandIn(tokenizer))
    found = {}
    async with playing(rollout, engines, tokenizer, context=CONTEXT, name="stand-in", tell=lambda line: None) as agents:
        async for sample in agents.generate(asked()):
            found[sample.prompt_id] = "" if sample.environment is None else sample.environment.failure
    return [found[problem.prompt_id] for problem in problems]
