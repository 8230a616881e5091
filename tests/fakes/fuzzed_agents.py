"""Agents that call a gateway at random, with the conversations that they had."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from mtpctl.environments.gateway.requests import OVER_BUDGET, OVER_CONTEXT
from tests.fakes.chat_families import Family
from tests.fakes.fuzzed_turns import STOP, TOOL, Note

Messages = list[dict[str, Any]]


@dataclass
class Work(Note):
    """One trajectory: its sampled tokens, and the requests of its agent."""

    conversations: list[Messages] = field(default_factory=list)
    behind: list[Messages] = field(default_factory=list)
    tools: bool = False
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """A tool call is the text after `<tool_call>`."""
    before, mark, behind = text.partition("<tool_call>")
    return (before, [("look", behind)]) if mark else (text, [])


class Agent:
    """Works on a trajectory at random. `states` are conversations that end with an answer."""

    def __init__(self, client: httpx.AsyncClient, base_url: str, work: Work, family: Family, seed: int) -> None:
        self.client, self.base_url, self.work, self.family = client, base_url, work, family
        self.random = random.Random(f"{seed}/{work.number}/agent")
        self.states: list[Messages] = []

    async def run(self) -> None:
        for _ in range(self.random.randint(2, 7)):
            if await self._ask(*self._next()) == "over":
                return

    def _next(self) -> tuple[Messages, Messages]:
        """The messages of the next request, and those of them after the answer that it continues."""
        if not self.states or self.random.random() < 0.1:
            return [{"role": "user", "content": self._content()}], []
        state = self.states[-1] if self.random.random() < 0.7 else self.random.choice(self.states)
        if self.random.random() < 0.15:
            self.work.counts["rewritten"] += 1
            answer = {key: value for key, value in state[-1].items() if key != "tool_calls"} | {"content": "a summary"}
            state = [*state[:-1], answer]
        new: Messages = [{"role": role, "content": self._content()} for role in self.random.choice(self.family.replies)]
        return [*state, *new], new

    async def _ask(self, messages: Messages, new: Messages) -> str:
        chance, body = self.random, {"messages": messages, "model": "any"}
        body |= {"stop": STOP} if chance.random() < 0.4 else {}
        body |= {"max_tokens": 12} if chance.random() < 0.2 else {}
        body |= {"tools": [TOOL]} if self.work.tools else {}
        body |= {"n": 2} if chance.random() < 0.2 else {}
        body |= {"stream": True} if chance.random() < 0.3 else {}
        self.work.conversations.append(messages)
        self.work.behind.append(new)
        asking = asyncio.ensure_future(self.client.post(f"{self.base_url}/chat/completions", json=body))
        if chance.random() < 0.1:
            for _ in range(chance.randint(1, 40)):
                await asyncio.sleep(0)
            self.work.counts["hung up"] += not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return "hung up"
        answer = await asking
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] in (OVER_BUDGET, OVER_CONTEXT), answer.text
            return "over" if "max_turns" in answer.text else "full"
        result = self._streamed(answer.text) if body.get("stream") else [each["message"] for each in answer.json()["choices"]]
        assert len(result) == body.get("n", 1)
        self.states += [[*messages, self._as_clients_do(message)] for message in result]
        return "answered"

    def _as_clients_do(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer as it is sent back: with a field of the client's, or its text as a part."""
        back = dict(message)
        if self.random.random() < 0.3:
            back["refusal"] = None
        if back.get("content") and self.random.random() < 0.3:
            back["content"] = [{"type": "text", "text": back["content"]}]
        return back

    def _streamed(self, text: str) -> list[dict[str, Any]]:
        self.work.counts["streamed"] += 1
        created: dict[int, dict[str, Any]] = {}
        for line in text.split("\n\n"):
            if not line or line == "data: [DONE]":
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                message = created.setdefault(choice["index"], {"role": "assistant", "content": ""})
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls", []):
                    message.setdefault("tool_calls", []).append({key: value for key, value in call.items() if key != "index"})
        return [created[index] for index in sorted(created)]

    def _content(self) -> str:
        parts = ["see", "12", " ", "é", "☃", "the tool", "<think>", "</think>", STOP, "</", "a", "<tool_call>", "🂡"]
        return "=" + "".join(self.random.choice(parts) for _ in range(self.random.randint(0, 6))) + "."
