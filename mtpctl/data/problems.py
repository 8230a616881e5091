"""One problem (prompt, answer and the other columns of its row), and the cursor that draws training problems."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, cast

from mtpctl.errors import UserError

Message = Mapping[str, object]
"""One message of a conversation, in the form of chat templates: `role`, `content`, and others such as `tool_calls`."""

NO_ANSWER = ""
"""`Problem.answer` of a row without an answer. Answers in files are never empty."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, the reference answer for the reward, and optionally a worked `solution` that ends with the answer.

    Attributes:
        prompt_id: stable across runs: `task/split/number` for a generated problem, `file:line` for one from a file.
        messages: the prompt as a conversation, whose text is `prompt`; empty for plain text. In the supervised stage, possibly a whole
            conversation that ends with the assistant.
        fields: the row's other columns, as JSON.
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
        """Inverse of `to_json`."""
        prompt_id, prompt, answer, solution, messages, fields = values
        return cls(prompt_id, prompt, answer, solution, tuple(messages), fields)

    @property
    def prompt_hash(self) -> bytes:
        """Identifies the prompt in comparisons of held-out and training rows; leading and trailing whitespace does not count."""
        return hashlib.blake2b(self.prompt.strip().encode(), digest_size=8).digest()

    @property
    def target(self) -> str:
        """The target of the supervised stage: the solution, or the answer if there is none."""
        return self.answer if self.solution is None else self.solution

    @property
    def tools(self) -> Sequence[Mapping[str, object]] | None:
        """The tools for the chat template: the column `tools`, or None."""
        return cast("Sequence[Mapping[str, object]] | None", self.fields.get("tools"))

    @property
    def is_conversation(self) -> bool:
        """Whether this is a whole conversation, whose assistant turns the supervised stage trains on."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"


def text_of(messages: Sequence[Message]) -> str:
    """A conversation as readable text: the content of a single message, else each message after a line with its role."""
    if len(messages) == 1:
        return content_of(messages[0])
    return "\n\n".join(f"[{message['role']}]\n{content_of(message)}" for message in messages)


def content_of(message: Message) -> str:
    """The text of one message, whose content may be a list of parts, or absent if there is a tool call."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""


MAX_INTERVAL = 16
"""A problem whose groups have no signal (the rewards of each group are equal) is drawn again after at most this many epochs."""


class Backoff(NamedTuple):
    """The number of a problem's consecutive groups without signal, and the epoch in which it was last drawn. Serialized as a JSON list."""

    groups_without_signal: int
    last_epoch: int


class CursorState(TypedDict):
    """The position of a cursor, and the inputs that determine its order, as stored in a checkpoint."""

    epoch: int
    position: int
    seed: int
    shuffle: bool
    fingerprint: str
    drawn: int
    draws: Mapping[str, Sequence[int]]


class PromptCursor:
    """Draws problems endlessly, epoch after epoch, shuffled by seed and epoch. A resumed run neither repeats nor skips a problem.

    backoff: if a problem's groups have no signal (`record_signal`), skip it for some epochs.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, *, shuffle: bool = True, backoff: bool = False) -> None:
        """Raises UserError if there are no problems."""
        if not problems:
            raise UserError("data.path: the training set is empty; add problems")
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = 0
        self._backoff = backoff
        self._backoff_by_prompt: dict[str, Backoff] = {}  # by prompt id, only with `backoff`
        self._start_epoch(epoch=0, position=0)

    def _start_epoch(self, epoch: int, position: int) -> None:
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
        """Number of problems drawn so far, over all epochs."""
        return self._drawn

    def __iter__(self) -> PromptCursor:
        return self

    def __next__(self) -> Problem:
        for _ in range(len(self._order)):
            problem = self._next_in_order()
            if not self._should_skip(problem):
                break
        else:
            # A full pass found only problems to skip, so the next one is drawn anyway.
            problem = self._next_in_order()
        self._drawn += 1
        if self._backoff:
            previous = self._backoff_by_prompt.get(problem.prompt_id)
            self._backoff_by_prompt[problem.prompt_id] = Backoff(previous.groups_without_signal if previous else 0, self._epoch)
        return problem

    def _next_in_order(self) -> Problem:
        if self._position == len(self._order):
            self._start_epoch(self._epoch + 1, 0)
        problem = self._problems[self._order[self._position]]
        self._position += 1
        return problem

    def _should_skip(self, problem: Problem) -> bool:
        without_signal, last_epoch = self._backoff_by_prompt.get(problem.prompt_id, (0, 0))
        return without_signal > 0 and self._epoch < last_epoch + min(2**without_signal, MAX_INTERVAL)

    def record_signal(self, problem: Problem, *, signal: bool) -> None:
        """Record whether a drawn problem's group had signal. After z consecutive groups without signal, skip it for 2^z - 1 epochs.

        At most `MAX_INTERVAL` - 1 epochs are skipped. GRESO (arXiv 2506.02177) skips with a probability instead.
        """
        if signal:
            self._backoff_by_prompt.pop(problem.prompt_id, None)
        elif (backoff := self._backoff_by_prompt.get(problem.prompt_id)) is not None:
            self._backoff_by_prompt[problem.prompt_id] = backoff._replace(groups_without_signal=backoff.groups_without_signal + 1)

    def take(self, count: int) -> list[Problem]:
        return [next(self) for _ in range(count)]

    def state_dict(self) -> CursorState:
        """The state for `load_state_dict`, JSON-serializable. `draws` is not a copy: serialize it before the next draw."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
            "drawn": self._drawn,
            "draws": self._backoff_by_prompt,
        }

    def load_state_dict(self, state: CursorState) -> None:
        """Continue from `state`. Raises UserError if its seed, order or problems differ."""
        current_state = self.state_dict()
        for key, recipe_key, saved, current in (
            ("seed", "seed", state["seed"], current_state["seed"]),
            ("shuffle", "data.shuffle", state["shuffle"], current_state["shuffle"]),
            ("fingerprint", "data.path", state["fingerprint"], current_state["fingerprint"]),
        ):
            if saved != current:
                raise UserError(
                    f"{recipe_key}: the run started with other training data ({key} {saved}, now {current}); "
                    "restore it or start a new run_dir"
                )
        self._start_epoch(state["epoch"], state["position"])
        self._drawn = state["drawn"]
        self._backoff_by_prompt = {prompt_id: Backoff(*values) for prompt_id, values in state["draws"].items()} if self._backoff else {}

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for problem in self._problems:
            digest.update(f"{problem.prompt_id}\x00{problem.prompt}\x00{problem.answer}\x01".encode())
        return digest.hexdigest()[:16]
