"""One verifiable problem: what is asked, what the checker compares with, what a supervised stage imitates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt with its answer.

    `prompt_id` is stable from run to run: `task/split/number` for generated problems, `file:line` for read ones.
    `solution` is a worked response that ends in the answer, where there is one.
    """

    prompt_id: str
    prompt: str
    answer: str
    solution: str | None = None

    @property
    def target(self) -> str:
        """Text that a supervised stage trains on: the worked solution, else the bare answer."""
        return self.answer if self.solution is None else self.solution
