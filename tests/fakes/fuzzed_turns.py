"""An engine and an environment that make responses of several turns at random, and record what each contributed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from mtpctl.data.tokenizers import HfTokenizer
from mtpctl.rollout.engine import GenerationChunk
from mtpctl.rollout.protocol import ABORTED, EngineDead
from mtpctl.samples import GenerationRequest, Speculation
from mtpctl.sync.protocol import PauseMode
from tests.rollout.test_engine import Core, Made

STOP = "</call>"


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}


@dataclass
class Chunk:
    """What the core sampled in one call: behind which tokens, and each token's log-prob and version."""

    before: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass
class Note:
    """One response: its problem, its sampled tokens, and the turns that its environment saw, with the tokens of the replies."""

    number: int
    stops: bool
    chunks: list[Chunk] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    said: list[tuple[str, object]] = field(default_factory=list)
    closed: int = 0


class Sampler(Made):
    """A real `Engine` that samples at random, a few tokens per step, and fails occasionally."""

    def __init__(self, tokenizer: HfTokenizer, ends: list[int], notes: dict[str, Note], seed: int, live: list[int]) -> None:
        super().__init__(Core())
        self._context, self._slots = 100_000, 64
        self.tokenizer, self.ends, self.notes, self.live = tokenizer, ends, notes, live
        self.random = random.Random(seed)
        self.aborted: set[str] = set()
        self.running = asyncio.Event()
        self.running.set()
        self.answered, self.killed = 0, False
        plain = len(tokenizer.encode("")) + 256
        self.words = [
            *range(plain),
            *tokenizer.encode("the model calls a tool <think> </think> 123 answer"),
            *tokenizer.inner.all_special_ids,
        ]
        self.spelled = [tokenizer.encode(STOP), [each for byte in STOP for each in tokenizer.encode(byte)]]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.running.clear()
        if mode == "abort":
            await self._abort(list(self._in_flight))

    async def resume(self) -> None:
        self.running.set()

    async def _abort(self, request_ids: list[str]) -> None:
        self.aborted |= set(request_ids)

    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> GenerationChunk:
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        planned: list[int] = []
        drafted = 0
        end = ABORTED
        while True:
            await asyncio.sleep(0)
            if self.killed:
                raise EngineDead("the fake was killed")
            if request_id in self.aborted:
                break
            if not self.running.is_set():
                continue
            self.answered += 1
            self.killed = self.answered % 997 == 0
            for _ in range(self.random.randint(1, 4)):  # a token, and drafts that were accepted
                if not planned and self.random.random() < 0.12:
                    planned = [*self.random.choice(self.spelled)]
                token = planned.pop(0) if planned else self.random.choice(self.words)
                if self.random.random() < 0.03:
                    token = self.random.choice(self.ends)
                tokens.append(token)
                logprobs.append(-self.random.random())
                versions.append(self.live[0])
                drafted += 1
                if token in request.stop_token_ids or len(tokens) == room:
                    break
            if tokens[-1] in request.stop_token_ids or any(stop in self._decode(tokens) for stop in request.stop):
                end = "stop"
                break
            if len(tokens) == room:
                end = "length"
                break
        spans = [(place, place + 1, version) for place, version in enumerate(versions)]
        self.notes[request.sample.prompt_id].chunks.append(Chunk(list(prompt), list(tokens), list(logprobs), versions))
        # An abort may catch the engine between the tokens and their log-probs.
        spare = [-9.0] * (end == ABORTED and self.random.random() < 0.3)
        return GenerationChunk(tokens, [*logprobs, *spare], spans, end, Speculation(drafted, drafted, [drafted], drafted))
