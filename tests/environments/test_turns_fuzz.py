"""Random responses of several turns under ten chat templates: each token is one that the engine sampled or that the environment said.

The engine is the real one of `mtpctl.rollout.engine` around a made-up core, which samples at random: any tokens, stop strings in whatever
tokens spell them, end tokens. It speculates, so that a step may yield tokens behind a stop string; it is paused and aborted in the middle
of turns, gets new weight versions, and dies. Core and environments note what they did, and each response is compared with the notes.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mtpctl.data.tokenizers import HfTokenizer
from mtpctl.environments.environment import EnvironmentClass
from mtpctl.environments.turns import ChatReplies, TurnSessions
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.samples import GenerationRequest, Sample, logprobs_of
from tests.fakes.chat_families import FAMILIES, Family, tokenizer_of
from tests.fakes.fuzzed_turns import STOP, TOOL, Chunk, Note, Sampler

MAX_TOKENS = 250


class Talker:
    """An environment with random replies: text or chat messages, after a stop string or an end token, and sometimes none."""

    def __init__(self, problem: Any, family: Family, seed: int) -> None:
        self.note: Note = problem
        self.family, self.random = family, random.Random(f"{seed}/{problem.number}/says")

    @property
    def stop(self) -> list[str]:
        return [STOP] if self.note.stops else []

    async def reply(self, turn: str) -> object:
        await asyncio.sleep(0)
        self.note.turns.append(turn)
        if self.random.random() < 0.1:
            return None
        if self.random.random() < 0.3:
            self.note.said.append(("text", text := self._content()))
            return text
        messages = [{"role": role, "content": self._content()} for role in self.random.choice(self.family.replies)]
        self.note.said.append(("messages", messages))
        return messages

    def _content(self) -> str:
        parts = ["see", "12", " ", "\n", "é", "☃", "the tool", "<think>", "</think>", STOP, "calls", "</", "a", "<tool_call>", "🂡"]
        return "=" + "".join(self.random.choice(parts) for _ in range(self.random.randint(0, 6))) + "."

    def close(self) -> None:
        self.note.closed += 1


def check(sample: Sample, note: Note, family: Family, tokenizer: HfTokenizer, ends: list[int]) -> None:
    """Compare a response, token by token, with what its engines and its environment noted."""
    ids, mask, logprobs = sample.response_ids.tolist(), sample.loss_mask, sample.behaviour_logprobs
    assert len(ids) == len(mask) == len(logprobs)
    assert len(ids) <= MAX_TOKENS, "turns and replies together"
    assert sample.version_spans[0].start == 0 and sample.version_spans[-1].end == len(ids)
    assert all(one.end == two.start for one, two in zip(sample.version_spans, sample.version_spans[1:], strict=False))
    versions = [span.version for span in sample.version_spans for _ in range(span.start, span.end)]

    # What the engine sampled: each kept chunk stands where it was sampled, behind exactly what the engine was given.
    whole = sample.token_ids.tolist()
    place, replies = 0, iter(note.said)
    turn_began, observed = 0, list(note.turns)
    chunks = [chunk for chunk in note.chunks if whole[: len(chunk.before)] == chunk.before and len(chunk.before) >= len(sample.prompt_ids)]
    by_start: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_start[len(chunk.before) - len(sample.prompt_ids)].append(chunk)
    while place < len(ids):
        if mask[place]:
            run = next(chunk for chunk in reversed(by_start[place]) if chunk.tokens and logprobs_of(chunk.logprobs)[0] == logprobs[place])
            retained = next((n for n in range(len(run.tokens)) if place + n == len(ids) or not mask[place + n]), len(run.tokens))
            assert ids[place : place + retained] == run.tokens[:retained]
            assert logprobs[place : place + retained] == logprobs_of(run.logprobs[:retained])
            assert versions[place : place + retained] == run.versions[:retained]
            place += retained
            if retained < len(run.tokens):
                said = tokenizer.decode(ids[turn_began:place])
                assert note.stops and STOP in said and STOP not in tokenizer.decode(ids[turn_began : place - 1])
            continue
        # What the environment said, tokenised by itself; its log-probs are 0, and its version is that of the turn before it.
        turn = ids[turn_began:place]
        assert observed.pop(0) == tokenizer.decode(turn)
        kind, said = next(replies)
        if kind == "text":
            expected = tokenizer.encode(str(said))
        else:
            text = family.behind(said)  # type: ignore[arg-type]
            last = tokenizer.inner.convert_ids_to_tokens(turn[-1]) if turn[-1] in ends else None
            expected = tokenizer.encode(text.removeprefix(last) if last else text)
        expected = expected[: MAX_TOKENS - place]
        assert ids[place : place + len(expected)] == expected
        assert not any(mask[place : place + len(expected)])
        assert logprobs[place : place + len(expected)].tolist() == [0.0] * len(expected)
        assert set(versions[place : place + len(expected)]) == {versions[place - 1]}
        place += len(expected)
        turn_began = place
    assert next(replies, None) is None or len(ids) == MAX_TOKENS, "nothing that it said is missing"
    assert len(observed) <= 1, "the last turn alone may be without a reply"
    assert sample.environment is not None and sample.environment.turns == len(note.said)
    assert (sample.environment.errors, sample.environment.timeouts) == (0, 0), sample.environment.failure
    assert note.closed == 1


async def play(family: Family, count: int, seed: int) -> tuple[list[Sample], dict[str, Note], HfTokenizer, list[int]]:
    tokenizer = tokenizer_of(family)
    ends = [tokenizer.inner.convert_tokens_to_ids(token) for token in family.ends]
    notes = {f"p{number}": Note(number, number % 3 > 0) for number in range(count)}
    live, replicas = [0], []

    async def start(index: int) -> Any:
        replicas.append(Sampler(tokenizer, ends, notes, seed + len(replicas), live))
        return replicas[-1]

    environment = EnvironmentClass("tests:Talker", Talker, {"family": family, "seed": seed})
    turns = TurnSessions(environment, tokenizer, 6, ChatReplies(tokenizer))
    pool = await ReplicaPool.start(start, 2, max_in_flight=32, max_restarts=1000, turn_runner=turns)
    prompt = tokenizer.chat([{"role": "user", "content": "Look it up."}], [TOOL] if family.name != "chatml" else [])

    async def requests() -> AsyncIterator[GenerationRequest]:
        for prompt_id, note in notes.items():
            yield GenerationRequest(Sample(prompt_id, prompt_id, prompt), MAX_TOKENS, stop_token_ids=ends, problem=note)

    async def syncs() -> None:
        """New versions, while responses and replies are under way."""
        chance = random.Random(seed)
        while True:
            for _ in range(chance.randint(5, 30)):
                await asyncio.sleep(0)
            mode = chance.choice(["abort", "keep"])
            await pool._replicas.call_each(lambda replica, mode=mode: replica.pause(mode))
            await asyncio.sleep(0)
            live[0] += 1
            await pool._replicas.call_each(lambda replica: replica.resume())  # type: ignore[attr-defined]

    syncing = asyncio.create_task(syncs())
    try:
        samples = [sample async for sample in pool.generate(requests())]
    finally:
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)
        for replica in replicas:
            replica.shutdown = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        await pool.close()
    return samples, notes, tokenizer, ends


def run(family: Family, count: int, seed: int) -> None:
    samples, notes, tokenizer, ends = asyncio.run(play(family, count, seed))
    assert sorted(sample.prompt_id for sample in samples) == sorted(notes)
    for sample in samples:
        check(sample, notes[sample.prompt_id], family, tokenizer, ends)
    # The trajectories were what they are to be: of several turns, over several versions, cut behind stop strings.
    assert sum(len(note.said) for note in notes.values()) > count
    assert sum(len(sample.version_spans) > 1 for sample in samples) > count / 4
    behind = sum(sum(len(chunk.tokens) for chunk in notes[sample.prompt_id].chunks) > sum(sample.loss_mask) for sample in samples)
    assert behind > count / 10


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_token_is_the_engines_or_the_environments(family: Family) -> None:
    run(family, 100, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_token_is_the_engines_or_the_environments_in_a_thousand_trajectories(family: Family) -> None:
    run(family, 1000, seed=2)
