"""Requests as OpenAI's clients send them, and when two messages count as the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mtpctl.errors import MtpctlError

CHOICES = 64
"""Answers that one request may ask for."""
OVER_BUDGET, OVER_CONTEXT = "budget_exceeded", "context_length_exceeded"
"""Codes of refusals because a trajectory has used up what it may."""


class RequestInvalid(MtpctlError):
    """A request that cannot be answered. `code` is what a client can tell the reason by; `status` is the one of HTTP."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class Function(BaseModel):
    """The function of a tool call. `arguments` is JSON, as text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(BaseModel):
    """One call of a tool by the model."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """One message of a conversation. Fields that are not named here go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of `POST /v1/chat/completions`, as far as it is read. How tokens are sampled is the run's to say."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    n: int = Field(1, ge=1, le=CHOICES)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def most_tokens(self) -> int | None:
        """Tokens that an answer may have; None: as many as there is room for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def check(self) -> None:
        """Raise RequestInvalid for what the gateway cannot do: nothing is left out silently that changes what an answer means."""
        if self.top_logprobs:
            raise RequestInvalid("top_logprobs: the engines give the log-prob of the sampled token alone; leave it out")
        if self.tool_choice not in ("auto", "none"):
            raise RequestInvalid("tool_choice: nothing can make the model call a tool; send auto or none")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise RequestInvalid("response_format: answers are sampled without a grammar; leave it out")
        for message in self.messages:
            if isinstance(message.content, list) and any(part.get("type") != "text" for part in message.content):
                raise RequestInvalid("messages: only text is understood; send parts of the type text")


def as_template(message: ChatMessage) -> dict[str, object]:
    """A message as chat templates take it: content as one text, the arguments of tool calls as an object where they are one."""
    plain = {key: value for key, value in message.model_dump(exclude_none=True).items() if key not in ("content", "tool_calls")}
    found: dict[str, object] = {"content": text_of(message.content), **plain}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call.function)}}
            for call in message.tool_calls
        ]
    return found


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())


def same_as(message: ChatMessage) -> str:
    """What two messages have in common that count as the same: role, text, and the names and arguments of tool calls.

    Clients send an answer back with other spaces in a call's arguments, without ids, or with fields of their own.
    """
    calls = [[call.function.name, _arguments(call.function)] for call in message.tool_calls or ()]
    named = (message.model_extra or {}).get("tool_call_id") if message.role == "tool" else None
    return json.dumps([message.role, text_of(message.content), calls, named], sort_keys=True)


def _arguments(function: Function) -> object:
    if not isinstance(function.arguments, str):
        return function.arguments
    try:
        return json.loads(function.arguments)
    except ValueError:
        return function.arguments
