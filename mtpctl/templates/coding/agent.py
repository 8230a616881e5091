"""The agent of mytask: the model writes Python, the sandbox runs it, and the model sees the output until it is correct."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from mtpctl.data.problems import Problem
from mtpctl.sandbox.sandbox import Isolation, shared
from mtpctl.sandbox.session import Limits, Session

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # shared, because creating a client takes longer than a short answer
LIMITS = Limits(cpu_s=5, wall_s=2, memory_mb=256)
SHOWN = 60
"""Number of characters of the output that the model sees, from its end, where the type of an error is."""


async def last_line(session: Session, code: str) -> str:
    """The last line of the code's output, including errors and the value of the last expression."""
    output = await asyncio.to_thread(session.run, code)
    return "it took too long" if output.timed_out else (output.text.strip().splitlines() or ["nothing"])[-1][-SHOWN:]


async def run(problem: Problem, base_url: str, tries: int = 2, retry_reward: float = 0.5, isolation: Isolation = "required") -> dict:
    """Work on one problem: the model writes up to `tries` programs, each of which runs on the row's example.

    The reward is 1 if the last one passes the row's hidden tests, or `retry_reward` if an earlier one failed on the example. `isolation`:
    `none` allows code to run without isolation.
    """
    client, sandbox = CLIENT.with_options(base_url=base_url), shared(isolation)
    messages: list = [{"role": "user", "content": problem.prompt}]
    example: Mapping[str, Any] = problem.fields
    session, code, value = sandbox.session(LIMITS), "", 1.0
    try:
        for left in reversed(range(tries)):
            answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            code = answer.content or ""
            output = await last_line(session, f"{code}\n{example['shown']}")
            if output == example["expected"] or not left:
                break
            value = retry_reward
            feedback = f"{output}, not {example['expected']}:"
            messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": feedback}]
    finally:
        session.close()
    verdict = await asyncio.to_thread(sandbox.judge, code, example["tests"], limits=LIMITS)
    passed = float(verdict.passed == 1.0)
    return {"reward": passed * value, "passed": passed, "corrected": passed * (value < 1.0)}
