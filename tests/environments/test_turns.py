"""Responses of several turns contain the environment's text, masked and in order, and are otherwise unchanged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mtpctl.data.tokenizers import load_tokenizer, make_byte_tokenizer
from mtpctl.environments.built_in import Calculator
from mtpctl.environments.environment import EnvironmentClass
from mtpctl.environments.turns import TurnSessions, count_turns, find_last_turn_start
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import ABORTED, DEADLINE, EngineDead
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample, Speculation, VersionSpan
from tests.fakes.chat import NO_CHAT
from tests.fakes.engine_checkpoints import Tensors, cycle_tensors, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.replica import FakeReplica

EOS = 258


class Bytes:
    """Text as its bytes; ids above are left out."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode()


def sample_of(text: str, reason: str = "stop") -> Sample:
    sample = Sample("p", "g", [1])
    sample.append(list(text.encode()), [-0.5] * len(text), 3)
    sample.finish_reason = reason
    return sample


def append_reply(sample: Sample, limit: int = 4, kind: type = Calculator, max_tokens: int = 500) -> bool:
    """One turn of the sample's environment."""

    async def drive() -> bool:
        sessions = TurnSessions(EnvironmentClass("tests:it", kind, {}), Bytes(), limit, NO_CHAT)
        session = sessions.new_session(GenerationRequest(sample, max_tokens))
        try:
            assert await session.open(sample)
            return await session.append_reply(sample)
        finally:
            session.close()
            await sessions.close()

    return asyncio.run(drive())


def test_an_answer_is_appended_masked_and_under_the_version_of_its_turn() -> None:
    sample = sample_of("a <calc>6*7</calc>")
    assert append_reply(sample)
    answer = len("<result>42</result>")
    assert Bytes().decode(sample.response_ids) == "a <calc>6*7</calc><result>42</result>"
    assert sample.loss_mask.tolist() == [1] * 18 + [0] * answer
    assert sample.behaviour_logprobs.tolist() == [-0.5] * 18 + [0.0] * answer
    assert sample.version_spans == [VersionSpan(0, 18 + answer, 3)]
    assert (find_last_turn_start(sample), count_turns(sample)) == (18 + answer, 1)


def test_text_after_the_call_is_dropped() -> None:
    sample = sample_of("<calc>1</calc>xyz")
    assert append_reply(sample)
    assert Bytes().decode(sample.response_ids) == "<calc>1</calc><result>1</result>"
    assert len(sample.loss_mask) == len(sample.behaviour_logprobs) == len(sample.response_ids)


def test_a_turn_without_a_call_ends_the_response() -> None:
    sample = sample_of("the answer is 42")
    assert not append_reply(sample)
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize(("limit", "ends"), [(38, False), (37, True), (20, True), (18, True)])
def test_reply_beyond_max_tokens_is_truncated_and_ends_the_response(limit: int, ends: bool) -> None:
    """18 tokens of the model and 19 of the reply: with exactly 37 there is no room for another turn either."""
    sample = sample_of("a <calc>6*7</calc>")
    assert append_reply(sample, max_tokens=limit) is not ends
    whole = "a <calc>6*7</calc><result>42</result>"
    assert Bytes().decode(sample.response_ids) == whole[:limit]
    assert sample.finish_reason == ("length" if ends else None)
    assert sample.version_spans == [VersionSpan(0, min(limit, len(whole)), 3)]


@pytest.mark.parametrize("said", [None, ""])
def test_empty_reply_ends_the_response(said: str | None) -> None:
    class Silent(Calculator):
        async def reply(self, turn: str) -> str | None:  # type: ignore[override]
            return said

    sample = asyncio.run(play(Scripted(["<calc>1</calc>"]), Silent, seconds=5))
    assert (Bytes().decode(sample.response_ids), sample.finish_reason) == ("<calc>1</calc>", "stop")


