"""The endpoint through the ordinary OpenAI client: answers, tools, streams, rewards and rejected requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from mtpctl.environments.gateway.server import Gateway
from mtpctl.environments.gateway.trajectory import Trajectory
from mtpctl.web.server import listen
from tests.fakes.scripted_engine import Scripted, byte_tokenizer, model_of, request_of
from tests.fakes.trajectories import reader, sampled

ASK: Any = [{"role": "user", "content": "1+1?"}]
JSON = {"content-type": "application/json"}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@asynccontextmanager
async def gateway_of(engine: Scripted, *, key: str | None = None, calls: Any = None) -> AsyncIterator[Gateway]:
    async with Gateway(model_of(engine, calls=calls), byte_tokenizer(), "toy", 50, listen("127.0.0.1", 0), key=key) as gateway:
        yield gateway


def served(engine: Scripted, drive: Callable[[openai.AsyncOpenAI, Trajectory, str], Coroutine[Any, Any, None]], **options: Any) -> Any:
    """The samples of one trajectory after `drive` has talked to it."""

    async def run() -> Any:
        async with gateway_of(engine, **options) as gateway:
            secret, trajectory = gateway.open(request_of())
            client = openai.AsyncOpenAI(base_url=gateway.base_url(secret), api_key="none", max_retries=0)
            async with client:
                await drive(client, trajectory, gateway.base_url(secret))
            return gateway.close(secret)

    return asyncio.run(run())


def test_a_conversation_with_a_tool() -> None:
    engine = Scripted(lambda text, call: 'I add. CALL add {"a": 1}' if not call else "2")

    async def drive(client: openai.AsyncOpenAI, trajectory: Trajectory, url: str) -> None:
        first = (await client.chat.completions.create(model="any", messages=ASK, tools=TOOLS)).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "I add. "
        (call,) = first.message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        tool_message = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        back = first.message.model_dump(exclude_none=True)
        result = await client.chat.completions.create(model="any", messages=[*ASK, back, tool_message], tools=TOOLS, logprobs=True)  # type: ignore[list-item]
        assert result.choices[0].message.content == "2" and result.usage is not None
        assert result.usage.completion_tokens == 2
        rows = result.choices[0].logprobs.content  # type: ignore[union-attr]
        assert [(row.token, row.logprob) for row in rows or ()] == [("2", -1.25), ("<eos>", -1.25)]
        assert (await client.models.list()).data[0].id == "toy"

    (sample,) = served(engine, drive, calls=reader)
    assert sampled(sample) == engine.answered[0] + engine.answered[1]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_the_whole_answer_in_parts(n: int) -> None:
    engine = Scripted(lambda text, call: f"answer {call}" if "tool" not in text else 'so CALL add {"a": 2}')

    async def drive(client: openai.AsyncOpenAI, trajectory: Trajectory, url: str) -> None:
        texts, reasons, usage = [""] * n, [""] * n, None
        stream = await client.chat.completions.create(
            model="any", messages=ASK, n=n, stream=True, stream_options={"include_usage": True}, tools=TOOLS
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert sorted(texts) == [f"answer {i}" for i in range(n)] and reasons == ["stop"] * n
        assert usage is not None and usage.completion_tokens == 9 * n

    assert len(served(engine, drive, calls=reader)) == n


def test_reward_is_accepted_by_call_or_by_header() -> None:
    async def drive(client: openai.AsyncOpenAI, trajectory: Trajectory, url: str) -> None:
        async with httpx.AsyncClient() as web:
            assert (await web.post(f"{url}/reward", json={"reward": 0.25})).json() == {"reward": 0.25}
            assert trajectory.reward == 0.25
            await client.chat.completions.create(model="any", messages=ASK, extra_headers={"mtpctl-reward": "0.75"})
            assert trajectory.reward == 0.75
            for bad in ({"reward": "much"}, {"reward": None}, {}, {"reward": 1e999}):
                result = await web.post(f"{url}/reward", content=json.dumps(bad), headers=JSON)
                assert result.status_code == 400 and "reward" in result.json()["error"]["message"]

    served(Scripted(lambda text, call: "yes"), drive)


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"content": "x"}]}', "messages.0.role"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n:"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', "max_tokens"),
        (b'{"a":' * 5000, "body"),
    ],
)
def test_invalid_bodies_are_rejected_without_a_sample(body: bytes, message: str) -> None:
    async def drive(client: openai.AsyncOpenAI, trajectory: Trajectory, url: str) -> None:
        async with httpx.AsyncClient() as web:
            result = await web.post(f"{url}/chat/completions", content=body, headers=JSON)
        assert result.status_code == 400 and message in result.json()["error"]["message"]
        assert result.json()["error"]["code"] == "invalid_request"

    assert served(Scripted(lambda text, call: "yes"), drive) == []


def test_unknown_trajectory_is_410_and_problems_need_the_key() -> None:
    async def run() -> None:
        async with gateway_of(Scripted(lambda text, call: "yes"), key="s3cret") as gateway, httpx.AsyncClient() as web:
            result = await web.post(f"{gateway.address}/t/none/v1/chat/completions", json={"messages": ASK})
            assert (result.status_code, result.json()["error"]["code"]) == (410, "trajectory_ended")
            assert (await web.post(f"{gateway.address}/v1/trajectories")).status_code == 401
            result = await web.post(f"{gateway.address}/v1/trajectories", headers={"authorization": "Bearer s3cret"})
            assert result.status_code == 400 and "rollout.gateway" in result.json()["error"]["message"]
            assert (await web.get(f"{gateway.address}/health")).json() == {"status": "ok", "trajectories": 0}

    asyncio.run(run())


def test_disconnected_client_cancels_its_answer() -> None:
    engine = Scripted(lambda text, call: "late", delay_s=5.0)

    async def drive(client: openai.AsyncOpenAI, trajectory: Trajectory, url: str) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="any", messages=ASK, timeout=0.2)
        for _ in range(100):
            if not engine.under_way:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the engine continues after the client has left")

    assert served(engine, drive) == []


def test_single_requests_belong_to_no_trajectory() -> None:
    async def run() -> None:
        async with gateway_of(Scripted(lambda text, call: "yes")) as gateway, httpx.AsyncClient() as web:
            url = f"{gateway.address}/v1/chat/completions"
            refused = await web.post(url, json={"messages": ASK})
            assert refused.status_code == 400 and "/v1/trajectories" in refused.json()["error"]["message"]
            gateway.create_single_request = request_of
            async with openai.AsyncOpenAI(base_url=f"{gateway.address}/v1", api_key="none") as client:
                answer = await client.chat.completions.create(model="any", messages=ASK, n=2)
                assert [choice.message.content for choice in answer.choices] == ["yes", "yes"]
                assert (await client.models.list()).data[0].id == "toy"
            assert (await web.get(f"{gateway.address}/health")).json() == {"status": "ok", "trajectories": 0}

    asyncio.run(run())


def test_unknown_paths_return_openai_errors() -> None:
    async def run() -> None:
        async with gateway_of(Scripted(lambda text, call: "yes")) as gateway, httpx.AsyncClient() as web:
            for result in (await web.get(f"{gateway.address}/v1/embeddings"), await web.get(f"{gateway.address}/v1/trajectories")):
                assert result.status_code in (404, 405) and result.json()["error"]["type"] == "invalid_request_error"

    asyncio.run(run())


def test_lone_surrogate_in_an_answer_is_escaped() -> None:
    """A tool call whose arguments end in the middle of a pair, as a parser decodes them."""

    def read(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
        return "", [("add", '{"a": "\ud83d"}')]

    async def drive(client: openai.AsyncOpenAI, trajectory: Trajectory, url: str) -> None:
        async with httpx.AsyncClient() as web:
            response = await web.post(f"{url}/chat/completions", json={"messages": ASK, "tools": TOOLS})
        assert response.status_code == 200 and b"\\ud83d" in response.content

    served(Scripted(lambda text, call: "yes"), drive, calls=read)
