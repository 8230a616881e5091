"""The agent of mytask: the model has two tools, which it calls through the ordinary OpenAI client."""

from __future__ import annotations

import json
from collections.abc import Callable

from openai import AsyncOpenAI

from mtpctl.data.problems import Problem

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # one for all: making a client takes longer than a short answer


def double(a: int) -> int:
    """Twice a number."""
    return 2 * a


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


FUNCTIONS: dict[str, Callable[..., int]] = {"double": double, "add": add}


def schema(name: str, *numbers: str) -> dict:
    """A tool as requests name it."""
    parameters = {"type": "object", "properties": {each: {"type": "integer"} for each in numbers}, "required": [*numbers]}
    return {"type": "function", "function": {"name": name, "description": FUNCTIONS[name].__doc__, "parameters": parameters}}


TOOLS: list = [schema("double", "a"), schema("add", "a", "b")]


def result(name: str, arguments: str) -> str:
    """What the model reads of its call. A call that makes no sense is told to it, and ends nothing."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


async def run(problem: Problem, base_url: str, turns: int = 3) -> dict[str, float]:
    """Work on one problem; hundreds of calls are under way at once. `base_url` is that of an OpenAI client, and this problem's alone.

    Returns what trains, `reward`; every other key is logged as `reward/KEY`. A plain float would do as well.
    """
    client = CLIENT.with_options(base_url=base_url)
    messages: list = [{"role": "user", "content": problem.prompt}]
    calls = 0
    for _ in range(turns):
        answer = (await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return {"reward": float((answer.content or "").strip() == problem.answer), "calls": calls}
        for call in answer.tool_calls:
            assert call.type == "function", "the gateway knows no others"
            calls += 1
            content = result(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return {"reward": 0.0, "calls": calls}
