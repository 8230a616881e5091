"""The reward of mytask: the grade of a judge. `score` is a coroutine, so many requests run concurrently."""

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
    """The grade of the judge, from 0 to 1."""
    if not url:
        return rule_based_grade(response, problem.answer)
    question = PROMPT.format(question=problem.prompt, example=problem.answer, response=response)
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 8}
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with httpx.AsyncClient(timeout=50, transport=httpx.AsyncHTTPTransport(retries=2)) as client:
        answer = await client.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
    return grade_in(answer.json()["choices"][0]["message"]["content"])


def grade_in(text: str) -> float:
    """The first number in the judge's reply as a grade from 0 to 1; 0 if there is none."""
    match = re.search(r"\d+", text)
    return min(int(match[0]), 10) / 10 if match else 0.0


def rule_based_grade(response: str, example: str) -> float:
    """A rule for runs without a judge: 0.5 for a single lower-case word, and 0.5 for its first letter."""
    word = re.fullmatch(r"[a-z]{3,8}", response.strip())
    return 0.5 * (word is not None) + 0.5 * (word is not None and word[0][0] == example[0])
