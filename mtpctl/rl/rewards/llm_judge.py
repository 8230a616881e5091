"""The reward `llm_judge`: a language model behind an OpenAI-compatible endpoint reads the response and gives points."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from functools import cache

import httpx

from mtpctl.errors import UserError
from mtpctl.rl.rewards.outcome import Answered
from mtpctl.samples import Sample

PROMPT = """\
Question:
{prompt}

Reference answer:
{answer}

Answer to judge:
{response}

Does the answer to judge reach the reference answer? Think briefly, then end with a line `Score: X`, X between 0 and 1.
"""
PATTERN = r"[Ss]core:\s*\**\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?|\s*%)?)"
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may succeed."""


async def score(
    response: str,
    problem: Answered,
    sample: Sample,
    url: str,
    model: str,
    prompt: str = PROMPT,
    pattern: str = PATTERN,
    scale: float = 1.0,
    api_key_env: str | None = None,
    retries: int = 4,
    temperature: float = 0.0,
    max_tokens: int = 512,
) -> dict[str, float]:
    """The last number in the judge's reply that `pattern` finds (its first group), divided by `scale`, from 0 to 1.

    "3/10" and "30%" are the number 0.3, whatever `scale` is. A number out of range is clamped, and the part `out_of_range`
    is 1.

    `url` is what `/chat/completions` is appended to (`http://host:8000/v1`). `prompt` may hold {prompt}, {response} and {answer}, each as
    often as it likes; other braces stay as they are. `api_key_env` names the environment variable of the key. A request that finds no
    answer, or a server that is busy, is repeated `retries` times, after 0.5, 1, 2, … seconds or what the server asks for; all of them
    share `reward.timeout_s`. How many are under way at once is `reward.workers`.

    Raises UserError for a key that is not set, RuntimeError for what the server refuses, ValueError for a reply without a score.
    """
    headers = {}
    if api_key_env is not None:
        if not (key := os.environ.get(api_key_env)):
            raise UserError(f"reward.args: api_key_env: {api_key_env} is not set in the environment; export it")
        headers["Authorization"] = f"Bearer {key}"
    filled = {"{prompt}": problem.prompt, "{response}": response, "{answer}": problem.answer}
    text = re.sub(r"\{(?:prompt|response|answer)\}", lambda match: filled[match[0]], prompt)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": temperature, "max_tokens": max_tokens}
    reply = await _asked(f"{url.rstrip('/')}/chat/completions", headers, body, retries)
    found = re.findall(pattern, reply)
    if not found:
        raise ValueError(f"the judge's reply has no score that {pattern} finds: {reply[-80:]!r}")
    value = _value(found[-1] if isinstance(found[-1], str) else found[-1][0], scale)
    return {"reward": min(max(value, 0.0), 1.0), "out_of_range": float(not 0.0 <= value <= 1.0)}


def _value(text: str, scale: float) -> float:
    """A number as a share of the full score. Raises ValueError if it is not finite."""
    number, slash, full = text.replace(" ", "").partition("/")
    if number.endswith("%"):
        number, slash, full = number[:-1], "/", "100"
    value = float(number) / (float(full) if slash else scale)
    if not math.isfinite(value):
        raise ValueError(f"the judge's score {text[:40]!r} is not a finite number")
    return value


async def _asked(url: str, headers: dict[str, str], body: dict[str, object], retries: int) -> str:
    """The text of the judge's reply."""
    for attempt in range(retries + 1):
        wait = 0.5 * 2**attempt * random.uniform(0.8, 1.2)
        try:
            answer = await _client().post(url, headers=headers, json=body)
        except httpx.TransportError as error:
            if attempt == retries:
                raise RuntimeError(f"{url} gave no answer {retries + 1} times ({type(error).__name__}: {error})") from error
        else:
            if answer.is_success:
                content: str | None = answer.json()["choices"][0]["message"]["content"]
                return content or ""
            if answer.status_code not in _AGAIN or attempt == retries:
                raise RuntimeError(f"{url} answered {answer.status_code}: {' '.join(answer.text.split())[:200]}")
            asked = answer.headers.get("Retry-After", "")
            wait = float(asked) if asked.isdigit() else wait
        await asyncio.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


@cache
def _client() -> httpx.AsyncClient:
    """One client of the process. No timeout of its own: `reward.timeout_s` cancels the call."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
