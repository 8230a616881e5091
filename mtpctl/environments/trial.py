"""Tries the recipe's environment on a few problems before the run starts, so that errors in it are reported early."""

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
from mtpctl.data.tokenizers import Tokenizer, load_plain_tokenizer, make_byte_tokenizer
from mtpctl.environments.environment import CLOSE_S, FIELD, EnvironmentClass, EnvironmentFailure, Instance, Message, UserLoops
from mtpctl.environments.turns import ChatReplies, ChatText, Text
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.rollout.protocol import create_request
from mtpctl.samples import GenerationRequest, Sample

if TYPE_CHECKING:
    from mtpctl.rollout.pool import ReplicaPool

NUM_TRIED = 3
"""Number of problems to try."""
TRIAL_S = 60.0
"""Maximum seconds per problem."""


class ChatTokenizer(Text, ChatText, Protocol):
    """A tokenizer that encodes, decodes and knows the chat template."""


@dataclass(frozen=True)
class EnvironmentTrial:
    """Results of a trial. `tools`: the result of `tools()` for the first problem, which the run uses.

    `rewards`: whether the environment has `reward()`; True if there were no problems to try.
    """

    tools: list[object] = field(default_factory=list)
    stops: frozenset[str] = frozenset()
    replies: tuple[list[Message], ...] = ()
    rewards: bool = True

    def check_text(self, tokenizer: ChatTokenizer) -> None:
        """Raise UserError for a stop string that decoded text cannot contain, and for chat messages that the template rejects."""
        for stop in sorted(self.stops):
            if not tokenizer.decode(tokenizer.encode(stop)).strip():
                raise UserError(
                    f"{FIELD}: stop: {stop!r} is a special token, which decoded text never has; with stop = [] the end token ends turns"
                )
        try:
            for messages in self.replies:
                ChatReplies(tokenizer).tokens(messages, None)
        except EnvironmentFailure as failure:
            raise UserError(f"{FIELD}: {failure}") from failure


def try_environment(
    environment: EnvironmentClass, problems: Sequence[object], *, chat: bool, deadline_s: float = TRIAL_S
) -> EnvironmentTrial:
    """Create the environment for the first problems, call `reply` with its stop string only, then `reward` and `close`.

    `chat`: whether the chat template is used. `deadline_s`: the deadline of a response in the run. The trial of a problem has the
    smaller of this and `TRIAL_S`. Raises UserError for the first failure.
    """
    seconds = min(deadline_s, TRIAL_S)

    async def drive() -> list[EnvironmentTrial]:
        loops = UserLoops()
        try:
            return [await _try_one(environment, Instance(environment, each, loops), chat, seconds) for each in problems[:NUM_TRIED]]
        finally:
            loops.end()

    try:
        trials = asyncio.run(drive())
    except EnvironmentFailure as failure:
        raise UserError(f"{FIELD}: {failure}") from failure
    tools = trials[0].tools if trials else []
    if tools and not chat:
        raise UserError(f"{FIELD}: {environment.where('tools')} is for the chat template; set data.chat_template: true, or remove it")
    return EnvironmentTrial(
        tools,
        frozenset().union(*(each.stops for each in trials)),
        tuple(reply for each in trials for reply in each.replies),
        all(each.rewards for each in trials),
    )


async def _try_one(environment: EnvironmentClass, instance: Instance, chat: bool, seconds: float) -> EnvironmentTrial:
    method = "__init__"

    async def play() -> EnvironmentTrial:
        nonlocal method
        await instance.create()
        method = "tools"
        tools = await instance.tools()
        method = "reply"
        reply = await instance.reply(instance.stop[0] if instance.stop else "")
        if isinstance(reply, list) and reply and not chat:
            raise EnvironmentFailure("it replies with chat messages; set data.chat_template: true, or return text")
        method = "reward"
        await instance.reward()
        replies = (reply,) if isinstance(reply, list) and reply else ()
        return EnvironmentTrial(tools, frozenset(instance.stop), replies, instance.has("reward"))

    try:
        trial = await asyncio.wait_for(play(), seconds)
        method = "close"
        await asyncio.wait_for(instance.close(), CLOSE_S)
    except TimeoutError as error:
        limit = CLOSE_S if method == "close" else seconds
        raise UserError(f"{FIELD}: {environment.where(method)} took longer than {limit:g} s; make it return") from error
    finally:
        if method != "close":
            with contextlib.suppress(TimeoutError, EnvironmentFailure):  # the first failure is reported
                await asyncio.wait_for(instance.close(), CLOSE_S)
    return trial


CONTEXT = 1 << 20
"""Context of the stand-in model in tokens, above any prompt."""
EPISODE_S = 180.0
"""Minimum deadline of an episode in seconds, since its harness may have to be installed first."""
DEFAULT_ANSWER = "I do not know."
"""The stand-in's response to a problem without an answer."""


class StandIn:
    """Replaces the engines: answers every request with the problem's answer, or `DEFAULT_ANSWER`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def sample(self, request: GenerationRequest) -> Sample:
        sample, problem = request.sample.copy(), cast(Problem, request.problem)
        ids = [*self._tokenizer.encode(problem.answer or DEFAULT_ANSWER), self._tokenizer.eos_id]
        sample.append(ids, [-1.0] * len(ids), 0)
        sample.finish_reason = "stop"
        return sample


def try_episodes(rollout: RolloutBase, problems: Sequence[Problem]) -> None:
    """Play an episode of a verifiers environment for each of the first problems, with a stand-in for the model.

    Raises UserError with the first error if all episodes failed, and EnvironmentMissing if a sandbox of the environment is unavailable.
    """
    check_runtimes(rollout)
    failures = asyncio.run(_episode_failures(rollout, problems[:NUM_TRIED]))
    if failures and all(failures):
        raise UserError(f"{FIELD}: {rollout.environment}: {failures[0]} (with {problems[0].prompt_id})")


async def _episode_failures(rollout: RolloutBase, problems: Sequence[Problem]) -> list[str]:
    from mtpctl.environments.agents import open_generator

    with tempfile.TemporaryDirectory(prefix="mtpctl-trial-") as folder:
        make_byte_tokenizer(Path(folder))
        tokenizer = load_plain_tokenizer(Path(folder))
    size = {"max_tokens": CONTEXT // 2, "context": None, "deadline_s": max(rollout.deadline_s, EPISODE_S), "tool_parser": None}
    rollout = rollout.model_copy(update=size)

    async def requests() -> AsyncIterator[GenerationRequest]:
        for problem in problems:
            first = Sample(problem.prompt_id, problem.prompt_id, tokenizer.encode(problem.prompt))
            yield create_request(rollout, first, context=CONTEXT, end_ids=[tokenizer.eos_id], problem=problem)

    engines = cast("ReplicaPool", StandIn(tokenizer))
    failures = {}
    async with open_generator(rollout, engines, tokenizer, context=CONTEXT, name="stand-in", report=lambda line: None) as agents:
        async for sample in agents.generate(requests()):
            failures[sample.prompt_id] = "" if sample.environment is None else sample.environment.failure
    return [failures[problem.prompt_id] for problem in problems]
