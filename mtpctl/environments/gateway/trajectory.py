"""One agent's work on one problem: its conversations, each a sample whose tokens are those that the engine sampled.

A request that extends a conversation goes on from that conversation's own tokens: what is new is rendered behind them (`rollout.chat`), and
nothing that the model wrote is tokenised again. A request with another history begins a new sample, rendered from its messages; one that
goes on from an earlier turn, or a further choice of the same turn, begins one whose prompt is the tokens up to there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mtpctl.data.tokenizers import NONE, Variables
from mtpctl.environments.environment import EnvironmentFailure, Message
from mtpctl.environments.gateway.fields import OVER_BUDGET, OVER_CONTEXT, FieldRules, RequestInvalid, apply
from mtpctl.environments.gateway.messages import ChatMessage, ChatRequest, as_template, same_as
from mtpctl.environments.turns import ChatReplies, ChatText, Text, length_to_stop
from mtpctl.errors import UserError
from mtpctl.rollout.protocol import ABORTED, DEADLINE
from mtpctl.samples import GenerationRequest, Ids, Sample, ids_of

REJECT = FieldRules()
Generate = Callable[[GenerationRequest], Awaitable[Sample]]
ReadAnswer = Callable[[Sequence[int], Sequence[str], Sequence[dict[str, Any]]], ChatMessage]
"""Makes a message of an answer's tokens, given the stop strings and the tools that it may call."""


class ChatTokenizer(Text, ChatText, Protocol):
    """A tokenizer that encodes, decodes and knows the chat template."""

    chat_template: str

    def chat(self, messages: Sequence[Message], tools: Sequence[object] = (), variables: Variables = NONE) -> list[int]: ...


@dataclass(frozen=True)
class Model:
    """What answers: the engines, the tokenizer, how an answer is read, and the `context` in tokens."""

    generate: Generate
    tokenizer: ChatTokenizer
    read: ReadAnswer
    context: int
    replies: ChatReplies = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replies", ChatReplies(self.tokenizer))


@dataclass(frozen=True, slots=True)
class Turn:
    """The end of a turn of the model: messages and response tokens up to it, and the token that ended it, if one did."""

    messages: int
    tokens: int
    end_token: int | None


@dataclass
class Conversation:
    """A sample that grows turn by turn. `history`: its messages, as they are compared.

    `tools`: the tools in its prompt, and the variables of its template.
    """

    sample: Sample
    tools: str
    history: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False


@dataclass(frozen=True)
class Answer:
    """One choice of an answer. `tokens` and `logprobs` are of this turn, `prompt` counts the tokens before it."""

    message: ChatMessage
    finish_reason: str
    tokens: Ids
    logprobs: list[float]
    prompt: int


@dataclass
class _Start:
    """Where an answer begins: the tokens before it, split into a sample so far, and the conversation that it extends."""

    sample: Sample
    history: list[str]
    turns: list[Turn]
    extends: Conversation | None = None


