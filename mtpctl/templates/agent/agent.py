"""The agent of mytask: it asks the model, and where the answer is wrong it asks once more."""

from __future__ import annotations

from openai import AsyncOpenAI

from mtpctl.data.problems import Problem

AGAIN = "no, look again:"
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # one for all: making a client takes longer than a short answer


async def run(problem: Problem, base_url: str, second: float = 0.5) -> float:
    """Work on one problem; hundreds of calls are under way at once. `base_url` is that of an OpenAI client, and this problem's alone.

    Returns the reward: 1 for a right answer, `second` for one at the second try.
    """
    client = CLIENT.with_options(base_url=base_url)
    messages: list = [{"role": "user", "content": problem.prompt}]
    for worth in (1.0, second):
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        if (answer.content or "").strip() == problem.answer:
            return worth
        messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": AGAIN}]
    return 0.0
