"""The reward of mytask: a judge's grade. Since `score` is a coroutine, many judgements are under way at once."""

from __future__ import annotations

import os
import re

import httpx

from mtpctl.data.problems import Problem
from mtpctl.samples import Sample

PROMPT = """Task: {question}
A good answer: {example}
The answer to grade: {response}
Reply with a grade from 0 (wrong) to 10 (as good as it gets), and nothing else."""


async def score(response: str, problem: Problem, sample: Sample, url: str = "", model: str = "") -> float:
    """The judge's grade, from 0 to 1."""
    if not url:
        return stand_in(response, problem.answer)
    question = PROMPT.format(question=problem.prompt, example=problem.answer, response=response)
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 8}
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with httpx.AsyncClient(timeout=50, transport=httpx.AsyncHTTPTransport(retries=2)) as client:
        answer = await client.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
    return grade_in(answer.json()["choices"][0]["message"]["content"])


def grade_in(text: str) -> float:
    """The grade that the judge wrote, as a number from 0 to 1; 0 where it wrote none."""
    found = re.search(r"\d+", text)
    return min(int(found[0]), 10) / 10 if found else 0.0


def stand_in(response: str, example: str) -> float:
    """A judge by rule, so that the folder runs without a server: half for one plain word, half for its first letter."""
    word = re.fullmatch(r"[a-z]{3,8}", response.strip())
    return 0.5 * (word is not None) + 0.5 * (word is not None and word[0][0] == example[0])
