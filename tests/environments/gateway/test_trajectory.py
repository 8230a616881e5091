"""A trajectory's samples have the tokens that the engine sampled, whatever the client makes of the conversation."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest

from mtpctl.data.tokenizers import HfTokenizer
from mtpctl.environments.gateway.requests import ChatMessage, ChatRequest, RequestInvalid
from mtpctl.environments.gateway.trajectory import Answer, Trajectory
from mtpctl.errors import UserError
from tests.fakes.scripted_engine import EOS, Scripted, byte_tokenizer, model_of, request_of
from tests.fakes.trajectories import reader, sampled

ASK = {"role": "user", "content": "1+1?"}


def asked(*messages: dict[str, Any] | ChatMessage, **fields: Any) -> ChatRequest:
    plain = [each.model_dump(exclude_none=True) if isinstance(each, ChatMessage) else each for each in messages]
    return ChatRequest.model_validate({"messages": plain, **fields})


def trajectory_of(engine: Scripted, turns: int = 20, calls: Any = None, context: int = 4096, **fields: Any) -> Trajectory:
    return Trajectory(request_of(**fields), model_of(engine, calls=calls, context=context), turns)


def read(ids: Any) -> str:
    return byte_tokenizer().decode(ids, special=True)


def one(trajectory: Trajectory, *messages: Any, **fields: Any) -> Answer:
    (answer,) = asyncio.run(trajectory.answer(asked(*messages, **fields)))
    return answer


def test_conversation_continues_from_the_sampled_tokens() -> None:
    engine = Scripted(lambda text, call: f"  answer {call} ")
    trajectory = trajectory_of(engine)
    first = one(trajectory, ASK)
    assert (first.message.content, first.finish_reason) == ("  answer 0 ", "stop")
    second = one(trajectory, ASK, first.message, {"role": "user", "content": "sure?"})
    (sample,) = trajectory.end()
    assert sampled(sample) == engine.answered[0] + engine.answered[1]
    assert read(sample.token_ids) == "user: 1+1?\nassistant:   answer 0 <eos>user: sure?\nassistant:   answer 1 <eos>"
    assert read(sample.prompt_ids) == "user: 1+1?\nassistant: "
    assert [span.version for span in sample.version_spans] == [0, 1]
    assert (second.prompt_length, len(second.tokens)) == (len(sample.token_ids) - len(engine.answered[1]), len(engine.answered[1]))
    assert trajectory.num_rewritten_histories == 0 and (sample.prompt_id, sample.group_id, sample.index) == ("p", "g", 3)
    assert sample.behaviour_logprobs.tolist()[0] == -0.25 and sample.behaviour_logprobs.tolist()[-1] == -1.25


def test_equivalent_messages_are_equal() -> None:
    """Clients may send content parts instead of text, other spaces in a call's arguments, and no ids."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    engine = Scripted(lambda text, call: 'CALL add {"a": 1,  "b": 2}' if not call else "3")
    trajectory = trajectory_of(engine, calls=reader)
    first = one(trajectory, ASK, tools=tools)
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    back = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"b":2,"a":1}'}}]}
    tool = {"role": "tool", "content": "3", "tool_call_id": first.message.tool_calls[0].id}
    one(trajectory, {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}, back, tool, tools=tools)
    (sample,) = trajectory.end()
    assert sampled(sample) == engine.answered[0] + engine.answered[1] and trajectory.num_rewritten_histories == 0
    assert 'CALL add {"a": 1,  "b": 2}<eos>tool: 3\nassistant: 3<eos>' in read(sample.response_ids)


@pytest.mark.parametrize(
    "changed",
    [
        [ASK, {"role": "assistant", "content": "something else"}, ASK],
        [{"role": "user", "content": "a summary"}, {"role": "assistant", "content": "answer 0"}, ASK],
    ],
)
def test_a_changed_history_begins_a_new_sample_and_is_counted(changed: list[dict[str, Any]]) -> None:
    engine = Scripted(lambda text, call: f"answer {call}")
    trajectory = trajectory_of(engine)
    one(trajectory, ASK)
    one(trajectory, *changed)
    samples = trajectory.end()
    assert [sampled(each) for each in samples] == engine.answered and trajectory.num_rewritten_histories == 1
    assert read(samples[1].prompt_ids).endswith("user: 1+1?\nassistant: ")


