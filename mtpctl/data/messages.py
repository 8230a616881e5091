"""Chat messages: conversion from the OpenAI and ShareGPT formats, preparation for a chat template, and a check of its output.

A null field is treated as absent, because Parquet and Arrow fill missing fields of a struct with nulls at every depth. The arguments of a
tool call are an exception: there, null is a value. Templates read these arguments either as an object or as JSON text; `Arguments` supports
both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from mtpctl.data.problems import Message
from mtpctl.errors import UserError

SENDER_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The role of each sender (`from`) of a ShareGPT row."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_VISUAL_MARKERS = ("image", "video")


def parse_conversation(messages: Sequence[object], column: str, location: str) -> tuple[Message, ...]:
    """Convert messages to the format of chat templates: `role`, `content` as one text, `tool_calls`, and the message's other fields.

    The arguments of a tool call are not changed: an object or its JSON text. Raises UserError, with the row and the number of the message,
    for a missing role, content that is not text, and invalid tool calls.
    """
    if not messages:
        raise UserError(f"{location}: `{column}` has no messages; fix or remove the row")
    return tuple(
        _parse_message(raw_message, f"message {number} of `{column}`", location) for number, raw_message in enumerate(messages, start=1)
    )


def messages_from_columns(prompt: object) -> object:
    """Convert a struct of lists, the form in which `datasets` reads a list of structs, to a list of messages.

    Other values are returned unchanged.
    """
    if (
        isinstance(prompt, dict)
        and prompt
        and {"role", "from"} & prompt.keys()
        and all(isinstance(values, list) for values in prompt.values())
    ):
        return [dict(zip(prompt, values, strict=True)) for values in zip(*prompt.values(), strict=False)]
    return prompt


def without_nulls(value: object) -> object:
    """The value without null fields, at every depth. Nulls in lists are kept: in a schema's `enum` they are values."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def image_and_video_types(prompt: object) -> list[str]:
    if isinstance(prompt, list):
        return list(dict.fromkeys(kind for part in prompt for kind in image_and_video_types(part)))
    if not isinstance(prompt, dict):
        return []
    part_type = str(prompt.get("type"))
    return (
        [part_type]
        if any(kind in part_type for kind in _VISUAL_MARKERS)
        else [*image_and_video_types(prompt.get("content")), *image_and_video_types(prompt.get("value"))]
    )


def text_of_parts(parts: Sequence[object]) -> str:
    """The text of a list of content parts. Raises ValueError with the types of parts that are not text."""
    texts, other_types = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in ("text", None) and isinstance(part.get("text"), str):
            texts.append(str(part["text"]))
        elif part is not None:
            other_types.append(_type_of_part(part))
    if other_types:
        raise ValueError(f"parts of the type {', '.join(dict.fromkeys(other_types))}")
    return "".join(texts)


def _type_of_part(part: object) -> str:
    if not isinstance(part, Mapping):
        return type(part).__name__
    part_type = str(part.get("type") or "none")
    return f"{part_type} without text" if part_type == "text" else part_type


