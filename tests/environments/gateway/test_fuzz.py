"""Random agents under ten chat templates: each token of their samples is one that the engine sampled, or that the agent said.

The engine is that of `tests.environments.test_turns_fuzz`. It samples any tokens, speculates,
is paused and aborted, gets new versions and dies.
The agents go on with conversations, go back to earlier answers, ask for several choices, rewrite history, read streams and hang up.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from typing import Any

import httpx
import pytest

from mtpctl.data.tokenizers import HfTokenizer
from mtpctl.environments.gateway.server import AnswerReader, Gateway
from mtpctl.environments.gateway.trajectory import ChatBackend
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.samples import GenerationRequest, Sample, logprobs_of
from mtpctl.web.server import listen
from tests.fakes.chat_families import FAMILIES, Family, tokenizer_of
from tests.fakes.fuzzed_agents import Agent, Work, calls
from tests.fakes.fuzzed_turns import TOOL, Chunk, Sampler

MAX_TOKENS = 250


class Origin:
    """Explains each token of a trajectory's samples by what was sampled, rendered, or sent by the agent."""

    def __init__(self, work: Work, family: Family, tokenizer: HfTokenizer, ends: list[int]) -> None:
        tools = [TOOL] if work.tools else []
        self.rendered = {tuple(tokenizer.chat([_plain(message) for message in messages], tools)) for messages in work.conversations}
        self.ends = set(ends)
        texts = [family.behind([_plain(message) for message in new]) for new in work.behind if new]
        self.behind = {tuple(tokenizer.encode(text)) for text in texts}
        self.chunks: dict[int, list[Chunk]] = defaultdict(list)
        for chunk in work.chunks:
            self.chunks[len(chunk.before)].append(chunk)

    def explains(self, sample: Sample) -> bool:
        whole = sample.token_ids.tolist()
        versions = [span.version for span in sample.version_spans for _ in range(span.start, span.end)]
        return any(
            self._behind(sample, whole, versions, len(prompt))
            for prompt in self.rendered
            if len(prompt) <= len(sample.prompt_ids) and tuple(whole[: len(prompt)]) == prompt
        )

    def _behind(self, sample: Sample, whole: list[int], versions: list[int], place: int) -> bool:
        """Whether the tokens from `place` on are sampled pieces and messages of that position."""
        if place == len(whole):
            return True
        own = place - len(sample.prompt_ids)
        if own < 0 or not sample.loss_mask[own]:
            for written in self.behind:
                # An end token that the model wrote itself is not written again.
                said = written[1:] if whole[place - 1] in self.ends and whole[place - 1] == written[0] else written
                if tuple(whole[place : place + len(said)]) != said:
                    continue
                if own >= 0 and not self._said(sample, versions, own, len(said)):
                    continue
                if own < 0 < own + len(said):
                    continue
                if self._behind(sample, whole, versions, place + len(said)):
                    return True
        if own < 0 or sample.loss_mask[own]:
            for chunk in reversed(self.chunks[place]):
                if chunk.before != whole[:place]:
                    continue
                for retained in range(len(chunk.tokens), 0, -1):
                    if whole[place : place + retained] != chunk.tokens[:retained] or (own < 0 < own + retained):
                        continue
                    if own >= 0 and not self._sampled(sample, versions, own, chunk, retained):
                        continue
                    if self._behind(sample, whole, versions, place + retained):
                        return True
        return False

    @staticmethod
    def _said(sample: Sample, versions: list[int], own: int, count: int) -> bool:
        """Masked, without log-probs, and of the version of the turn before."""
        here = slice(own, own + count)
        return (
            own > 0
            and not any(sample.loss_mask[here])
            and sample.behaviour_logprobs[here].tolist() == [0.0] * count
            and set(versions[here]) == {versions[own - 1]}
        )

    @staticmethod
    def _sampled(sample: Sample, versions: list[int], own: int, chunk: Chunk, retained: int) -> bool:
        here = slice(own, own + retained)
        return (
            all(sample.loss_mask[here])
            and sample.behaviour_logprobs[here] == logprobs_of(chunk.logprobs[:retained])
            and versions[here] == chunk.versions[:retained]
        )


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the template gets it."""
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content or ())
    result: dict[str, Any] = {"role": message["role"], "content": text}
    if message.get("tool_calls"):
        result["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": "look", "arguments": _parsed(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return result


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


async def play(family: Family, count: int, seed: int) -> tuple[dict[str, Work], dict[str, list[Sample]], HfTokenizer, list[int], int]:
    tokenizer = tokenizer_of(family)
    ends = [tokenizer.inner.convert_tokens_to_ids(token) for token in family.ends]
    works = {f"p{number}": Work(number, False, tools=family.name != "chatml" and number % 2 > 0) for number in range(count)}
    live: list[int] = [0]
    replicas: list[Sampler] = []

    async def start(index: int) -> Any:
        replicas.append(Sampler(tokenizer, ends, works, seed + len(replicas), live))  # type: ignore[arg-type]
        return replicas[-1]

    pool = await ReplicaPool.start(start, 2, max_in_flight=32, max_restarts=1000)
    model = ChatBackend(pool.sample, tokenizer, AnswerReader(tokenizer, calls), 100_000)
    samples: dict[str, list[Sample]] = {}
    rewritten = 0
    room = asyncio.Semaphore(16)

    async def syncs() -> None:
        """New versions, while answers are under way."""
        chance = random.Random(seed)
        while True:
            for _ in range(chance.randint(50, 400)):
                await asyncio.sleep(0)
            mode = chance.choice(["abort", "keep"])
            await pool._replicas.call_each(lambda replica, mode=mode: replica.pause(mode))
            await asyncio.sleep(0)
            live[0] += 1
            await pool._replicas.call_each(lambda replica: replica.resume())  # type: ignore[attr-defined]

    async with Gateway(model, tokenizer, "toy", 6, listen("127.0.0.1", 0)) as gateway:
        transport = httpx.ASGITransport(app=gateway.app)  # type: ignore[arg-type]

        async def one(prompt_id: str, work: Work) -> None:
            nonlocal rewritten
            async with room, httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                secret, trajectory = gateway.open(GenerationRequest(Sample(prompt_id, prompt_id, []), MAX_TOKENS, stop_token_ids=ends))
                await Agent(client, f"/t/{secret}/v1", work, family, seed).run()
                samples[prompt_id] = gateway.close(secret)
                rewritten += trajectory.num_rewritten_histories

        syncing = asyncio.create_task(syncs())
        try:
            await asyncio.gather(*(one(prompt_id, work) for prompt_id, work in works.items()))
        finally:
            syncing.cancel()
            await asyncio.gather(syncing, return_exceptions=True)
            for replica in replicas:
                replica.shutdown = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
            await pool.close()
    return works, samples, tokenizer, ends, rewritten


def run(family: Family, count: int, seed: int) -> None:
    works, samples, tokenizer, ends, rewritten = asyncio.run(play(family, count, seed))
    turns = 0
    for prompt_id, work in works.items():
        origin = Origin(work, family, tokenizer, ends)
        for sample in samples[prompt_id]:
            assert len(sample.response_ids) == len(sample.loss_mask) == len(sample.behaviour_logprobs)
            assert len(sample.response_ids) <= MAX_TOKENS, "the agent's messages included"
            assert sample.version_spans[-1].end == len(sample.response_ids) and any(sample.loss_mask)
            assert origin.explains(sample), f"{prompt_id}: {sample}"
            turns += 1 + sum(not two and one for one, two in zip(sample.loss_mask, sample.loss_mask[1:], strict=False))
    # The trajectories were what they are to be: of several samples and turns, rewritten, streamed, given up, over several versions.
    every = [sample for each in samples.values() for sample in each]
    assert len(every) > 1.5 * count and turns > 1.2 * len(every)
    assert rewritten > count / 10
    assert sum(len(sample.version_spans) > 1 for sample in every) > count / 10
    for name in ("streamed", "hung up"):
        assert sum(work.counts[name] for work in works.values()) > count / 20, name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_token_is_the_engines_or_the_agents(family: Family) -> None:
    run(family, 60, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_token_is_the_engines_or_the_agents_in_a_thousand_trajectories(family: Family) -> None:
    run(family, 1000, seed=2)
