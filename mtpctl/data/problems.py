"""One problem: what is asked, what a reward compares responses with, and whatever else its row holds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict, cast

from mtpctl.errors import UserError

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


# The order in which training problems are drawn: epoch after epoch without end, shuffled by seed and epoch, and resumable.


class CursorState(TypedDict):
    """The place of a cursor, and what its order depends on, as a checkpoint holds them."""

    epoch: int
    position: int
    seed: int
    shuffle: bool
    fingerprint: str


class PromptCursor:
    """Iterates over the problems without end. Its state is the epoch and the position in it: a resumed run repeats and skips none."""

    def __init__(self, problems: Sequence[Problem], seed: int, *, shuffle: bool = True) -> None:
        """Raises UserError where there are no problems."""
        if not problems:
            raise UserError("data.path: the training set is empty; add problems")
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._begin(epoch=0, position=0)

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(len(self._problems)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)

    @property
    def epoch(self) -> int:
        """Epoch of the next problem, from 0."""
        return self._epoch + (self._position == len(self._order))

    @property
    def drawn(self) -> int:
        """How many problems were drawn so far, over all epochs."""
        return self._epoch * len(self._order) + self._position

    def __iter__(self) -> PromptCursor:
        return self

    def __next__(self) -> Problem:
        if self._position == len(self._order):
            self._begin(self._epoch + 1, 0)
        problem = self._problems[self._order[self._position]]
        self._position += 1
        return problem

    def take(self, count: int) -> list[Problem]:
        return [next(self) for _ in range(count)]

    def state_dict(self) -> CursorState:
        """The state for `load_state_dict`, as JSON takes it."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: CursorState) -> None:
        """Continue from `state`. Raises UserError where it is of another seed, order or set of problems."""
        now = self.state_dict()
        for key, recipe_key, saved, current in (
            ("seed", "seed", state["seed"], now["seed"]),
            ("shuffle", "data.shuffle", state["shuffle"], now["shuffle"]),
            ("fingerprint", "data.path", state["fingerprint"], now["fingerprint"]),
        ):
            if saved != current:
                raise UserError(
                    f"{recipe_key}: the run started with other training data ({key} {saved}, now {current}); "
                    "restore it or start a new run_dir"
                )
        self._begin(state["epoch"], state["position"])

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for problem in self._problems:
            digest.update(f"{problem.prompt_id}\x00{problem.prompt}\x00{problem.answer}\x01".encode())
        return digest.hexdigest()[:16]
