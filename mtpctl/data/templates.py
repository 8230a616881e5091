"""Prepares messages for a chat template, and checks that the template renders all of them.

Templates read the arguments of a tool call in two ways: as an object, and as its JSON text. `Arguments` serves both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from mtpctl.data.messages import text_of_parts, without_nulls
from mtpctl.data.problems import Message
from mtpctl.errors import UserError

Render = Callable[[Sequence[Message], Sequence[object]], str]
"""Renders messages and tools as text. Raises UserError if the template refuses them."""


CHECKED = 4096
"""Maximum number of cached checks."""


class NotRendered(UserError):
    """A chat template rejects messages, or leaves out a part of them."""


class Arguments(dict[str, object]):
    """The arguments of a tool call: an object for templates that serialize it, and its JSON for templates that write it as text."""

    def __init__(self, arguments: Mapping[str, object], text: str | None = None) -> None:
        super().__init__(arguments)
        self._text = json.dumps(dict(arguments), ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def for_template(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as templates read them: no null fields, content as one text, and the arguments of tool calls as `Arguments`.

    Raises NotRendered for content with parts that are not text.
    """
    found = []
    for message in messages:
        shown = {key: without_nulls(value) for key, value in message.items() if value is not None and key != "tool_calls"}
        content = shown.get("content", "")
        if isinstance(content, list):
            try:
                content = text_of_parts(content)
            except ValueError as error:
                raise NotRendered(f"messages: the content has {error}; only parts of the type text are supported") from error
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and not isinstance(calls, str) and calls:
            shown["tool_calls"] = [_call(call) for call in calls if call is not None]
        found.append({**shown, "content": content})
    return found


def _call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    nested = isinstance(call.get("function"), Mapping)
    inner = call["function"] if nested else call
    function = {key: value if key == "arguments" else without_nulls(value) for key, value in inner.items() if value is not None}
    function["arguments"] = _arguments(function.get("arguments"))
    if not nested:
        return function
    return {**{key: without_nulls(value) for key, value in call.items() if value is not None}, "function": function}


def _arguments(arguments: object) -> object:
    if arguments is None or arguments == "":
        return Arguments({})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments  # a malformed call is rendered as the model wrote it
        return Arguments(parsed, arguments) if isinstance(parsed, dict) else arguments
    return Arguments(arguments) if isinstance(arguments, Mapping) else arguments


def has_droppable_parts(messages: Sequence[Message], tools: Sequence[object]) -> bool:
    """Whether a template may leave something out: tools, tool calls, or roles other than user and assistant."""
    return bool(tools) or any(message.get("tool_calls") or message["role"] not in ("user", "assistant") for message in messages)


class Shown:
    """Checks that a chat template renders tools, tool calls and all roles. Each kind is checked once.

    `name`: the tokenizer, for messages. `ignore_tools`: tools and tool calls may be left out.
    """

    def __init__(self, name: str, *, ignore_tools: bool) -> None:
        self._name, self._ignore_tools = name, ignore_tools
        self._checked: set[tuple[str, ...]] = set()

    def check(self, render: Render, messages: Sequence[Message], tools: Sequence[object]) -> None:
        """Raise NotRendered if the rendered text is the same without some part of the input."""
        if not has_droppable_parts(messages, tools):
            return
        whole = ""
        for kind, fewer, fewer_tools, fix in self._parts(messages, tools):
            if kind in self._checked:
                continue
            whole = whole or render(messages, tools)
            try:
                shown = render(fewer, fewer_tools) != whole
            except UserError:
                shown = True  # the template refuses the rest alone, so the part matters to it
            if not shown:
                raise NotRendered(f"data.chat_template: the template of {self._name} leaves out {kind[0]}; {fix}")
            if len(self._checked) >= CHECKED:  # Clients may send any role.
                self._checked.clear()
            self._checked.add(kind)

    def _parts(
        self, messages: Sequence[Message], tools: Sequence[object]
    ) -> Iterator[tuple[tuple[str, ...], Sequence[Message], Sequence[object], str]]:
        """The parts to check: their kind, the conversation without them, and what to do if that makes no difference."""
        roles = tuple(str(message["role"]) for message in messages)
        another = "give the tokenizer a chat_template that shows them"
        if tools and not self._ignore_tools:
            yield ("the tools", *roles), messages, (), f"{another}, remove the tools, or set data.ignore_tools: true"
        called = next((number for number, message in enumerate(messages) if message.get("tool_calls")), None)
        if called is not None and not self._ignore_tools:
            bare = {key: value for key, value in messages[called].items() if key != "tool_calls"}
            fewer = [*messages[:called], bare, *messages[called + 1 :]]
            yield ("tool calls",), fewer, tools, f"{another}, remove such rows, or set data.ignore_tools: true"
        for number, role in enumerate(roles):
            if role not in ("user", "assistant") and len(messages) > 1 and str(messages[number].get("content") or "").strip():
                kind = (f"messages of the role {role!r}",)
                yield kind, [*messages[:number], *messages[number + 1 :]], tools, f"{another}, or remove such messages"
