"""One problem: what is asked, what a reward compares responses with, and whatever else its row holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

Message = Mapping[str, object]
"""One message of a conversation as chat templates take it: `role`, `content`, and where the template knows them `tool_calls` and others."""

NO_ANSWER = ""
"""`Problem.answer` of a row without an answer. An answer in a file is never empty."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, the answer that a reward compares responses with, and maybe a worked `solution` that ends in the answer.

    `prompt_id` is the same in every run: `task/split/number` of a generated problem, `file:line` of one from a file. `messages` is the
    prompt as a conversation, empty where it is plain text; `prompt` is then the text of it. In the supervised stage they may be a whole
    conversation, which ends with the assistant. `fields` holds the row's other columns, as JSON has them.
    """

    prompt_id: str
    prompt: str
    answer: str
    solution: str | None = None
    messages: Sequence[Message] = field(default=(), hash=False)
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)

    def to_json(self) -> list[object]:
        return [self.prompt_id, self.prompt, self.answer, self.solution, list(self.messages), dict(self.fields)]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Problem:
        """Inverse of `to_json`; a checkpoint of an earlier release has neither messages nor fields."""
        prompt_id, prompt, answer, solution = values[:4]
        messages, fields = values[4:] or ((), {})
        return cls(prompt_id, prompt, answer, solution, tuple(messages), fields)

    @property
    def target(self) -> str:
        """The text that the supervised stage trains on: the solution, or the answer where there is none."""
        return self.answer if self.solution is None else self.solution

    @property
    def tools(self) -> Sequence[Mapping[str, object]] | None:
        """The tools that the chat template tells of: the column `tools`, None without one."""
        return cast("Sequence[Mapping[str, object]] | None", self.fields.get("tools"))

    @property
    def is_conversation(self) -> bool:
        """Whether this is a whole conversation, of which the supervised stage trains on the assistant's turns."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"


def text_of(messages: Sequence[Message]) -> str:
    """A conversation as text to read: the content of a single message, else every message below its role."""
    if len(messages) == 1:
        return content_of(messages[0])
    return "\n\n".join(f"[{message['role']}]\n{content_of(message)}" for message in messages)


def content_of(message: Message) -> str:
    """The text of one message, whose content may be a list of parts, or nothing beside a tool call."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""
