"""The agent of mytask: the model writes Python, the sandbox runs it, and the model is shown what came out until that is right."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from mtpctl.data.problems import Problem
from mtpctl.sandbox.limits import Limits
from mtpctl.sandbox.sandbox import Isolation
from mtpctl.sandbox.session import Session
from mtpctl.sandbox.shared import shared

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # one for all: making a client takes longer than a short answer
LIMITS = Limits(cpu_s=5, wall_s=2, memory_mb=256)
SHOWN = 60
"""Characters of what code printed that the model is shown: the end of it, where an error says what it is."""


async def printed(session: Session, code: str) -> str:
    """What the code prints, its last expression and errors among it. Threads wait, and processes in the sandbox do the work."""
    output = await asyncio.to_thread(session.run, code)
    return "it took too long" if output.timed_out else (output.text.strip().splitlines() or ["nothing"])[-1][-SHOWN:]


async def run(problem: Problem, base_url: str, tries: int = 2, mended: float = 0.5, isolation: Isolation = "required") -> dict[str, float]:
    """Work on one problem: at most `tries` programs, each run on the row's example. Code that passes the row's hidden tests is worth 1.

    `mended` is what it is worth after an example that went wrong. `isolation`: `none` allows code to run without isolation.
    """
    client, sandbox = CLIENT.with_options(base_url=base_url), shared(isolation)
    messages: list = [{"role": "user", "content": problem.prompt}]
    example: Mapping[str, Any] = problem.fields
    session, code, worth = sandbox.session(LIMITS), "", 1.0
    try:
        for left in reversed(range(tries)):
            answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            code = answer.content or ""
            came = await printed(session, f"{code}\n{example['shown']}")
            if came == example["expected"] or not left:
                break
            worth = mended
            said = f"{came}, not {example['expected']}:"
            messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": said}]
    finally:
        session.close()
    verdict = await asyncio.to_thread(sandbox.judge, code, example["tests"], limits=LIMITS)
    passed = float(verdict.passed == 1.0)
    return {"reward": passed * worth, "passed": passed, "mended": passed * (worth < 1.0)}