class Trajectory:
    """Answers an agent's requests as `request` says, whose sample names the problem and whose limits are those of every sample.

    `turns`: maximum number of answers; `rules`: how fields that are not honored are handled. The clock of `request.deadline_s` runs from
    the beginning.
    """

    def __init__(self, request: GenerationRequest, model: Model, turns: int, rules: FieldRules = REJECT) -> None:
        self.request, self._model, self._turns, self._rules = request, model, turns, rules
        self.reward: float | None = None
        self.rewritten = 0
        self.answers = 0
        self.ignored: dict[str, None] = {}
        self._until = time.monotonic() + request.deadline_s
        self._used_at = time.monotonic()
        self._conversations: list[Conversation] = []
        self._under_way: set[asyncio.Task[Answer]] = set()
        self._ended = False

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return max(self._until - time.monotonic(), 0.0)

    @property
    def idle_s(self) -> float:
        """Seconds since the last request of the agent; 0 while an answer is being generated."""
        return 0.0 if self._under_way else time.monotonic() - self._used_at

    def touch(self) -> None:
        """Record a request of the agent."""
        self._used_at = time.monotonic()

    def restart_clock(self) -> None:
        """Have the time begin now: an agent has taken the problem."""
        self._until = time.monotonic() + self.request.deadline_s
        self.touch()

    async def answer(self, asked: ChatRequest) -> list[Answer]:
        """The choices of one answer. Raises RequestInvalid for what cannot be answered, a budget that is used up among it."""
        asked.check(self.request, self._model.tokenizer.chat_template, self._rules)
        request = apply(asked, self.request) if self._rules.serving else self.request
        self._check_open()
        if self.answers + asked.choices > self._turns:
            raise RequestInvalid(f"the trajectory has its {self._turns} answers (rollout.max_turns)", OVER_BUDGET)
        self.answers += asked.choices
        self.ignored |= dict.fromkeys(asked.ignored)
        start = self._start(asked)
        starts = [start] + [_apart(start) for _ in range(asked.choices - 1)]
        if start.extends is not None:
            start.extends.busy = True
        tasks = [asyncio.create_task(self._generate(each, asked, _seeded(request, choice))) for choice, each in enumerate(starts)]
        self._under_way.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except UserError as error:
            raise RequestInvalid(str(error)) from error  # the engine rejects the request
        except asyncio.CancelledError:
            if self._ended:
                raise _gone() from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._under_way.difference_update(tasks)
            self.touch()
            if start.extends is not None:
                start.extends.busy = False

    def end(self) -> list[Sample]:
        """End the trajectory, and every answer under way. Returns its samples, in the order in which they began."""
        self._ended = True
        for task in self._under_way:
            task.cancel()
        return [each.sample for each in self._conversations]

    # ------------------------------------------------------------------------------------------------- where it begins

    def _start(self, asked: ChatRequest) -> _Start:
        tools = _named(asked)
        history = [same_as(message) for message in asked.messages]
        found = self._known(history, tools)
        if found is not None:
            conversation, turn = found
            try:
                new = self._model.replies.tokens(
                    [as_template(each) for each in asked.messages[turn.messages :]], turn.end_token, asked.variables
                )
            except EnvironmentFailure:
                new = None  # The template cannot put these messages behind the tokens that are there.
            if new is not None:
                return self._extended(conversation, turn, new, history)
        self.rewritten += any(message.role == "assistant" for message in asked.messages)
        try:
            ids = self._model.tokenizer.chat([as_template(each) for each in asked.messages], _tools(asked), asked.variables)
        except UserError as error:
            raise RequestInvalid(f"messages: {error}") from error
        return _Start(self._new_sample(ids_of(ids)), history, [])

    def _known(self, history: list[str], tools: str) -> tuple[Conversation, Turn] | None:
        """The conversation, and its turn, that the messages go on from without a turn of the model's that is not its own."""
        best: tuple[Conversation, Turn] | None = None
        for conversation in self._conversations:
            if conversation.tools != tools:
                continue
            for turn in reversed(conversation.turns):
                behind = history[turn.messages :]
                if not behind or history[: turn.messages] != conversation.history[: turn.messages]:
                    continue
                if any(each.startswith('["assistant"') for each in behind):
                    continue
                if best is None or turn.messages > best[1].messages:
                    best = conversation, turn
                break
        return best

    def _extended(self, conversation: Conversation, turn: Turn, new: Sequence[int], history: list[str]) -> _Start:
        sample = conversation.sample
        if turn is conversation.turns[-1] and not conversation.busy:
            grown = sample.copy()
            grown.append(new, [0.0] * len(new), grown.version_spans[-1].version, trained=False)
            return _Start(grown, history, list(conversation.turns), conversation)
        return _Start(self._new_sample(sample.prompt_ids + sample.response_ids[: turn.tokens] + ids_of(new)), history, [])

    def _new_sample(self, prompt: Ids) -> Sample:
        first = self.request.sample
        return Sample(first.prompt_id, first.group_id, prompt, first.index)

    # ---------------------------------------------------------------------------------------------------- the answer

    async def _generate(self, start: _Start, asked: ChatRequest, request: GenerationRequest) -> Answer:
        before, sample = len(start.sample.response_ids), start.sample
        room = min(self.request.max_tokens - before, self._model.context - sample.length, asked.most_tokens or self._model.context)
        if room <= 0:
            over = self.request.max_tokens <= before
            raise RequestInvalid(
                f"the conversation has {sample.length} tokens, and there is no room for an answer ({_limit(over)})",
                OVER_BUDGET if over else OVER_CONTEXT,
            )
        stops = [*request.stop, *asked.stops]
        sample = await self._model.generate(
            replace(request, sample=sample, max_tokens=before + room, stop=stops, deadline_s=self.seconds_left + sample.spent_s)
        )
        if sample.finish_reason == ABORTED:
            raise _gone()
        tokens = sample.response_ids[before:]
        end_token = tokens[-1] if tokens and tokens[-1] in request.stop_token_ids else None
        read = self._model.tokenizer.decode
        if stops and end_token is None and (length := length_to_stop(read, tokens.tolist(), stops)) is not None:
            # Tokens behind the stop string come from drafts that were accepted in the same step.
            sample.cut(before + length)
            tokens = sample.response_ids[before:]
        message = self._model.read(tokens[:-1] if end_token is not None else tokens, stops, _tools(asked))
        if asked.parallel_tool_calls is False and message.tool_calls:
            message.tool_calls = message.tool_calls[:1]
        self._keep(start, sample, message, end_token, _named(asked))
        if sample.finish_reason == DEADLINE:
            raise RequestInvalid(f"the trajectory took its {self.request.deadline_s:g} s (rollout.deadline_s)", OVER_BUDGET)
        reason = "tool_calls" if message.tool_calls else "length" if sample.finish_reason == "length" else "stop"
        prompt = len(sample.prompt_ids) + before
        return Answer(message, reason, tokens, sample.behaviour_logprobs[before:].tolist(), prompt)

    def _keep(self, start: _Start, sample: Sample, message: ChatMessage, end_token: int | None, tools: str) -> None:
        conversation = start.extends
        if conversation is None:
            self._conversations.append(conversation := Conversation(sample, tools))
        conversation.sample = sample
        conversation.history = [*start.history, same_as(message)]
        conversation.turns = [*start.turns, Turn(len(conversation.history), len(sample.response_ids), end_token)]

    def _check_open(self) -> None:
        if self._ended or (self.request.unwanted is not None and self.request.unwanted.is_set()):
            raise _gone()
        if not self.seconds_left:
            raise RequestInvalid(f"the trajectory took its {self.request.deadline_s:g} s (rollout.deadline_s)", OVER_BUDGET)


def _seeded(request: GenerationRequest, choice: int) -> GenerationRequest:
    """The request for one of several choices. Each gets a different seed, derived from the request's."""
    return request if request.seed is None or not choice else replace(request, seed=request.seed + choice)


def _apart(start: _Start) -> _Start:
    """The start of a further choice: its tokens so far are the prompt of a sample of its own."""
    sample = start.sample
    return _Start(Sample(sample.prompt_id, sample.group_id, sample.token_ids, sample.index), start.history, [])


def _tools(asked: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model may call."""
    return [] if asked.tool_choice == "none" else asked.tools or []


def _named(asked: ChatRequest) -> str:
    """The tools and the template's variables as one text, by which a conversation knows its own."""
    return json.dumps([_tools(asked), asked.variables], sort_keys=True)


def _limit(over: bool) -> str:
    return "rollout.max_tokens" if over else "rollout.context"


def _gone() -> RequestInvalid:
    return RequestInvalid("the trajectory has ended", "trajectory_ended", 410)
