"""Tries the recipe's environment on a few problems before the run starts, so that errors in it are reported early."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mtpctl.data.problems import Problem
from mtpctl.data.taskset import check_runtimes
from mtpctl.data.tokenizers import Tokenizer, load_plain_tokenizer, make_byte_tokenizer
from mtpctl.environments.environment import (
    CLOSE_TIMEOUT_S,
    ENVIRONMENT_KEY,
    EnvironmentClass,
    EnvironmentFailure,
    Instance,
    Message,
    UserLoops,
)
from mtpctl.environments.turns import ChatReplies, ChatTokenizer
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.rollout.protocol import create_request
from mtpctl.samples import GenerationRequest, Sample

if TYPE_CHECKING:
    from mtpctl.rollout.pool import ReplicaPool

NUM_TRIAL_PROBLEMS = 3
"""Number of problems to try."""
TRIAL_TIMEOUT_S = 60.0
"""Maximum seconds per problem, without `close`."""


@dataclass(frozen=True)
class EnvironmentTrial:
    """Results of a trial.

    `tools`: the result of `tools()` for the first problem; the run uses it. `stops`: the stop strings of all instances. `replies`: their
    replies that are chat messages. `has_reward`: whether the environment has `reward()`; True if there were no problems to try.
    """

    tools: list[object] = field(default_factory=list)
    stops: frozenset[str] = frozenset()
    replies: tuple[list[Message], ...] = ()
    has_reward: bool = True

    def check_text(self, tokenizer: ChatTokenizer) -> None:
        """Raise UserError for a stop string that decoded text cannot contain, and for chat messages that the template rejects."""
        for stop in sorted(self.stops):
            if stop.strip() and not tokenizer.decode(tokenizer.encode(stop)).strip():
                raise UserError(
                    f"{ENVIRONMENT_KEY}: stop: {stop!r} is a special token, which decoded text never contains; set stop = [] to end turns "
                    "at the end token"
                )
        try:
            for messages in self.replies:
                ChatReplies(tokenizer).tokens(messages, None)
        except EnvironmentFailure as failure:
            raise UserError(f"{ENVIRONMENT_KEY}: {failure}") from failure


def try_environment(
    environment: EnvironmentClass, problems: Sequence[object], *, chat: bool, deadline_s: float = TRIAL_TIMEOUT_S
) -> EnvironmentTrial:
    """Create the environment for each of the first problems, and call `tools`, `reply`, `reward` and `close`.

    The response for `reply` is the environment's first stop string, or an empty text.

    `chat`: whether the chat template is used. `deadline_s`: the deadline of a response in the run. The calls for one problem,
    except `close`, must return within the smaller of this and `TRIAL_TIMEOUT_S`. Raises UserError for the first failure.
    """
    timeout_s = min(deadline_s, TRIAL_TIMEOUT_S)

    async def try_all() -> list[EnvironmentTrial]:
        loops = UserLoops()
        try:
            return [
                await _try_problem(environment, Instance(environment, problem, loops), chat, timeout_s)
                for problem in problems[:NUM_TRIAL_PROBLEMS]
            ]
        finally:
            loops.end()

    try:
        trials = asyncio.run(try_all())
    except EnvironmentFailure as failure:
        raise UserError(f"{ENVIRONMENT_KEY}: {failure}") from failure
    tools = trials[0].tools if trials else []
    if tools and not chat:
        raise UserError(
            f"{ENVIRONMENT_KEY}: {environment.location_of('tools')} is for the chat template; set data.chat_template: true, or remove it"
        )
    return EnvironmentTrial(
        tools,
        frozenset().union(*(trial.stops for trial in trials)),
        tuple(reply for trial in trials for reply in trial.replies),
        all(trial.has_reward for trial in trials),
    )


async def _try_problem(environment: EnvironmentClass, instance: Instance, chat: bool, timeout_s: float) -> EnvironmentTrial:
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
        trial = await asyncio.wait_for(play(), timeout_s)
        method = "close"
        await asyncio.wait_for(instance.close(), CLOSE_TIMEOUT_S)
    except TimeoutError as error:
        limit = CLOSE_TIMEOUT_S if method == "close" else timeout_s
        raise UserError(f"{ENVIRONMENT_KEY}: {environment.location_of(method)} took longer than {limit:g} s; make it return") from error
    finally:
        if method != "close":
            with contextlib.suppress(TimeoutError, EnvironmentFailure):  # the first failure is reported
                await asyncio.wait_for(instance.close(), CLOSE_TIMEOUT_S)
    return trial


TRIAL_CONTEXT = 1 << 20
"""Context of `AnswerEngine` in tokens, longer than any prompt."""
MIN_EPISODE_TIMEOUT_S = 180.0
"""Minimum deadline of an episode in seconds, since its harness may have to be installed first."""
DEFAULT_ANSWER = "I do not know."
"""The response to a problem without an answer."""


class AnswerEngine:
    """A fake engine that responds with the problem's answer, or `DEFAULT_ANSWER`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def sample(self, request: GenerationRequest) -> Sample:
        sample, problem = request.sample.copy(), cast(Problem, request.problem)
        ids = [*self._tokenizer.encode(problem.answer or DEFAULT_ANSWER), self._tokenizer.eos_id]
        sample.append(ids, [-1.0] * len(ids), 0)
        sample.finish_reason = "stop"
        return sample


def try_episodes(rollout: RolloutBase, problems: Sequence[Problem]) -> None:
    """Play an episode of a verifiers environment for each of the first problems, with `AnswerEngine` as the model.

    Raises UserError with the first error if all episodes failed, and PrerequisiteMissing if a sandbox of the environment is unavailable.
    """
    check_runtimes(rollout)
    failures = asyncio.run(_play_episodes(rollout, problems[:NUM_TRIAL_PROBLEMS]))
    if failures and all(failures):
        raise UserError(f"{ENVIRONMENT_KEY}: {rollout.environment}: {failures[0]} (with {problems[0].prompt_id})")


async def _play_episodes(rollout: RolloutBase, problems: Sequence[Problem]) -> list[str]:
    from mtpctl.environments.agents import open_generator

    with tempfile.TemporaryDirectory(prefix="mtpctl-trial-") as folder:
        make_byte_tokenizer(Path(folder))
        tokenizer = load_plain_tokenizer(Path(folder))
    overrides = {
        "max_tokens": TRIAL_CONTEXT // 2,
        "context": None,
        "deadline_s": max(rollout.deadline_s, MIN_EPISODE_TIMEOUT_S),
        "tool_parser": None,
    }
    rollout = rollout.model_copy(update=overrides)

    async def requests() -> AsyncIterator[GenerationRequest]:
        for problem in problems:
            sample = Sample(problem.prompt_id, problem.prompt_id, tokenizer.encode(problem.prompt))
            yield create_request(rollout, sample, context=TRIAL_CONTEXT, end_ids=[tokenizer.eos_id], problem=problem)

    engines = cast("ReplicaPool", AnswerEngine(tokenizer))
    failures = {}
    async with open_generator(rollout, engines, tokenizer, context=TRIAL_CONTEXT, name="stand-in", report=lambda line: None) as agents:
        async for sample in agents.generate(requests()):
            failures[sample.prompt_id] = "" if sample.environment is None else sample.environment.failure
    return [failures[problem.prompt_id] for problem in problems]
