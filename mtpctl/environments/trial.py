"""Trying an environment on a few problems before anything is started, so that a mistake in it ends no run that is under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mtpctl.environments.chat import ChatReplies, ChatText
from mtpctl.environments.environment import CLOSE_S, FIELD, EnvironmentClass, EnvironmentFailure, Instance, Message
from mtpctl.environments.turns import Text
from mtpctl.environments.user_calls import UserLoops
from mtpctl.errors import UserError

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
