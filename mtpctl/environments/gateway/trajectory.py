"""One agent's work on one problem: its conversations, each a sample with the tokens that the engine sampled.

A request that extends a conversation continues its tokens: new messages are rendered after them (`ChatReplies`), and sampled tokens are
never retokenized. A request with another history starts a new sample, rendered from its messages. A conversation branches if a request
continues an earlier turn, or asks for several choices (`n`): each further branch is a new sample, whose prompt is the tokens so far.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mtpctl.data.tokenizers import NO_TEMPLATE_VARIABLES, TemplateVariables
from mtpctl.environments.environment import EnvironmentFailure, Message
from mtpctl.environments.gateway.requests import (
    OVER_BUDGET,
    OVER_CONTEXT,
    ChatMessage,
    ChatRequest,
    FieldRules,
    RequestInvalid,
    apply_sampling,
    message_key,
    to_template_message,
)
from mtpctl.environments.turns import ChatReplies, ChatTokenizer, find_stop_length
from mtpctl.errors import UserError
from mtpctl.rollout.protocol import ABORTED, DEADLINE
from mtpctl.samples import GenerationRequest, Ids, Sample, ids_of

REJECT = FieldRules()
Generate = Callable[[GenerationRequest], Awaitable[Sample]]
ReadAnswer = Callable[[Sequence[int], Sequence[str], Sequence[dict[str, Any]]], ChatMessage]
"""Converts an answer's tokens to a message, given the stop strings and tools."""


class GatewayTokenizer(ChatTokenizer, Protocol):
    """A tokenizer that also renders tools, into token ids."""

    chat_template: str

    def chat(
        self, messages: Sequence[Message], tools: Sequence[object] = (), variables: TemplateVariables = NO_TEMPLATE_VARIABLES
    ) -> list[int]: ...


@dataclass(frozen=True)
class ChatBackend:
    """The engines (`generate`), the tokenizer, the parser of answers (`read`), and the `context` in tokens."""

    generate: Generate
    tokenizer: GatewayTokenizer
    read: ReadAnswer
    context: int
    replies: ChatReplies = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replies", ChatReplies(self.tokenizer))


@dataclass(frozen=True, slots=True)
class Turn:
    """The end of a turn of the model: the number of messages and response tokens up to it, and the end token of the turn, if any."""

    num_messages: int
    num_tokens: int
    end_token: int | None


@dataclass
class Conversation:
    """A sample that grows turn by turn.

    `history`: the keys of its messages (`message_key`). `tools_key`: key of its tools and template variables.
    """

    sample: Sample
    tools_key: str
    history: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False


@dataclass(frozen=True)
class Answer:
    """One choice of a completion: `tokens` and `logprobs` of this turn, and `prompt_length`, the number of tokens before it."""

    message: ChatMessage
    finish_reason: str
    tokens: Ids
    logprobs: list[float]
    prompt_length: int


@dataclass
class _AnswerStart:
    """The start of an answer: the sample so far, and the conversation that the answer extends; None for a new conversation.

    `rewrites_history`: whether the agent changed earlier messages.
    """

    sample: Sample
    history: list[str]
    turns: list[Turn]
    extends: Conversation | None = None
    rewrites_history: bool = False


