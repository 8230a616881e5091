"""A fake engine with scripted answers, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mtpctl.data.tokenizers import HfTokenizer, load_plain_tokenizer, make_byte_tokenizer
from mtpctl.environments.gateway.server import AnswerReader
from mtpctl.environments.gateway.trajectory import ChatBackend
from mtpctl.rollout.protocol import ToolCallParser
from mtpctl.samples import GenerationRequest, Sample

EOS = 258
Says = Callable[[str, int], str]
"""What the model says, of the text before it and the number of the call. A `\\0` at the end stands for no end token."""


@cache
def byte_tokenizer() -> HfTokenizer:
    folder = Path(mkdtemp())
    make_byte_tokenizer(folder)
    result = load_plain_tokenizer(folder)
    assert isinstance(result, HfTokenizer)
    return result


class Scripted:
    """Generates what `says` returns, and remembers the tokens of each answer. `version` counts up with every call."""

    def __init__(self, says: Says, *, delay_s: float = 0.0) -> None:
        self.says, self.delay_s = says, delay_s
        self.answered: list[list[int]] = []
        self.most = self.under_way = 0

    async def __call__(self, request: GenerationRequest) -> Sample:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.delay_s)
            sample = request.sample.copy()
            call = len(self.answered)
            text = self.says(byte_tokenizer().decode(sample.token_ids, special=True), call)
            ids = list(text.removesuffix("\0").encode()) + ([] if text.endswith("\0") else [EOS])
            room = request.max_tokens - len(sample.response_ids)
            ids, sample.finish_reason = ids[:room], "length" if len(ids) > room else "stop"
            self.answered.append(ids)
            sample.append(ids, [-0.25 - call] * len(ids), call)
            return sample
        finally:
            self.under_way -= 1


def model_of(engine: Scripted, *, context: int = 4096, calls: ToolCallParser | None = None) -> ChatBackend:
    tokenizer = byte_tokenizer()
    return ChatBackend(engine, tokenizer, AnswerReader(tokenizer, calls), context)


def request_of(**fields: object) -> GenerationRequest:
    """The request of a trajectory: problem `p`, group `g`."""
    inputs = {"max_tokens": 400, "stop_token_ids": [EOS], "deadline_s": 30.0} | fields
    return GenerationRequest(Sample("p", "g", [1], 3), **inputs)  # type: ignore[arg-type]
