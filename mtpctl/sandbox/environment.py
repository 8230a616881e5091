"""The environment `python`: code that the model writes between tags runs in a session, and the model is told what it printed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mtpctl.sandbox.fences import unfenced
from mtpctl.sandbox.limits import Limits
from mtpctl.sandbox.sandbox import Isolation
from mtpctl.sandbox.session import Output
from mtpctl.sandbox.shared import shared

_CELLS = ThreadPoolExecutor(max_workers=64, thread_name_prefix="python-cell")
"""Threads that wait for cells: the sandbox's processes do the work."""


class Python:
    """One response's session. State is kept from turn to turn, and the last expression of a turn is printed, as at Python's prompt.

    opening, closing: tags around code; a turn ends with `closing`. answer: what the model is told, with `{}` for the output. timeout_s:
    wall-clock seconds of a turn. session_cpu_s, memory_mb: bounds of all turns together. max_chars: of the output, whose middle is left out
    beyond. isolation: `none` runs code also where no walls can be had.
    """

    def __init__(
        self,
        problem: object = None,
        *,
        opening: str = "<python>",
        closing: str = "</python>",
        answer: str = "<output>\n{}</output>\n",  # a fence of code that follows begins a line
        timeout_s: float = 10.0,
        session_cpu_s: float = 60.0,
        memory_mb: int = 512,
        max_chars: int = 4000,
        isolation: Isolation = "required",
    ) -> None:
        self.stop: Sequence[str] = [closing]
        self._opening, self._closing, self._answer, self._most = opening, closing, answer, max_chars
        self._session = shared(isolation).session(Limits(cpu_s=session_cpu_s, wall_s=timeout_s, memory_mb=memory_mb))

    async def reply(self, turn: str) -> str:
        """Run the code of this turn, and say what it printed."""
        before = turn.rpartition(self._closing)[0]
        code = before.rpartition(self._opening)[2]
        output = await asyncio.get_running_loop().run_in_executor(_CELLS, self._session.run, unfenced(code))
        return self._answer.replace("{}", self._told(output))

    def close(self) -> None:
        """End the session, also while a cell runs."""
        self._session.close()

    def _told(self, output: Output) -> str:
        text = shortened(output.text, self._most)
        notes = {
            "timed out": output.timed_out,
            "too much output": output.too_much_output,
            "the session ended, and its variables are gone": output.ended,
        }
        told = "; ".join(note for note, holds in notes.items() if holds)
        return "\n".join(part.rstrip("\n") for part in (text, f"[{told}]" if told else "") if part) + ("\n" if text or told else "")


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and end with the number of characters that were left out between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
