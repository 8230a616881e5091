"""The environment `python`: code that the model writes between tags runs in a session, and its output is appended to the response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mtpctl.sandbox.fences import strip_fence
from mtpctl.sandbox.sandbox import Isolation, shared
from mtpctl.sandbox.session import Limits, Output

_CELL_THREADS = ThreadPoolExecutor(max_workers=64, thread_name_prefix="python-cell")
"""Threads that wait for cells. The cells themselves run in processes of the sandbox."""


class Python:
    """The Python session of one response. Turns share state, and the last expression of a turn is printed, as in interactive Python.

    Args:
        opening, closing: tags around code; a turn ends with `closing`.
        answer: text for the model, with `{}` for the output.
        timeout_s: wall-clock seconds of a turn.
        session_cpu_s, memory_mb: limits for all turns together.
        max_chars: maximum length of the output; the middle of longer output is left out.
        isolation: `none` allows code to run without isolation.
    """

    def __init__(
        self,
        problem: object = None,
        *,
        opening: str = "<python>",
        closing: str = "</python>",
        answer: str = "<output>\n{}</output>\n",  # ends the line, so that a code fence can follow
        timeout_s: float = 10.0,
        session_cpu_s: float = 60.0,
        memory_mb: int = 512,
        max_chars: int = 4000,
        isolation: Isolation = "required",
    ) -> None:
        self.stop: Sequence[str] = [closing]
        self._opening, self._closing, self._answer, self._max_chars = opening, closing, answer, max_chars
        self._session = shared(isolation).session(Limits(cpu_s=session_cpu_s, wall_s=timeout_s, memory_mb=memory_mb))

    async def reply(self, turn: str) -> str:
        """Run the code of this turn, and return its output."""
        before = turn.rpartition(self._closing)[0]
        code = before.rpartition(self._opening)[2]
        output = await asyncio.get_running_loop().run_in_executor(_CELL_THREADS, self._session.run, strip_fence(code))
        return self._answer.replace("{}", self._format_output(output))

    def close(self) -> None:
        """End the session, even while a cell runs."""
        self._session.close()

    def _format_output(self, output: Output) -> str:
        text = shorten_middle(output.text, self._max_chars)
        notes = {
            "timed out": output.timed_out,
            "too much output": output.too_much_output,
            "the session ended, and its variables are gone": output.ended,
        }
        note = "; ".join(text for text, applies in notes.items() if applies)
        return "\n".join(part.rstrip("\n") for part in (text, f"[{note}]" if note else "") if part) + ("\n" if text or note else "")


def shorten_middle(text: str, max_chars: int) -> str:
    """Shorten a text of more than `max_chars` characters to its beginning and end, with the number of omitted characters between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
