"""One problem whose answer can be checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, the answer that rewards compare responses with, and where there is one a worked `solution` that ends in the answer.

    `prompt_id` is the same in every run: `task/split/number` of a generated problem, `file:line` of one from a file.
    """

    prompt_id: str
    prompt: str
    answer: str
    solution: str | None = None

    @property
    def target(self) -> str:
        """The text that the supervised stage trains on: the solution, or the answer where there is none."""
        return self.answer if self.solution is None else self.solution
