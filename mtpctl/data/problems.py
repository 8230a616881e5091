"""One problem whose answer can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, the answer that the checker compares responses with, and where there is one a worked `solution` that ends in the answer.

    `prompt_id` is the same in every run: `task/split/number` of a generated problem, `file:line` of one from a file.
    `fields` are the row's other columns.
    """

    prompt_id: str
    prompt: str
    answer: str
    solution: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def target(self) -> str:
        """The text that the supervised stage trains on: the solution, or the answer where there is none."""
        return self.answer if self.solution is None else self.solution