def test_response_ends_after_max_turns() -> None:
    sample = sample_of("<calc>1</calc>")
    assert append_reply(sample, 2)
    sample.append(list(b"<calc>2</calc>"), [-1.0] * 14, 3)
    assert count_turns(sample) == 2
    assert not append_reply(sample, 2)


class Scripted(FakeReplica):
    """Answers with its lines, one turn per call, selected by the number of turns in the response. Dies, aborts or is slow as configured."""

    def __init__(self, lines: list[str], faults: dict[int, str] | None = None) -> None:
        super().__init__()
        self.lines, self.faults, self.calls = lines, faults or {}, 0

    async def generate(self, request: GenerationRequest) -> Sample:
        fault, self.calls = self.faults.get(self.calls), self.calls + 1
        if fault == "dies":
            raise EngineDead("killed")
        sample = request.sample
        said = Bytes().decode([token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask])
        due = "".join(self.lines)[len(said) :]
        line = next(line for place, line in enumerate(self.lines) if len("".join(self.lines[: place + 1])) > len(said))
        line = line if due.startswith(line) else due[: len("".join(self.lines[: self.lines.index(line) + 1])) - len(said)]
        if fault == ABORTED:
            line = line[:3]
        assert request.stop == ["</calc>"]
        sample.append(list(line.encode()), [-1.0] * len(line), 0)
        sample.finish_reason = fault or "stop"
        return sample


LINES = ["<calc>2*3</calc>", "then <calc>6+1</calc>", "#7"]
WHOLE = "<calc>2*3</calc><result>6</result>then <calc>6+1</calc><result>7</result>#7"


async def play(replica: Any, kind: type, seconds: float = 60.0) -> Sample:
    async def start(index: int) -> Any:
        return replica

    pool = await ReplicaPool.start(
        start, 1, max_in_flight=4, turn_runner=TurnSessions(EnvironmentClass("tests:it", kind, {}), Bytes(), 8, NO_CHAT)
    )

    async def one() -> AsyncIterator[GenerationRequest]:
        yield GenerationRequest(Sample("p", "g", [1]), 500, deadline_s=seconds)

    try:
        return await anext(pool.generate(one()))
    finally:
        await pool.close()


@pytest.mark.parametrize("faults", [{}, {1: "dies"}, {0: ABORTED, 2: ABORTED}, {0: ABORTED, 1: "dies", 3: ABORTED}])
def test_turns_continue_after_aborts_and_lost_replicas(faults: dict[int, str]) -> None:
    sample = asyncio.run(play(Scripted(LINES, faults), Calculator))
    assert Bytes().decode(sample.response_ids) == WHOLE
    assert sample.finish_reason == "stop"
    said = bytes(token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask).decode()
    assert said == "".join(LINES)
    assert [logprob for logprob, mask in zip(sample.behaviour_logprobs, sample.loss_mask, strict=True) if not mask] == [0.0] * (
        len(WHOLE) - len(said)
    )


def test_an_answer_that_takes_too_long_ends_the_response() -> None:
    class Slow(Calculator):
        def reply(self, turn: str) -> str:  # type: ignore[override]
            time.sleep(0.3)
            return "<result>6</result>"

    sample = asyncio.run(play(Scripted(LINES), Slow, seconds=0.1))
    assert sample.finish_reason == DEADLINE
    assert sample.environment is not None and (sample.environment.timeouts, sample.environment.errors) == (1, 0)
    assert Bytes().decode(sample.response_ids) == LINES[0]


def chain_tensors(config: dict[str, Any], follows: dict[int, int]) -> Tensors:
    """A model that generates `follows[token]` after `token`, and drafts it."""
    tensors = cycle_tensors(config, 0, 0)
    embedding = tensors["model.embed_tokens.weight"]
    head = torch.zeros_like(embedding)
    for before, after in follows.items():
        head[after] += 2 * embedding[before]
    tensors["lm_head.weight"] = head
    return tensors


class Teller(NamedTuple):
    """A real engine, and the folder of its model."""

    engine: VllmEngine
    folder: Path


