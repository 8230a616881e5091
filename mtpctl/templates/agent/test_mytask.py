"""Requests and rewards of the agent of mytask. Run `pytest` in this folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from agent import TOOLS, result, run

from mtpctl.data.problems import Problem

PROBLEM = Problem("rows.jsonl:1", "add 16 5:", "21")


def call(name: str, **arguments: int) -> dict:
    """An answer with a tool call."""
    return {"tool_calls": [{"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}]}


@contextmanager
def model(*answers: str | dict) -> Iterator[tuple[str, list]]:
    """A server that returns these answers in order. Yields its base URL, and the conversations that it received."""
    conversations: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            conversations.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"])
            answer = answers[len(conversations) - 1]
            message = {"role": "assistant", "content": None, **(answer if isinstance(answer, dict) else {"content": answer})}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # looks every 0.01 s whether to stop
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", conversations
    finally:
        server.shutdown()


@pytest.mark.parametrize(
    ("answers", "reward", "calls"),
    [
        ([call("add", a=16, b=5), "21"], 1.0, 1),
        ([" 21"], 1.0, 0),
        ([call("double", a=8), call("add", a=16, b=4), "20"], 0.0, 2),
        ([call("double", a=8)] * 3, 0.0, 3),
    ],
)
def test_agent_returns_reward_and_number_of_calls(answers: list, reward: float, calls: int) -> None:
    with model(*answers) as (base_url, conversations):
        assert asyncio.run(run(PROBLEM, base_url)) == {"reward": reward, "calls": calls}
    assert len(conversations) == len(answers)


def test_model_receives_results_of_its_calls() -> None:
    with model(call("double", a=8), "16") as (base_url, conversations):
        asyncio.run(run(PROBLEM, base_url))
    question, answer, tool = conversations[1]
    assert question == {"role": "user", "content": "add 16 5:"} and answer["tool_calls"][0]["function"]["name"] == "double"
    assert tool == {"role": "tool", "tool_call_id": "1", "content": "16"}


@pytest.mark.parametrize(("name", "arguments"), [("halve", '{"a": 8}'), ("add", '{"a": 8}'), ("add", "8, 5"), ("double", '["8"]')])
def test_invalid_call_returns_an_error(name: str, arguments: str) -> None:
    assert result(name, arguments).startswith("error: ")


def test_supervised_conversations_have_the_tools_of_the_agent() -> None:
    rows = [json.loads(line) for line in Path(__file__).with_name("talks.jsonl").read_text().splitlines()]
    assert rows and all(row["tools"] == TOOLS for row in rows)