def _parse_message(message: object, label: str, location: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{location}: {label} must be an object with `role` and `content`; it is {message!r:.40}")
    calls = message.get("tool_calls")
    fields = {key: without_nulls(value) for key, value in message.items() if value is not None and key != "tool_calls"}
    if "role" not in fields and isinstance(fields.get("from"), str):
        fields, calls = _from_sharegpt(fields, calls, label, location)
    if not isinstance(fields.get("role"), str):
        raise UserError(f"{location}: {label} must be an object with `role` and `content`; it has {', '.join(map(str, message))}")
    if calls is None and isinstance(call := message.get("function_call"), dict):  # OpenAI's form before `tool_calls`
        fields.pop("function_call")
        calls = [{"type": "function", "function": call}]
    if tool_calls := _parse_calls(calls, label, location):
        fields["tool_calls"] = tool_calls
    content = fields.get("content", "")
    if isinstance(content, list):
        try:
            content = text_of_parts(content)
        except ValueError as error:
            raise UserError(
                f"{location}: {label} has {error}, but models are trained only on text; keep parts of the type text, or remove the row"
            ) from error
    if not isinstance(content, str) or (not content and not tool_calls and fields["role"] == "user"):
        actual = "" if isinstance(content, str) else ", got an object" if isinstance(content, dict) else f", got {content!r:.40}"
        raise UserError(f"{location}: `content` of {label} must be non-empty text{actual}; fix or remove the row")
    complete = {**fields, "content": content}
    if LONE_SURROGATE.search(json.dumps(complete, ensure_ascii=False, default=str)) or any(map(_has_lone_surrogate, tool_calls)):
        raise UserError(f"{location}: {label} contains a lone surrogate, which is not a character; fix or remove the row")
    return complete


def _from_sharegpt(message: dict[str, object], calls: object, label: str, location: str) -> tuple[dict[str, object], object]:
    """A ShareGPT message, `{from, value}`, as `{role, content}`, and its tool calls."""
    sender = str(message["from"]).strip().lower()
    if sender not in SENDER_ROLES:
        raise UserError(
            f"{location}: {label} is from {message['from']!r}; the sender must be one of {', '.join(SENDER_ROLES)}: rename it, or "
            "remove the row"
        )
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    value = message.get("value", "")
    if sender != "function_call":
        return {"role": SENDER_ROLES[sender], "content": value, **others}, calls
    parsed = _parse_json(value) if isinstance(value, str) else value
    if not parsed or not isinstance(parsed, dict | list):
        raise UserError(
            f"{location}: {label} must be a call, the JSON text of {{name, arguments}}, got {value!r:.40}; fix or remove the row"
        )
    functions = parsed if isinstance(parsed, list) else [parsed]
    return {"role": "assistant", **others}, [{"type": "function", "function": function} for function in functions]


def _parse_calls(calls: object, label: str, location: str) -> list[dict[str, object]]:
    """The tool calls of a message, each `{type, function: {name, arguments}}` with its other fields."""
    calls = _parse_json(calls) if isinstance(calls, str) else calls
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise UserError(f"{location}: `tool_calls` of {label} must be a list of calls; fix or remove the row")
    return [_parse_call(call, label, location) for call in calls if call is not None]


def _parse_call(call: object, label: str, location: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    nested = isinstance(call, dict) and isinstance(function, dict)
    inner = function if nested else call
    if not isinstance(call, dict) or not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise UserError(f"{location}: a tool call of {label} must be an object with `function: {{name, arguments}}`; fix or remove the row")
    arguments = inner.get("arguments")
    arguments = {} if arguments is None or arguments == "" else arguments
    if not isinstance(_parse_json(arguments) if isinstance(arguments, str) else arguments, dict):
        raise UserError(
            f"{location}: the arguments of the call of {inner['name']!r} in {label} must be an object, or the JSON text of one; "
            "fix or remove the row"
        )
    function_fields = {
        key: without_nulls(value) for key, value in inner.items() if value is not None and key not in ("arguments", "id", "type")
    }
    call_fields = {key: without_nulls(value) for key, value in call.items() if value is not None and (nested or key in ("id", "type"))}
    return {"type": "function", **call_fields, "function": {**function_fields, "arguments": arguments}}


def _parse_json(text: object) -> object:
    """The value of a JSON text; None if it is not valid JSON."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _has_lone_surrogate(call: Mapping[str, object]) -> bool:
    """Whether the arguments of a call, with JSON escapes decoded, contain a lone surrogate."""
    function = call["function"]
    assert isinstance(function, Mapping)
    arguments = function["arguments"]
    value = _parse_json(arguments) if isinstance(arguments, str) else arguments
    return bool(LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False, default=str)))


Render = Callable[[Sequence[Message], Sequence[object]], str]
"""Renders messages and tools as text. Raises UserError if the template rejects them."""
MAX_CACHED_CHECKS = 4096
"""Maximum number of cached checks."""


class NotRendered(UserError):
    """A chat template rejects messages, or drops a part of them."""


class Arguments(dict[str, object]):
    """The arguments of a tool call: an object for templates that serialize it, and JSON text for templates that insert it."""

    def __init__(self, arguments: Mapping[str, object], text: str | None = None) -> None:
        super().__init__(arguments)
        self._text = json.dumps(dict(arguments), ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def prepare_for_template(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages without null fields, with content as one text and the arguments of tool calls as `Arguments`.

    Raises NotRendered for content parts that are not text.
    """
    prepared_messages = []
    for message in messages:
        fields = {key: without_nulls(value) for key, value in message.items() if value is not None and key != "tool_calls"}
        content = fields.get("content", "")
        if isinstance(content, list):
            try:
                content = text_of_parts(content)
            except ValueError as error:
                raise NotRendered(f"messages: the content has {error}; only parts of the type text are supported") from error
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and not isinstance(calls, str) and calls:
            fields["tool_calls"] = [_template_call(call) for call in calls if call is not None]
        prepared_messages.append({**fields, "content": content})
    return prepared_messages


def _template_call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    nested = isinstance(call.get("function"), Mapping)
    raw_function = call["function"] if nested else call
    function = {key: value if key == "arguments" else without_nulls(value) for key, value in raw_function.items() if value is not None}
    function["arguments"] = _template_arguments(function.get("arguments"))
    if not nested:
        return function
    return {**{key: without_nulls(value) for key, value in call.items() if value is not None}, "function": function}


def _template_arguments(arguments: object) -> object:
    if arguments is None or arguments == "":
        return Arguments({})
    if isinstance(arguments, str):
        parsed = _parse_json(arguments)
        # A malformed call is rendered as the model wrote it.
        return Arguments(parsed, arguments) if isinstance(parsed, dict) else arguments
    return Arguments(arguments) if isinstance(arguments, Mapping) else arguments


def has_droppable_parts(messages: Sequence[Message], tools: Sequence[object]) -> bool:
    """Whether the input has parts that some templates drop: tools, tool calls, or roles other than user and assistant."""
    return bool(tools) or any(message.get("tool_calls") or message["role"] not in ("user", "assistant") for message in messages)


class RenderCheck:
    """Checks that a chat template renders tools, tool calls and all roles. Each kind of part is checked once.

    Args:
        name: the tokenizer, for errors.
        ignore_tools: if true, the template may drop tools and tool calls.
    """

    def __init__(self, name: str, *, ignore_tools: bool) -> None:
        self._name, self._ignore_tools = name, ignore_tools
        self._checked: set[tuple[str, ...]] = set()

    def check(self, render: Render, messages: Sequence[Message], tools: Sequence[object]) -> None:
        """Raise NotRendered if removing a part of the input does not change the rendered text."""
        if not has_droppable_parts(messages, tools):
            return
        full_text = ""
        for kind, messages_without, tools_without, fix in self._removable_parts(messages, tools):
            if kind in self._checked:
                continue
            full_text = full_text or render(messages, tools)
            try:
                changes_text = render(messages_without, tools_without) != full_text
            except UserError:
                changes_text = True  # the template rejects the conversation without the part, so it uses the part
            if not changes_text:
                raise NotRendered(f"data.chat_template: the template of {self._name} drops {kind[0]}; {fix}")
            if len(self._checked) >= MAX_CACHED_CHECKS:  # Clients may send any role.
                self._checked.clear()
            self._checked.add(kind)

    def _removable_parts(
        self, messages: Sequence[Message], tools: Sequence[object]
    ) -> Iterator[tuple[tuple[str, ...], Sequence[Message], Sequence[object], str]]:
        """The parts to check. For each: its kind, the conversation and tools without it, and the fix if the template drops it."""
        roles = tuple(str(message["role"]) for message in messages)
        fix = "give the tokenizer a chat_template that renders them"
        if tools and not self._ignore_tools:
            yield ("the tools", *roles), messages, (), f"{fix}, remove the tools, or set data.ignore_tools: true"
        call_index = next((number for number, message in enumerate(messages) if message.get("tool_calls")), None)
        if call_index is not None and not self._ignore_tools:
            message_without_calls = {key: value for key, value in messages[call_index].items() if key != "tool_calls"}
            messages_without = [*messages[:call_index], message_without_calls, *messages[call_index + 1 :]]
            yield ("tool calls",), messages_without, tools, f"{fix}, remove such rows, or set data.ignore_tools: true"
        for number, role in enumerate(roles):
            if role not in ("user", "assistant") and len(messages) > 1 and str(messages[number].get("content") or "").strip():
                kind = (f"messages of the role {role!r}",)
                yield kind, [*messages[:number], *messages[number + 1 :]], tools, f"{fix}, or remove such messages"
