"""The tool of mytask: encodes the word between <call> and </call>. Each response has a separate instance."""

from __future__ import annotations

from string import ascii_lowercase

from mtpctl.data.problems import Problem


class Coder:
    """Shifts each letter of the word by `shift` in the alphabet. Ends the response after `calls` calls."""

    stop = ("</call>",)  # the model's turn ends here, and `reply` is called

    def __init__(self, problem: Problem, shift: int = 1, calls: int = 2) -> None:
        self.problem, self.left = problem, calls
        self.table = str.maketrans(ascii_lowercase, ascii_lowercase[shift:] + ascii_lowercase[:shift])

    async def reply(self, turn: str) -> str | None:
        """The text that follows in the response. Its tokens are masked in the loss."""
        self.left -= 1
        if self.left < 0 or "<call>" not in turn:
            return None
        word = turn.rpartition("<call>")[2].removesuffix("</call>")
        return f"[{word.translate(self.table)}]"
