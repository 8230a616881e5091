"""Responses of several turns of the model, with the environment's replies between them.

A response is one list of tokens, the model's turns and the environment's replies in order. The environment's tokens have a loss mask of 0
and a log-prob of 0, so per-token lists stay aligned and no loss, correction or entropy includes them. `max_tokens`, the context and the
deadline include them: a reply that reaches `max_tokens` is truncated there, and ends the response. Sampled tokens are never retokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from mtpctl.data.tokenizers import NO_TEMPLATE_VARIABLES, TemplateVariables
from mtpctl.environments.environment import (
    CLOSE_TIMEOUT_S,
    EnvironmentClass,
    EnvironmentFailure,
    Instance,
    Message,
    Reply,
    UserLoops,
    load_environment_class,
)
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.rollout.protocol import DEADLINE, ENVIRONMENT_ERROR, find_last_turn_start, find_stop_length
from mtpctl.samples import EnvironmentUse, GenerationRequest, Sample


class TextTokenizer(Protocol):
    """Converts text to token ids and back; a part of `mtpctl.data.tokenizers.Tokenizer`."""

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TurnSessions:
    """Creates the environments of responses with at most `limit` turns of the model. `chat` renders replies that are chat messages."""

    def __init__(self, environment: EnvironmentClass, tokenizer: TextTokenizer, limit: int, chat: ChatReplies) -> None:
        self.environment, self.tokenizer, self.limit, self.chat = environment, tokenizer, limit, chat
        self.loops = UserLoops()
        self._closing: set[asyncio.Task[None]] = set()

    def new_session(self, request: GenerationRequest) -> TurnSession:
        """The environment of the response to `request`. Open it first, and close it at the end."""
        return TurnSession(self, request)

    def close_later(self, instance: Instance) -> None:
        """Close the instance in the background."""

        async def close() -> None:
            # A failure after the response does not affect the run.
            try:
                await asyncio.wait_for(instance.close(), CLOSE_TIMEOUT_S)
            except (TimeoutError, EnvironmentFailure):
                return

        task = asyncio.ensure_future(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait until all instances are closed, and end the event loops."""
        while self._closing:
            await asyncio.wait(self._closing)
        self.loops.end()


class TurnSession:
    """The environment in one response; implements `EnvironmentSession`."""

    def __init__(self, turns: TurnSessions, request: GenerationRequest) -> None:
        self._turns, self._request = turns, request
        self._instance = Instance(turns.environment, request.problem, turns.loops)

    @property
    def stop(self) -> list[str]:
        return self._instance.stop

    async def open(self, sample: Sample) -> bool:
        sample.environment = EnvironmentUse()
        return await self._call_with_deadline(sample, self._instance.create(), lambda _: True)

    async def append_reply(self, sample: Sample) -> bool:
        start = find_last_turn_start(sample)
        length = self._turn_length(sample, start)
        if length is None or count_turns(sample) >= self._turns.limit:
            return False
        # Tokens after the stop string come from drafts that were accepted in the same step.
        sample.truncate(start + length)
        turn = self._turns.tokenizer.decode(sample.response_ids[start:])
        return await self._call_with_deadline(sample, self._instance.reply(turn), lambda reply: self._append(sample, reply))

    async def compute_reward(self, sample: Sample) -> None:
        if self._instance.has("reward") and sample.finish_reason != ENVIRONMENT_ERROR:
            reason = sample.finish_reason
            await self._call_with_deadline(
                sample, self._instance.reward(), lambda value: self._set_reward(sample, value), minimum_s=CLOSE_TIMEOUT_S
            )
            # A failed reward is counted, but does not change why the response ended.
            sample.finish_reason = reason

    def close(self) -> None:
        self._turns.close_later(self._instance)

    def _turn_length(self, sample: Sample, start: int) -> int | None:
        """Length of the turn that begins at `start`; None if the turn ends the response instead of calling the environment."""
        ids = sample.response_ids[start:]
        if self.stop:
            return find_stop_length(self._turns.tokenizer.decode, ids.tolist(), self.stop)
        return len(ids) if self._end_token(sample) is not None else None

    def _end_token(self, sample: Sample) -> int | None:
        last = sample.response_ids[-1:]
        return last[0] if last and last[0] in self._request.stop_token_ids else None

    def _append(self, sample: Sample, reply: Reply) -> bool:
        if not reply:
            tokens = []
        elif isinstance(reply, str):
            tokens = self._turns.tokenizer.encode(reply)
        else:
            tokens = self._turns.chat.tokens(reply, self._end_token(sample))
        if not tokens:
            # Without tokens between the turns, the old stop string would end the next turn immediately.
            return False
        sample.append(tokens, [0.0] * len(tokens), sample.version_spans[-1].version, trained=False)
        assert sample.environment is not None
        sample.environment.turns += 1
        is_full = len(sample.response_ids) >= self._request.max_tokens
        if is_full:
            sample.truncate(self._request.max_tokens)
        sample.finish_reason = "length" if is_full else None
        return not is_full

    def _set_reward(self, sample: Sample, value: float | None) -> bool:
        sample.environment_reward = value
        return True

    async def _call_with_deadline[T](
        self, sample: Sample, call: Awaitable[T], handle_result: Callable[[T], bool], *, minimum_s: float = 0.0
    ) -> bool:
        """Await `call`, and return `handle_result(result)`. On a failure or timeout, record it in the sample and return False."""
        use, clock = sample.environment, asyncio.get_running_loop().time
        assert use is not None, "open() comes first"
        started = clock()
        try:
            result = await asyncio.wait_for(call, max(self._request.deadline_s - sample.spent_s, minimum_s))
            return handle_result(result)
        except TimeoutError:
            use.timeouts += 1
            sample.finish_reason = DEADLINE
        except EnvironmentFailure as error:
            use.errors += 1
            use.failure = str(error)
            sample.finish_reason = ENVIRONMENT_ERROR
        finally:
            use.seconds += clock() - started
            sample.spent_s += clock() - started
        return False


