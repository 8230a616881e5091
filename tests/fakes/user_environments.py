"""Environments as users write them, the wrong ones too; tests name them by this file."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, ClassVar

CLOSED: list[object] = []
"""The problems of the instances that were closed."""


class Echo:
    """Repeats the model's turn in brackets."""

    stop: ClassVar = ["</call>"]

    def __init__(self, problem: Any, times: int = 1) -> None:
        self.problem, self.times = problem, times

    async def reply(self, turn: str) -> str | None:
        await asyncio.sleep(0)
        return f"[{turn}]" * self.times

    def close(self) -> None:
        CLOSED.append(self.problem)


class Plain(Echo):
    """The same in plain methods; notes the threads that call it."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self.threads = [threading.current_thread()]

    def reply(self, turn: str) -> str:  # type: ignore[override]
        self.threads.append(threading.current_thread())
        return f"[{turn}]"

    def reward(self) -> float:
        self.threads.append(threading.current_thread())
        assert len(set(self.threads)) == 1, "one thread, so that what belongs to a thread can be kept"
        return 0.25


class Raises(Echo):
    async def reply(self, turn: str) -> str:
        raise KeyError("no such\ntool")


class Exits(Echo):
    def reply(self, turn: str) -> str:  # type: ignore[override]
        raise SystemExit(3)


class CancelsItself(Echo):
    async def reply(self, turn: str) -> str:
        raise asyncio.CancelledError


class TimesOut(Echo):
    async def reply(self, turn: str) -> str:
        raise TimeoutError("the search engine")


class Number(Echo):
    async def reply(self, turn: str) -> Any:
        return 7


class Bytes(Echo):
    async def reply(self, turn: str) -> Any:
        return b"\xff\xfe"


class Half(Echo):
    async def reply(self, turn: str) -> str:
        return "half of a character: \ud83d"


class Long(Echo):
    async def reply(self, turn: str) -> str:
        return "x" * 1_000_001


class NoMessage(Echo):
    async def reply(self, turn: str) -> Any:
        return [{"role": "user"}]


class Messages(Echo):
    async def reply(self, turn: str) -> Any:
        return [{"role": "user", "content": "go on"}]


class NaN(Echo):
    async def reward(self) -> float:
        return float("nan")


class FailsAtBirth(Echo):
    def __init__(self, problem: Any) -> None:
        raise ValueError("no board")


class NoStop:
    def __init__(self, problem: Any) -> None: ...

    async def reply(self, turn: str) -> None: ...


class StopOfText(NoStop):
    stop = "</call>"


class SpecialStop(NoStop):
    stop: ClassVar = ["<eos>"]


class BlankLineStop(Echo):
    stop: ClassVar = ["\n\n"]


class NoReply:
    stop: ClassVar = ["</call>"]

    def __init__(self, problem: Any) -> None: ...


class ReplyOfTwo(Echo):
    async def reply(self, turn: str, history: str) -> str:  # type: ignore[override]
        return history


class Hangs(Echo):
    """Its plain method does not return until it is closed."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self.closed = threading.Event()

    def reply(self, turn: str) -> str:  # type: ignore[override]
        self.closed.wait(30)
        return "late"

    def close(self) -> None:
        self.closed.set()
        super().close()


class Blocks(Echo):
    """Its coroutine sleeps as a thread would, and keeps its event loop from everything else."""

    async def reply(self, turn: str) -> str:
        time.sleep(float(self.problem))
        return "late"


class WithTools(Echo):
    def tools(self) -> list[dict[str, object]]:
        return [{"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}]


class Rewards(Echo):
    """Its reward is the number of turns that it saw."""

    count = 0

    async def reply(self, turn: str) -> str | None:
        self.count += 1
        return "go on" if self.count < 3 else None

    async def reward(self) -> float:
        return float(self.count)


def function(problem: Any) -> Echo:
    return Echo(problem)
