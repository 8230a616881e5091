"""The built-in rewards `exact`, `length` and `llm_judge`. They have the signature of user-defined rewards.

`llm_judge` asks a language model behind an OpenAI-compatible endpoint.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from mtpctl.errors import UserError
from mtpctl.recipe.reward import code_reference
from mtpctl.rl.rewards.function import CORRECT_PART, Answered, RewardFunction, Role, load_function, parse
from mtpctl.samples import Sample

if TYPE_CHECKING:
    import httpx

_FINAL_ANSWER = re.compile(r"(?:(?<!\w)#|##)([^#]*[^#\s])\s*$")
"""The marker of a final answer, and the answer after it."""


def exact(response: str, problem: Answered, sample: Sample) -> float:
    """1.0 if the final answers of response and problem are the same text, else 0.0.

    The final answer of a response is the text after its last `#`, or the whole response if it has none. A problem's answer may be a worked
    solution, as in GSM8K, whose final answer is marked by `#` too. A `#` that is part of a word (C#, F#m) marks no final answer there. A
    problem's answer that contains `#` but marks no final answer must equal the whole response.
    """
    match = _FINAL_ANSWER.search(problem.answer)
    if match is None and "#" in problem.answer:
        return float(response.strip() == problem.answer.strip())
    # 42 in `#42` and in GSM8K's `#### 42`; the whole response if it has no `#`.
    answer = response.rpartition("#")[2].strip()
    return float(answer == (problem.answer if match is None else match[1]).strip())


def length(
    response: str,
    problem: Answered,
    sample: Sample,
    of: str = "exact",
    of_args: Mapping[str, object] | None = None,
    target: int | None = None,
    max: int | None = None,
    penalty: float = 1.0,
) -> dict[str, float]:
    """The reward `of` (a plain function, built-in or user-defined) minus a share of `penalty` that depends on the n sampled tokens.

    With `max` the share is min(max(n / max - 1, 0), 1): 0 up to `max` tokens, 1 from twice as many. With `target` it is
    min(|n - target| / target, 1): the distance to a target length as in L1 (arXiv 2503.04697, equation 1), here relative and bounded.
    Parts: those of `of`, `length` (the negated penalty, at most 0), and `correct`: the part of `of`, or the reward without the penalty.

    Raises UserError unless exactly one of `max` and `target` is set, to at least 1. Also raises UserError if `of` is a coroutine.
    """
    limit = target if max is None else max
    if limit is None or limit < 1 or (target is not None and max is not None):
        raise UserError("reward.args: length takes one of target and max, in tokens, of at least 1; set for example {max: 512}")
    base, parts = parse(_load_plain(of, of_args or {}).call(response, problem, sample, **(of_args or {})))
    tokens = sample.num_sampled
    excess = tokens / limit - 1
    if max is None:
        excess = abs(excess)
    share = min(excess, 1.0) if excess > 0 else 0.0
    return {**parts, "reward": base - penalty * share, CORRECT_PART: parts.get(CORRECT_PART, base), "length": -penalty * share}


_functions: dict[str, RewardFunction] = {}


def _load_plain(of: str, args: Mapping[str, object]) -> RewardFunction:
    if of not in _functions:
        function = load_function(code_reference(of), args, Role.reward("reward.args: of"))
        if function.coroutine:
            raise UserError(
                f"reward.args: of: {of} is a coroutine, and length takes a plain function; subtract the penalty in the coroutine"
            )
        _functions[of] = function
    return _functions[of]


JUDGE_PROMPT = """\
Question:
{prompt}

Reference answer:
{answer}

Answer to judge:
{response}

Does the answer to judge reach the reference answer? Think briefly, then end with a line `Score: X`, X between 0 and 1.
"""
SCORE_PATTERN = r"[Ss]core:\s*\**\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?|\s*%)?)"
_RETRYABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Retryable HTTP status codes."""


async def llm_judge(
    response: str,
    problem: Answered,
    sample: Sample,
    url: str,
    model: str,
    prompt: str = JUDGE_PROMPT,
    pattern: str = SCORE_PATTERN,
    scale: float = 1.0,
    api_key_env: str | None = None,
    retries: int = 4,
    temperature: float = 0.0,
    max_tokens: int = 512,
) -> dict[str, float]:
    """Score a response by a judge's reply: the number in its last match of `pattern`, divided by `scale` and clamped to [0, 1].

    The number is the match's first group. "3/10" and "30%" are 0.3 for every `scale`. The part `out_of_range` is 1 for a clamped score.

    Args:
        url: base URL (`http://host:8000/v1`), to which `/chat/completions` is appended.
        prompt: may contain {prompt}, {response} and {answer}; other braces are unchanged.
        api_key_env: environment variable with the key.
        retries: number of retries after a connection error or a retryable status. The delays are about 0.5, 1, 2, … seconds, or the
            server's Retry-After. All attempts share `reward.timeout_s`. `reward.workers` bounds the number of concurrent requests.

    Raises UserError if the key is not set, RuntimeError if the server rejects the request or all attempts fail, and ValueError for a reply
    without a score.
    """
    headers = {}
    if api_key_env is not None:
        if not (key := os.environ.get(api_key_env)):
            raise UserError(f"reward.args: api_key_env: {api_key_env} is not set in the environment; export it")
        headers["Authorization"] = f"Bearer {key}"
    values = {"{prompt}": problem.prompt, "{response}": response, "{answer}": problem.answer}
    text = re.sub(r"\{(?:prompt|response|answer)\}", lambda match: values[match[0]], prompt)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": temperature, "max_tokens": max_tokens}
    reply = await _complete(f"{url.rstrip('/')}/chat/completions", headers, body, retries)
    matches = re.findall(pattern, reply)
    if not matches:
        raise ValueError(f"the judge's reply has no score that matches {pattern}: {reply[-80:]!r}")
    value = _judged_score(matches[-1] if isinstance(matches[-1], str) else matches[-1][0], scale)
    return {"reward": min(max(value, 0.0), 1.0), "out_of_range": float(not 0.0 <= value <= 1.0)}


def _judged_score(text: str, scale: float) -> float:
    """A number as a share of the full score. Raises ValueError if it is not finite."""
    number, slash, full_score = text.replace(" ", "").partition("/")
    if number.endswith("%"):
        number, slash, full_score = number[:-1], "/", "100"
    value = float(number) / (float(full_score) if slash else scale)
    if not math.isfinite(value):
        raise ValueError(f"the judge's score {text[:40]!r} is not a finite number")
    return value


async def _complete(url: str, headers: dict[str, str], body: dict[str, object], retries: int) -> str:
    """Request a completion, and return its text."""
    import httpx

    for attempt in range(retries + 1):
        wait = 0.5 * 2**attempt * random.uniform(0.8, 1.2)
        try:
            reply = await _client().post(url, headers=headers, json=body)
        except httpx.TransportError as error:
            if attempt == retries:
                raise RuntimeError(f"{url} did not answer {retries + 1} requests ({type(error).__name__}: {error})") from error
        else:
            if reply.is_success:
                content: str | None = reply.json()["choices"][0]["message"]["content"]
                return content or ""
            if reply.status_code not in _RETRYABLE or attempt == retries:
                raise RuntimeError(f"{url} answered {reply.status_code}: {' '.join(reply.text.split())[:200]}")
            retry_after = reply.headers.get("Retry-After", "")
            wait = float(retry_after) if retry_after.isdigit() else wait
        await asyncio.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


@cache
def _client() -> httpx.AsyncClient:
    """The HTTP client of the process. It has no timeout, because `reward.timeout_s` cancels the call."""
    import httpx

    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
