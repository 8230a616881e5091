"""The tool of mytask: it codes the word between <call> and </call>. Each response has an instance of its own."""

from __future__ import annotations

from string import ascii_lowercase

from mtpctl.data.problems import Problem


class Coder:
    """Replies with the word, each letter `shift` further in the alphabet; ends the response after `calls` calls."""

    stop = ("</call>",)  # the model's turn ends here, and `reply` is asked

    def __init__(self, problem: Problem, shift: int = 1, calls: int = 2) -> None:
        self.problem, self.left = problem, calls
        self.table = str.maketrans(ascii_lowercase, ascii_lowercase[shift:] + ascii_lowercase[:shift])

    async def reply(self, turn: str) -> str | None:
        """What the model reads next. No loss sees it: these tokens are not the model's."""
        self.left -= 1
        if self.left < 0 or "<call>" not in turn:
            return None
        word = turn.rpartition("<call>")[2].removesuffix("</call>")
        return f"[{word.translate(self.table)}]"