def count_turns(sample: Sample) -> int:
    """Number of the model's turns in the response."""
    return sum(map(bool, sample.loss_mask.tobytes().split(b"\0")))


TURN_MARKER = "TheModelsOwnTurn"
MAX_CACHED_CHECKS = 1000
"""Maximum number of cached checks of replies."""


class TemplateTokenizer(Protocol):
    """A tokenizer with a chat template; a part of `mtpctl.data.tokenizers.Tokenizer`."""

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def chat_text(self, messages: Sequence[Message], *, variables: TemplateVariables = NO_TEMPLATE_VARIABLES) -> str:
        """A conversation in the chat template, with the start of the assistant's turn. Raises UserError if the template rejects it."""
        ...


class ChatReplies:
    """Renders chat messages as the tokens that follow a turn of the model.

    A chat template renders whole conversations. Rendering one again would change sampled tokens: the same text may be tokenized
    differently, and some templates remove thinking from earlier turns. So the template renders a conversation with a marker in place of the
    model's turn, and the text after the marker is appended to the existing tokens. This is correct if that text depends only on the new
    messages, which is checked once for each sequence of roles and set of template variables.
    """

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        self._tokenizer = tokenizer
        self._checked: set[tuple[str, ...]] = set()

    def tokens(self, messages: Sequence[Message], end_token: int | None, variables: TemplateVariables = NO_TEMPLATE_VARIABLES) -> list[int]:
        """The tokens from the end of the model's turn to the beginning of its next one.

        Args:
            end_token: the token that ended the model's turn, which is not repeated; None if a stop string ended it.
            variables: further variables of the template.

        Raises:
            EnvironmentFailure: if the template rejects the messages, leaves one out, or renders them differently in another conversation.
        """
        question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": TURN_MARKER}
        suffix = self._suffix([question, answer, *messages], variables)
        check_key = (repr(sorted(variables.items())), *(str(message["role"]) for message in messages))
        if check_key not in self._checked:
            earlier_turn = [question, {"role": "assistant", "content": "2"}]
            if suffix != self._suffix([*earlier_turn, question, answer, *messages], variables):
                raise EnvironmentFailure(
                    "the chat template renders the same messages differently after another conversation, "
                    "so they cannot be appended to the model's tokens; reply with text instead"
                )
            for index, message in enumerate(messages):
                if message.get("content") and suffix == self._suffix_without(messages, index, variables):
                    raise EnvironmentFailure(
                        f"the chat template leaves out messages of the role {message['role']!r}; reply in another role, or with text"
                    )
            if len(self._checked) >= MAX_CACHED_CHECKS:  # Clients of the gateway may send any roles and variables.
                self._checked.clear()
            self._checked.add(check_key)
        ids = self._tokenizer.encode(suffix)
        return ids[1:] if end_token is not None and ids[:1] == [end_token] else ids

    def _suffix_without(self, messages: Sequence[Message], index: int, variables: TemplateVariables) -> str | None:
        """The suffix without message `index`; None if the template rejects the remaining messages."""
        question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": TURN_MARKER}
        try:
            return self._suffix([question, answer, *messages[:index], *messages[index + 1 :]], variables)
        except EnvironmentFailure:
            return None

    def _suffix(self, conversation: Sequence[Message], variables: TemplateVariables) -> str:
        try:
            _, marker, suffix = self._tokenizer.chat_text(conversation, variables=variables).partition(TURN_MARKER)
        except UserError as error:
            raise EnvironmentFailure(str(error)) from error
        if not marker:
            raise EnvironmentFailure("the chat template leaves an earlier turn of the model out or changes it; reply with text instead")
        return suffix


class ChatTokenizer(TextTokenizer, TemplateTokenizer, Protocol):
    """A tokenizer that encodes, decodes and renders the chat template."""


def load_turns(rollout: RolloutBase, tokenizer: ChatTokenizer) -> TurnSessions | None:
    """The recipe's environment; None if a response is a single turn or an agent's. See `load_environment_class` for errors."""
    environment = load_environment_class(rollout)
    return None if environment is None else TurnSessions(environment, tokenizer, rollout.max_turns, ChatReplies(tokenizer))
