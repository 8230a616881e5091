"""The agent of mytask: uses the OpenAI client, and offers two tools to the model."""

from __future__ import annotations

import json
from collections.abc import Callable

from openai import AsyncOpenAI

from mtpctl.data.problems import Problem

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # shared, because creating a client takes longer than a short answer


def double(a: int) -> int:
    """Double a number."""
    return 2 * a


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


FUNCTIONS: dict[str, Callable[..., int]] = {"double": double, "add": add}


def schema(name: str, *argument_names: str) -> dict:
    """The description of a tool in requests."""
    parameters = {"type": "object", "properties": {each: {"type": "integer"} for each in argument_names}, "required": [*argument_names]}
    return {"type": "function", "function": {"name": name, "description": FUNCTIONS[name].__doc__, "parameters": parameters}}


TOOLS: list = [schema("double", "a"), schema("add", "a", "b")]


def result(name: str, arguments: str) -> str:
    """The result of a tool call for the model. An invalid call returns an error message."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


async def run(problem: Problem, base_url: str, turns: int = 3) -> dict[str, float]:
    """Work on one problem, concurrently with hundreds of others. `base_url`: the OpenAI endpoint, a different URL for each problem.

    Returns `reward`, which is trained on, and values that are logged as `reward/KEY`. It may also return a float.
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
            assert call.type == "function", "the gateway supports function calls only"
            calls += 1
            content = result(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return {"reward": 0.0, "calls": calls}