class Trajectory:
    """Answers an agent's requests with the settings and limits of `request`. The sample of `request` identifies the problem.

    `max_answers`: maximum number of answers; rejected and cancelled requests do not count. `rules`: whether unsupported fields are rejected
    or ignored, and whether clients set sampling. The deadline counts from the creation, or from the last `restart_clock`.
    """

    def __init__(self, request: GenerationRequest, backend: ChatBackend, max_answers: int, rules: FieldRules = REJECT) -> None:
        self.request, self._backend, self._max_answers, self._rules = request, backend, max_answers, rules
        self.reward: float | None = None
        self.num_rewritten_histories = 0
        self.answers = 0
        self.ignored: dict[str, None] = {}
        self._deadline = time.monotonic() + request.deadline_s
        self._last_request_at = time.monotonic()
        self._conversations: list[Conversation] = []
        self._in_progress: set[asyncio.Task[Answer]] = set()
        self._ended = False

    @property
    def seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    @property
    def idle_s(self) -> float:
        """Seconds since the last request of the agent; 0 while an answer is being generated."""
        return 0.0 if self._in_progress else time.monotonic() - self._last_request_at

    def touch(self) -> None:
        """Record a request of the agent."""
        self._last_request_at = time.monotonic()

    def restart_clock(self) -> None:
        """Restart the deadline. Called when an external agent takes the problem."""
        self._deadline = time.monotonic() + self.request.deadline_s
        self.touch()

    async def answer(self, chat: ChatRequest) -> list[Answer]:
        """Generate the choices of one completion. Raises RequestInvalid for invalid requests and exhausted budgets."""
        chat.check(self.request, self._backend.tokenizer.chat_template, self._rules)
        request = apply_sampling(chat, self.request) if self._rules.client_sampling else self.request
        self._check_open()
        num_pending = sum(not task.done() for task in self._in_progress)
        if self.answers + num_pending + chat.choices > self._max_answers:
            raise RequestInvalid(f"the trajectory already has {self._max_answers} answers, the maximum (rollout.max_turns)", OVER_BUDGET)
        self.ignored |= dict.fromkeys(chat.ignored)
        start = self._start_answer(chat)
        starts = [start] + [_start_further_choice(start) for _ in range(chat.choices - 1)]
        if start.extends is not None:
            start.extends.busy = True
        tasks = [
            asyncio.create_task(self._generate(choice_start, chat, _request_for_choice(request, choice)))
            for choice, choice_start in enumerate(starts)
        ]
        self._in_progress.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except UserError as error:
            raise RequestInvalid(str(error)) from error  # rejected by the engine
        except asyncio.CancelledError:
            if self._ended:
                raise _ended_error() from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._in_progress.difference_update(tasks)
            self.touch()
            if start.extends is not None:
                start.extends.busy = False

    def end(self) -> list[Sample]:
        """End the trajectory, and cancel answers in progress. Returns its samples in the order of their first complete answers."""
        self._ended = True
        for task in self._in_progress:
            task.cancel()
        return [conversation.sample for conversation in self._conversations]

    # --------------------------------------------------------------------------------------------- start of an answer

    def _start_answer(self, chat: ChatRequest) -> _AnswerStart:
        tools_key = _tools_key(chat)
        history = [message_key(message) for message in chat.messages]
        turn_match = self._find_turn(history, tools_key)
        if turn_match is not None:
            conversation, turn = turn_match
            try:
                new_tokens = self._backend.replies.tokens(
                    [to_template_message(message) for message in chat.messages[turn.num_messages :]], turn.end_token, chat.variables
                )
            except EnvironmentFailure:
                new_tokens = None  # The template cannot append these messages to the existing tokens.
            if new_tokens is not None:
                return self._extend(conversation, turn, new_tokens, history)
        try:
            ids = self._backend.tokenizer.chat(
                [to_template_message(message) for message in chat.messages], _available_tools(chat), chat.variables
            )
        except UserError as error:
            raise RequestInvalid(f"messages: {error}") from error
        # The first request of a trajectory may begin with examples of answers.
        rewrites_history = bool(self._conversations) and any(message.role == "assistant" for message in chat.messages)
        return _AnswerStart(self._new_sample(ids_of(ids)), history, [], rewrites_history=rewrites_history)

    def _find_turn(self, history: list[str], tools_key: str) -> tuple[Conversation, Turn] | None:
        """The turn with the most messages that this history extends by messages of other roles than the assistant, and its conversation.

        None if there is no such turn.
        """
        longest: tuple[Conversation, Turn] | None = None
        for conversation in self._conversations:
            if conversation.tools_key != tools_key:
                continue
            for turn in reversed(conversation.turns):
                new_messages = history[turn.num_messages :]
                if not new_messages or history[: turn.num_messages] != conversation.history[: turn.num_messages]:
                    continue
                if any(key.startswith('["assistant"') for key in new_messages):
                    continue
                if longest is None or turn.num_messages > longest[1].num_messages:
                    longest = conversation, turn
                break
        return longest

    def _extend(self, conversation: Conversation, turn: Turn, new_tokens: Sequence[int], history: list[str]) -> _AnswerStart:
        sample = conversation.sample
        if turn is conversation.turns[-1] and not conversation.busy:
            extended = sample.copy()
            extended.append(new_tokens, [0.0] * len(new_tokens), extended.version_spans[-1].version, trained=False)
            return _AnswerStart(extended, history, list(conversation.turns), conversation)
        return _AnswerStart(self._new_sample(sample.prompt_ids + sample.response_ids[: turn.num_tokens] + ids_of(new_tokens)), history, [])

    def _new_sample(self, prompt: Ids) -> Sample:
        first = self.request.sample
        return Sample(first.prompt_id, first.group_id, prompt, first.index)

    # ---------------------------------------------------------------------------------------------------- the answer

    async def _generate(self, start: _AnswerStart, chat: ChatRequest, request: GenerationRequest) -> Answer:
        start_length, sample = len(start.sample.response_ids), start.sample
        max_new_tokens = min(
            self.request.max_tokens - start_length, self._backend.context - sample.length, chat.token_limit or self._backend.context
        )
        if max_new_tokens <= 0:
            key, code = ("max_tokens", OVER_BUDGET) if self.request.max_tokens <= start_length else ("context", OVER_CONTEXT)
            raise RequestInvalid(f"the conversation has {sample.length} tokens, which leaves no room for an answer (rollout.{key})", code)
        stops = [*request.stop, *chat.stops]
        sample = await self._backend.generate(
            replace(
                request, sample=sample, max_tokens=start_length + max_new_tokens, stop=stops, deadline_s=self.seconds_left + sample.spent_s
            )
        )
        if sample.finish_reason == ABORTED:
            raise _ended_error()
        tokens = sample.response_ids[start_length:]
        end_token = tokens[-1] if tokens and tokens[-1] in request.stop_token_ids else None
        decode = self._backend.tokenizer.decode
        if stops and end_token is None and (length := find_stop_length(decode, tokens.tolist(), stops)) is not None:
            # Tokens after the stop string come from drafts that were accepted in the same step.
            sample.truncate(start_length + length)
            tokens = sample.response_ids[start_length:]
        message = self._backend.read(tokens[:-1] if end_token is not None else tokens, stops, _available_tools(chat))
        if chat.parallel_tool_calls is False and message.tool_calls:
            message.tool_calls = message.tool_calls[:1]
        self._record_answer(start, sample, message, end_token, _tools_key(chat))
        if sample.finish_reason == DEADLINE:
            raise RequestInvalid(f"the trajectory exceeded {self.request.deadline_s:g} s (rollout.deadline_s)", OVER_BUDGET)
        reason = "tool_calls" if message.tool_calls else "length" if sample.finish_reason == "length" else "stop"
        prompt_length = len(sample.prompt_ids) + start_length
        return Answer(message, reason, tokens, sample.behaviour_logprobs[start_length:].tolist(), prompt_length)

    def _record_answer(self, start: _AnswerStart, sample: Sample, message: ChatMessage, end_token: int | None, tools_key: str) -> None:
        conversation, history = start.extends, [*start.history, message_key(message)]
        if conversation is None:
            self._conversations.append(conversation := Conversation(sample, tools_key))
        conversation.sample = sample
        conversation.history = history
        conversation.turns = [*start.turns, Turn(len(conversation.history), len(sample.response_ids), end_token)]
        self.num_rewritten_histories += start.rewrites_history
        self.answers += 1

    def _check_open(self) -> None:
        if self._ended or (self.request.unwanted is not None and self.request.unwanted.is_set()):
            raise _ended_error()
        if not self.seconds_left:
            raise RequestInvalid(f"the trajectory exceeded {self.request.deadline_s:g} s (rollout.deadline_s)", OVER_BUDGET)


def _request_for_choice(request: GenerationRequest, choice: int) -> GenerationRequest:
    """The request for choice number `choice`, with its own seed if the request has one."""
    return request if request.seed is None or not choice else replace(request, seed=request.seed + choice)


def _start_further_choice(start: _AnswerStart) -> _AnswerStart:
    """The start of a further choice: a new sample whose prompt is the tokens so far."""
    sample = start.sample
    return _AnswerStart(Sample(sample.prompt_id, sample.group_id, sample.token_ids, sample.index), start.history, [])


def _available_tools(chat: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model may call."""
    return [] if chat.tool_choice == "none" else chat.tools or []


def _tools_key(chat: ChatRequest) -> str:
    """A key for the tools and template variables, which do not change within a conversation."""
    return json.dumps([_available_tools(chat), chat.variables], sort_keys=True)


def _ended_error() -> RequestInvalid:
    return RequestInvalid("the trajectory has ended", "trajectory_ended", 410)
