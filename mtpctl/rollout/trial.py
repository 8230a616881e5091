"""Trying an environment on a few problems before anything is started, so that a mistake in it ends no run that is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from mtpctl.errors import UserError
from mtpctl.rollout.chat import ChatReplies, ChatText
from mtpctl.rollout.environments import CLOSE_S, FIELD, EnvironmentClass, EnvironmentFailure, Instance
from mtpctl.rollout.turns import Text
from mtpctl.rollout.user_calls import UserLoops

TRIED = 3
"""Problems that an environment is tried on."""
TRIAL_S = 60.0
"""Seconds that the trial on one problem may take."""


class ChatTokenizer(Text, ChatText, Protocol):
    """A tokenizer that encodes, decodes and knows the chat template."""


def try_environment(
    environment: EnvironmentClass,
    problems: Sequence[object],
    tokenizer: ChatTokenizer | None,
    *,
    chat: bool,
    deadline_s: float = TRIAL_S,
) -> list[object]:
    """Make the environment for the first problems, have it reply to a turn that is its stop string alone, reward and close it.

    Returns the JSON schemas of its `tools()` for the first problem, which are those of the run. Without a `tokenizer`, chat messages and
    stop strings are not tried on it. `chat`: whether the chat template is used. `deadline_s` is what a response may take in the run; a
    problem's trial takes no longer, and TRIAL_S at most. Raises UserError for the first thing that fails.
    """
    seconds = min(deadline_s, TRIAL_S)

    async def drive() -> list[object]:
        loops = UserLoops()
        try:
            found = [await _try_one(Instance(environment, each, loops), tokenizer, chat, seconds) for each in problems[:TRIED]]
        finally:
            loops.end()
        return found[0] if found else []

    try:
        tools = asyncio.run(drive())
    except EnvironmentFailure as failure:
        raise UserError(f"{FIELD}: {failure}") from failure
    except TimeoutError as error:
        raise UserError(f"{FIELD}: {environment.where('reply')} took longer than {seconds:g} s for one turn; make it return") from error
    if tools and not chat:
        raise UserError(f"{FIELD}: {environment.where('tools')} is for the chat template; set data.chat_template: true, or remove it")
    return tools


async def _try_one(instance: Instance, tokenizer: ChatTokenizer | None, chat: bool, seconds: float) -> list[object]:
    async def play() -> list[object]:
        await instance.make()
        tools = await instance.tools()
        for stop in instance.stop:
            if tokenizer is not None and not tokenizer.decode(tokenizer.encode(stop)).strip():
                raise EnvironmentFailure(
                    f"stop: {stop!r} is a special token, which is no text and never ends a turn; with stop = [] the end token does"
                )
        said = await instance.reply(instance.stop[0] if instance.stop else "")
        if isinstance(said, list) and said:
            if not chat:
                raise EnvironmentFailure("it replies with chat messages; set data.chat_template: true, or return text")
            if tokenizer is not None:
                ChatReplies(tokenizer).tokens(said, None)
        await instance.reward()
        return tools

    try:
        return await asyncio.wait_for(play(), seconds)
    finally:
        await asyncio.wait_for(instance.close(), CLOSE_S)
