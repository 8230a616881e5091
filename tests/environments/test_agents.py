"""Agents in separate processes, and agents on other machines, become samples whatever they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from mtpctl.data.problems import Problem
from mtpctl.environments import agents
from mtpctl.environments.agents import open_generator
from mtpctl.errors import UserError
from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rollout.pool import ReplicaPool
from mtpctl.rollout.protocol import ABORTED, DEADLINE, ENVIRONMENT_ERROR
from mtpctl.samples import GenerationRequest, Sample, Unwanted
from tests.fakes.scripted_engine import EOS, Scripted, byte_tokenizer
from tests.fakes.trajectories import sampled

AGENT = '''
import asyncio, json, os, time, urllib.request

def ask(base_url, *messages, **more):
    body = json.dumps({"messages": messages, **more}).encode()
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, {"content-type": "application/json"})) as got:
        return json.load(got)["choices"][0]["message"]

def plain(problem, base_url, bonus=0.0):
    first = ask(base_url, {"role": "user", "content": problem.prompt})
    ask(base_url, {"role": "user", "content": problem.prompt}, first, {"role": "user", "content": "sure?"})
    return (first["content"] == problem.answer) + bonus

async def waited(problem, base_url):
    await asyncio.to_thread(plain, problem, base_url)

async def mixed(problem, base_url):
    """Raises, hangs, floods, dies or works, as the problem says."""
    if problem.prompt == "raise":
        raise ValueError("no good")
    if problem.prompt == "hang":
        await asyncio.sleep(100)
    if problem.prompt == "flood":
        print("x" * 10_000_000)
    if problem.prompt == "silent":
        return 0.5
    return plain(problem, base_url) if problem.prompt == "block" else await asyncio.to_thread(plain, problem, base_url)

def missing_url(problem):
    return 1

def branching(problem, base_url):
    ask(base_url, {"role": "user", "content": "one"}, temperature=0.0)
    ask(base_url, {"role": "user", "content": "two"})
    return 1
'''


class Engines:
    """A pool as far as agents know it."""

    def __init__(self, engine: Scripted) -> None:
        self.sample = engine


def problems(*prompts: str) -> list[GenerationRequest]:
    created = []
    for number, prompt in enumerate(prompts):
        request = GenerationRequest(Sample(f"p{number}", f"g{number}", [1, 2]), 300, stop_token_ids=[EOS], deadline_s=20.0)
        request.problem = Problem(f"p{number}", prompt, "answer")
        created.append(request)
    return created


def played(tmp_path: Path, requests: list[GenerationRequest], *, reports: list[str] | None = None, **rollout: Any) -> dict[str, Sample]:
    """The results of the requests, by the ids of their problems."""
    (tmp_path / "agent.py").write_text(AGENT)
    if "agent" in rollout:
        rollout["agent"] = f"{tmp_path}/agent.py:{rollout['agent']}"
    config = VllmConfig.model_validate({"engine": "vllm", **rollout})

    async def asked() -> AsyncIterator[GenerationRequest]:
        for request in requests:
            yield request

    async def run() -> dict[str, Sample]:
        engines = cast(ReplicaPool, Engines(Scripted(lambda text, call: "answer")))
        result = {}
        append_report = (reports if reports is not None else []).append
        log = tmp_path / "agent.log"
        async with open_generator(config, engines, byte_tokenizer(), context=500, name="toy", report=append_report, log=log) as generator:
            async for sample in generator.generate(asked()):
                result[sample.prompt_id] = sample
        return result

    return asyncio.run(run())


@pytest.mark.parametrize("agent", ["plain", "waited"])
def test_an_agents_conversation_is_one_sample(tmp_path: Path, agent: str) -> None:
    args = {"bonus": 0.5} if agent == "plain" else {}
    result = played(tmp_path, problems("1+1?", "2+2?"), agent=agent, agent_args=args)
    assert sorted(result) == ["p0", "p1"]
    for sample in result.values():
        assert bytes(t for t in sampled(sample) if t < 256) == b"answeranswer" and not sample.earlier
        assert sample.environment_reward == (1.5 if agent == "plain" else None)
        assert sample.environment is not None and (sample.environment.turns, sample.environment.samples) == (2, 1)
        assert sample.finish_reason == "stop"


def test_failing_environments_do_not_affect_others(tmp_path: Path) -> None:
    requests = problems("raise", "hang", "flood", "silent", *["block", "1+1?"] * 5)
    began = time.monotonic()
    result = played(tmp_path, requests, agent="mixed", deadline_s=4.0)
    assert time.monotonic() - began < 30
    reasons = {request.problem.prompt: result[request.sample.prompt_id].finish_reason for request in requests}  # type: ignore[attr-defined]
    assert reasons == {"raise": ENVIRONMENT_ERROR, "hang": DEADLINE, "flood": "stop", "silent": "stop", "block": "stop", "1+1?": "stop"}
    raised = result["p0"].environment
    assert raised is not None and raised.errors == 1 and "agent.py:" in raised.failure and "no good" in raised.failure
    late = result["p1"].environment
    assert late is not None and late.timeouts == 1 and "rollout.deadline_s" in late.failure
    assert result["p3"].environment_reward == 0.5 and not result["p3"].response_ids and result["p3"].prompt_ids.tolist() == [1, 2]


def test_several_conversations_are_parts_of_one_trajectory(tmp_path: Path) -> None:
    reports: list[str] = []
    (sample,) = played(tmp_path, problems("1+1?"), reports=reports, agent="branching", gateway_fields="ignore").values()
    assert [byte_tokenizer().decode(part.prompt_ids) for part in sample.trajectory] == ["user: one\nassistant: ", "user: two\nassistant: "]
    assert sample.environment is not None and (sample.environment.samples, sample.environment.rewritten) == (2, 0)
    assert reports == ["an agent sent temperature, which is ignored (rollout.gateway_fields)"]
    back = Sample.from_dict(sample.to_dict(packed=True))
    assert back == sample and back.copy() == sample


def test_an_unwanted_trajectory_ends_at_once(tmp_path: Path) -> None:
    (request,) = problems("hang")
    request.unwanted = Unwanted()
    request.unwanted.set()
    (sample,) = played(tmp_path, [request], agent="mixed").values()
    assert sample.finish_reason == ABORTED and not sample.response_ids


def test_external_agents_get_problems_and_finish_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(agents.KEY_VARIABLE, "s3cret")
    reports: list[str] = []

    async def agent() -> None:
        while not reports:
            await asyncio.sleep(0.01)
        address = reports[0].split()[-1]
        async with httpx.AsyncClient(headers={"authorization": "Bearer s3cret"}, timeout=20) as web:
            for _ in range(2):
                inputs = (await web.post(address)).json()
                messages = [{"role": "user", "content": inputs["problem"]["prompt"]}]
                answer = (await web.post(f"{inputs['base_url']}/chat/completions", json={"messages": messages})).json()
                right = answer["choices"][0]["message"]["content"] == inputs["problem"]["answer"]
                assert (await web.post(f"{inputs['base_url']}/finish", json={"reward": float(right)})).json() == {"finished": True}

    async def asked() -> AsyncIterator[GenerationRequest]:
        for request in problems("1+1?", "2+2?"):
            yield request

    async def run() -> list[Sample]:
        config = VllmConfig.model_validate({"engine": "vllm", "gateway": True})
        engines, working = cast(ReplicaPool, Engines(Scripted(lambda text, call: "answer"))), asyncio.create_task(agent())
        async with open_generator(config, engines, byte_tokenizer(), context=500, name="toy", report=reports.append) as generator:
            result = [sample async for sample in generator.generate(asked())]
        await working
        return result

    result = asyncio.run(run())
    assert [sample.environment_reward for sample in result] == [1.0, 1.0]
    assert sorted(sample.prompt_id for sample in result) == ["p0", "p1"]


def test_a_trajectory_of_an_idle_agent_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first problem is fetched and abandoned; the client that works on the second one frees the only slot."""
    monkeypatch.delenv(agents.KEY_VARIABLE, raising=False)
    reports: list[str] = []
    key_file = tmp_path / "gateway.key"

    async def agent() -> None:
        while not reports:
            await asyncio.sleep(0.01)
        address = reports[0].split()[-1]
        assert str(key_file) in reports[0] and key_file.stat().st_mode & 0o777 == 0o600
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key_file.read_text().strip()}"}, timeout=20) as web:
            idle = (await web.post(address)).json()["base_url"]
            while (second := await web.post(address)).status_code == 429:
                await asyncio.sleep(0.05)
            assert (await web.get(f"{idle}/models")).status_code == 410
            await web.post(f"{second.json()['base_url']}/finish", json={"reward": 1})

    async def asked() -> AsyncIterator[GenerationRequest]:
        for request in problems("1+1?", "2+2?"):
            yield request

    async def run() -> list[Sample]:
        config = VllmConfig.model_validate({"engine": "vllm", "gateway": True, "agents_per_client": 1, "agent_idle_s": 0.3})
        engines, working = cast(ReplicaPool, Engines(Scripted(lambda text, call: "answer"))), asyncio.create_task(agent())
        options: dict[str, Any] = {"context": 500, "name": "toy", "report": reports.append, "key_file": key_file}
        async with open_generator(config, engines, byte_tokenizer(), **options) as generator:
            result = [sample async for sample in generator.generate(asked())]
        await working
        return result

    idle, finished = asyncio.run(run())
    assert idle.finish_reason == DEADLINE and idle.environment is not None
    assert idle.environment.timeouts == 1 and "rollout.agent_idle_s" in idle.environment.failure
    assert finished.environment_reward == 1.0


@pytest.mark.parametrize(
    "rollout, message",
    [
        ({"agent": "nothing"}, "rollout.agent: .*defines no nothing"),
        ({"agent": "plain", "agent_args": {"bonsu": 1}}, "rollout.agent_args: .*did you mean bonus"),
        ({"agent": "missing_url"}, "rollout.agent: missing_url.*cannot be called"),
        ({"gateway": True, "gateway_host": "0.0.0.0"}, "MTPCTL_GATEWAY_KEY"),
        ({"agent": "plain", "tool_parser": "klingon"}, "rollout.tool_parser: vLLM has no parser 'klingon'"),
    ],
)
def test_impossible_requests_are_rejected_before_scoring(tmp_path: Path, rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        played(tmp_path, problems("1+1?"), **rollout)