def test_another_conversation_is_a_sample_and_no_rewriting() -> None:
    trajectory = trajectory_of(Scripted(lambda text, call: f"answer {call}"))
    one(trajectory, ASK)
    one(trajectory, {"role": "user", "content": "of another agent"})
    assert len(trajectory.end()) == 2 and trajectory.num_rewritten_histories == 0


def test_continuing_an_earlier_turn_keeps_its_tokens_as_the_prompt() -> None:
    engine = Scripted(lambda text, call: f"answer {call}")
    trajectory = trajectory_of(engine)
    first = one(trajectory, ASK).message
    one(trajectory, ASK, first, {"role": "user", "content": "left"})
    one(trajectory, ASK, first, {"role": "user", "content": "right"})
    left, right = trajectory.end()
    assert sampled(left) == engine.answered[0] + engine.answered[1] and sampled(right) == engine.answered[2]
    assert right.prompt_ids.tolist()[: len(left.prompt_ids)] == left.prompt_ids.tolist()
    assert read(right.prompt_ids) == "user: 1+1?\nassistant: answer 0<eos>user: right\nassistant: "
    assert trajectory.num_rewritten_histories == 0


def test_further_choices_are_separate_samples_that_can_continue() -> None:
    engine = Scripted(lambda text, call: f"answer {call}")
    trajectory = trajectory_of(engine)
    answers = asyncio.run(trajectory.answer(asked(ASK, n=3)))
    assert sorted(each.message.content or "" for each in answers) == ["answer 0", "answer 1", "answer 2"]
    one(trajectory, ASK, answers[2].message, ASK)
    samples = trajectory.end()
    assert sorted(map(len, map(sampled, samples))) == [9, 9, 18]
    assert all(read(each.prompt_ids) == "user: 1+1?\nassistant: " for each in samples)


def test_concurrent_requests_on_one_conversation_do_not_mix() -> None:
    engine = Scripted(lambda text, call: f"answer {call}", delay_s=0.02)
    trajectory = trajectory_of(engine)

    async def drive() -> None:
        (first,) = await trajectory.answer(asked(ASK))
        more = [trajectory.answer(asked(ASK, first.message, {"role": "user", "content": each})) for each in "ab"]
        await asyncio.gather(*more)

    asyncio.run(drive())
    assert engine.most == 2
    samples = trajectory.end()
    assert sorted(map(len, map(sampled, samples))) == [9, 18]
    assert sorted(chain.from_iterable(map(sampled, samples))) == sorted(chain.from_iterable(engine.answered))


def test_stop_string_is_in_the_tokens_but_not_in_the_text() -> None:
    engine = Scripted(lambda text, call: "one STOP and drafts\0" if not call else "two")
    trajectory = trajectory_of(engine)
    first = one(trajectory, ASK, stop=["STOP", "never"])
    assert (first.message.content, first.finish_reason) == ("one ", "stop")
    one(trajectory, ASK, first.message, ASK)
    (sample,) = trajectory.end()
    assert "assistant: one STOP<eos>user" in read(sample.token_ids)
    assert sampled(sample) == [*b"one STOP", *engine.answered[1]]


def test_cancelled_answer_leaves_no_tokens_and_is_not_counted() -> None:
    engine = Scripted(lambda text, call: f"answer {call}", delay_s=0.05)
    trajectory = trajectory_of(engine)

    async def drive() -> None:
        (first,) = await trajectory.answer(asked(ASK))
        following = asked(ASK, first.message, ASK)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trajectory.answer(following), 0.01)
        await trajectory.answer(following)

    asyncio.run(drive())
    (sample,) = trajectory.end()
    assert sampled(sample) == engine.answered[0] + engine.answered[1] and trajectory.answers == 2


