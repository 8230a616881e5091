"""The reward of both systems, and the log of responses that table.py reads. Needs only the standard library.

Work B: 1 for a correct sum, 0 otherwise. The rules are those of `mtpctl init --template reasoning-gym` for chain_sum, which accepts only
reasoning-gym's full score; tests/benchmarks/test_peers.py compares them. Work A: rows with the answer `COIN` get a pseudo-random 0 or 1, so
groups have gradients, but the model learns nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.data.problems import Problem
    from mtpctl.samples import Sample

COIN = "coin"
"""The answer in rows of work A."""
_STATED = re.compile(r"\banswer\b[^.\n]{0,80}?\b(?:is|are)\b[:\s$*]*", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")


def stated_answer(response: str) -> str | None:
    """The text between the last "answer is" and the end of its sentence, after any `=`. If there is none, the last number."""
    parts = _STATED.split(response)
    if len(parts) == 1:
        numbers = _NUMBER.findall(response)
        return numbers[-1] if numbers else None
    text = _SENTENCE_END.split(parts[-1])[0].strip().rstrip("$*").strip()
    return text.rpartition("=")[2].strip()


def value(response: str, answer: str) -> float:
    """The reward of a response."""
    if answer == COIN:
        return float(zlib.crc32(response.encode()) & 1)
    stated = stated_answer(response)
    if not stated:
        return 0.0
    try:
        return float(Decimal(stated.replace(",", "")) == Decimal(answer))
    except InvalidOperation:
        return 0.0


def record(log: str, split: str, key: str, in_training: bool, tokens: int, reward: float) -> None:
    """Append one scored response to the log. A line is written by one system call, so lines of concurrent processes do not interleave."""
    line = {"time": time.time(), "split": split, "key": key, "in_training": in_training, "tokens": tokens, "reward": reward}
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def score(response: str, problem: Problem, sample: Sample, log: str) -> float:
    """Reward function of mtpctl. `log`: path of the log (`reward.args`)."""
    fields: dict[str, Any] = dict(problem.fields)
    reward = value(response, problem.answer)
    record(log, fields["split"], fields["key"], fields["in_training"], len(sample.response_ids), reward)
    return reward
