"""Requests in OpenAI's format, and the comparison of messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError

from mtpctl.environments.gateway.fields import FieldRules, RequestInvalid, Sampling, changes_of, not_honored
from mtpctl.samples import GenerationRequest
from mtpctl.web.json_body import shown

CHOICES = 64
"""Maximum number of choices per request."""
_SET_BY_GATEWAY = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)
"""Arguments of chat templates, or of transformers' rendering function, that clients must not set."""


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
    """One message of a conversation. Other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class ToolFunction(BaseModel):
    """Name and parameters of a tool."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


_TOOLS = TypeAdapter(list[Tool])


class ChatRequest(Sampling):
    """The body of `POST /v1/chat/completions`. Fields that are not named here, or in `Sampling`, are not honored (`gateway.fields`)."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = Field(None, ge=1, le=CHOICES)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def choices(self) -> int:
        """The number of answers."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The strings that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stops if text]

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of an answer; None: limited by the context only."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return self.chat_template_kwargs or {}

    @property
    def ignored(self) -> list[str]:
        """The fields that `check` did not honor."""
        return self._ignored

    def check(self, request: GenerationRequest, template: str, rules: FieldRules) -> None:
        """Raise RequestInvalid for anything that the gateway does not support.

        `request`: the sampling settings of the trajectory; `template`: the chat template. With `rules.ignore`, fields that are not honored
        are listed in `ignored` instead, and only invalid requests are rejected.
        """
        self._check_tools()
        for message in self.messages:
            if isinstance(message.content, list) and any(part.get("type") != "text" for part in message.content):
                raise RequestInvalid("messages: only text is understood; send parts of the type text")
        reasons = self._reasons(template)
        if not rules.serving:
            recipe = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
            for name in changes_of(self, request):
                used = f"rollout.{name}: {recipe[name]:g}" if name in recipe else "the recipe's settings"
                reasons[name] = f"tokens are sampled with {used}, because they are trained on; leave it out"
        if reasons and not rules.ignore:
            name, reason = next(iter(reasons.items()))
            hint = "" if rules.serving else ", or set rollout.gateway_fields: ignore"
            raise RequestInvalid(f"{name}: {reason}{hint}")
        self._ignored = list(reasons)

    def _reasons(self, template: str) -> dict[str, str]:
        """The fields that are never honored, each with the reason."""
        reasons = not_honored(self.model_extra or {}, type(self).model_fields)
        if self.top_logprobs:
            reasons["top_logprobs"] = "only the log-prob of the sampled token is available; leave it out"
        if self.tool_choice not in (None, "auto", "none"):
            reasons["tool_choice"] = "forced tool calls are not supported; send auto or none"
        if any(tool["function"].get("strict") for tool in self.tools or ()):
            reasons["tools.function.strict"] = "calls are not constrained to the schema; leave it out"
        for name in self.variables:
            if name in _SET_BY_GATEWAY:
                raise RequestInvalid(f"chat_template_kwargs.{name}: is set by the gateway; leave it out")
            if not re.search(rf"\b{re.escape(name)}\b", template):
                reasons[f"chat_template_kwargs.{shown(name)[1:-1]}"] = "the chat template has no such variable; leave it out"
        return reasons

    def _check_tools(self) -> None:
        try:
            _TOOLS.validate_python(self.tools or [])
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestInvalid(f"{'.'.join(map(str, ('tools', *first['loc'])))}: {first['msg']}") from error


def as_template(message: ChatMessage) -> dict[str, object]:
    """A message for the chat template: content as one text, arguments of tool calls parsed if they are JSON."""
    plain = {key: value for key, value in message.model_dump(exclude_none=True).items() if key not in ("content", "tool_calls")}
    converted: dict[str, object] = {"content": text_of(message.content), **plain}
    if message.tool_calls:
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call.function)}}
            for call in message.tool_calls
        ]
    return converted


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())


def message_key(message: ChatMessage) -> str:
    """A key that is equal for equivalent messages: role, text, and the names and arguments of tool calls.

    Clients return an answer with different whitespace in a call's arguments, without ids, or with additional fields.
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