@pytest.mark.parametrize(
    "fields, inputs, code, message",
    [
        ({"turns": 1}, {}, "budget_exceeded", "rollout.max_turns"),
        ({"max_tokens": 9}, {}, "budget_exceeded", "rollout.max_tokens"),
        ({"context": 36}, {}, "context_length_exceeded", "rollout.context"),
        ({"deadline_s": 0.05}, {}, "budget_exceeded", "rollout.deadline_s"),
        ({}, {"top_logprobs": 5}, "invalid_request", "top_logprobs"),
        ({}, {"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({}, {"response_format": {"type": "json_object"}}, "invalid_request", "response_format"),
    ],
)
def test_exhausted_budgets_and_invalid_requests_are_rejected(
    fields: dict[str, Any], inputs: dict[str, Any], code: str, message: str
) -> None:
    trajectory = trajectory_of(Scripted(lambda text, call: "answer 0", delay_s=0.03), **fields)
    first = one(trajectory, ASK).message
    with pytest.raises(RequestInvalid, match=message) as caught:
        if "deadline_s" in fields:
            asyncio.run(asyncio.sleep(0.05))
        one(trajectory, ASK, first, ASK, **inputs)
    assert caught.value.code == code
    assert len(trajectory.end()) == 1


REWRITTEN = {"role": "assistant", "content": "something else"}


@pytest.mark.parametrize(
    "fields, inputs, answer, message",
    [
        ({"max_tokens": 9}, {}, None, "rollout.max_tokens"),
        ({"context": 36}, {}, None, "rollout.context"),
        ({"context": 36}, {}, REWRITTEN, "rollout.context"),
        ({}, {"tool_choice": "required"}, None, "tool_choice"),
        ({}, {"n": 2}, None, "rollout.max_turns"),
    ],
)
def test_rejected_request_is_not_counted(
    fields: dict[str, Any], inputs: dict[str, Any], answer: dict[str, Any] | None, message: str
) -> None:
    trajectory = trajectory_of(Scripted(lambda text, call: "answer 0"), turns=2, **fields)
    first = one(trajectory, ASK).message
    for _ in range(2):
        with pytest.raises(RequestInvalid, match=message):
            one(trajectory, ASK, answer or first, ASK, **inputs)
    assert (trajectory.answers, trajectory.num_rewritten_histories) == (1, 0)
    one(trajectory, {"role": "user", "content": "2?"})
    assert trajectory.answers == len(trajectory.end()) == 2


@pytest.mark.parametrize("rejecting", ["template", "engine"])
def test_request_that_the_template_or_the_engine_rejects_is_not_counted(rejecting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> Any:
        raise UserError("not this one")

    engine = Scripted(lambda text, call: "answer")
    trajectory = trajectory_of(engine, turns=1)
    with monkeypatch.context() as patch:
        patch.setattr(*((HfTokenizer, "chat") if rejecting == "template" else (engine, "says")), reject)
        with pytest.raises(RequestInvalid, match="not this one"):
            one(trajectory, ASK, REWRITTEN, ASK)
    assert (trajectory.answers, trajectory.num_rewritten_histories) == (0, 0)
    one(trajectory, ASK, REWRITTEN, ASK)
    assert (trajectory.answers, trajectory.num_rewritten_histories) == (1, 0), "examples in the first request rewrite nothing"


def test_concurrent_requests_do_not_exceed_the_maximum_number_of_answers() -> None:
    trajectory = trajectory_of(Scripted(lambda text, call: "answer", delay_s=0.02), turns=3)

    async def drive() -> list[Any]:
        return await asyncio.gather(*(trajectory.answer(asked(ASK, n=n)) for n in (2, 2, 1)), return_exceptions=True)

    answered = asyncio.run(drive())
    assert [isinstance(each, RequestInvalid) for each in answered] == [False, True, False]
    assert trajectory.answers == len(trajectory.end()) == 3


def test_ended_trajectory_rejects_requests_and_cancels_running_ones() -> None:
    trajectory = trajectory_of(Scripted(lambda text, call: "late", delay_s=5.0))

    async def drive() -> None:
        waiting = asyncio.ensure_future(trajectory.answer(asked(ASK)))
        await asyncio.sleep(0.01)
        assert trajectory.end() == [] and trajectory.answers == 0
        with pytest.raises(RequestInvalid, match="has ended"):
            await waiting
        with pytest.raises(RequestInvalid, match="has ended"):
            await trajectory.answer(asked(ASK))

    asyncio.run(drive())


def test_truncated_answer_can_be_continued() -> None:
    engine = Scripted(lambda text, call: "a long answer")
    trajectory = trajectory_of(engine)
    first = one(trajectory, ASK, max_tokens=4)
    assert (first.message.content, first.finish_reason) == ("a lo", "length")
    one(trajectory, ASK, first.message, ASK)
    (sample,) = trajectory.end()
    assert "assistant: a lo<eos>user: 1+1?" in read(sample.token_ids) and sampled(sample).count(EOS) == 1