@pytest.fixture(scope="module")
def teller(start_engine: Callable[[VllmSettings], VllmEngine], tmp_path_factory: pytest.TempPathFactory) -> Teller:
    """Says `1+2=` after `?`, `#9` and the end after a new line, and the alphabet after a letter.

    Behind `=` it would go on with `~~~…`: drafts of it are accepted in the step that writes `=`.
    """
    config = tiny_config(hidden_size=320, num_attention_heads=10, num_key_value_heads=2, vocab_size=320, num_hidden_layers=1)
    follows = dict(pairwise(b"?1+2=~~")) | dict(zip([*b"\n#9"], [*b"#9", EOS], strict=True)) | dict(pairwise(b"abcdefghija"))
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), config, chain_tensors(config, follows))
    make_byte_tokenizer(folder)
    return Teller(start_engine(cpu_settings(folder, k=2, stop=["="])), folder)


def test_real_engine_stops_at_the_stop_string_and_continues_after_the_reply(teller: Teller, run: Loop) -> None:
    environment = EnvironmentClass("tests:it", Calculator, {"opening": "", "closing": "=", "answer": "{}\n"})

    async def drive() -> Sample:
        async def start(index: int) -> Any:
            return teller.engine

        sessions = TurnSessions(environment, load_tokenizer(teller.folder), 8, NO_CHAT)
        pool = await ReplicaPool.start(start, 1, max_in_flight=4, turn_runner=sessions)
        return await pool.sample(GenerationRequest(Sample("p", "g", [*b"Q?"]), 64, stop_token_ids=[EOS]))

    sample = run(drive())
    assert sample.response_ids.tolist() == [*b"1+2=3\n#9", EOS]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1]
    assert sample.finish_reason == "stop"
    assert max(abs(logprob) for logprob in sample.behaviour_logprobs) < 1e-4
    # In each turn one step, of which both drafts are taken: behind the first token `+2` and then `=`, and `9` and the end.
    assert sample.speculation == Speculation(drafted=4, accepted=4, accepted_by_position=[2, 2], steps=2)


@pytest.mark.parametrize(("stop", "taken"), [("c", 1), ("d", 2), ("e", 2), ("f", 3)])
def test_drafts_behind_a_stop_string_are_not_counted(teller: Teller, run: Loop, stop: str, taken: int) -> None:
    """`b` is the last token of the prompt; a step accepts two drafts and samples another token."""
    sample = run(teller.engine.generate(GenerationRequest(Sample("p", "g", [*b"Qa"]), 40, stop=[stop])))
    assert bytes(sample.response_ids.tolist()).endswith(stop.encode())
    assert (sample.speculation.drafted, sample.speculation.accepted) == (taken, taken)


def test_stop_string_across_two_chunks_ends_the_response(teller: Teller, run: Loop) -> None:
    def append_reply(said: bytes, answered: bytes = b"", max_tokens: int = 40) -> Sample:
        sample = Sample("p", "g", [*b"Qa"])
        sample.append([*said], [-0.5] * len(said), 0)
        sample.append([*answered], [0.0] * len(answered), 0, trained=False)
        return run(teller.engine.generate(GenerationRequest(sample, max_tokens, stop=["def", "zz"])))

    for said in (b"", b"bc", b"bcd", b"bcde"):
        whole = append_reply(said)
        assert (bytes(whole.response_ids.tolist()), whole.finish_reason) == (b"bcdef", "stop")
        assert len(whole.behaviour_logprobs) == len(whole.loss_mask) == whole.version_spans[-1].end == 5
    late = append_reply(b"bcde", max_tokens=6)
    assert (bytes(late.response_ids.tolist()), late.finish_reason) == (b"bcdef", "stop")
    # What an environment says is no part of it.
    other = append_reply(b"bc", b"de", max_tokens=8)
    assert (bytes(other.response_ids.tolist()), other.finish_reason) == (b"bcdefghi", "length")
