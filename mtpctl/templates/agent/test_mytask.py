"""What the agent of mytask asks, and what its reward is: `pytest` in this folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from agent import AGAIN, run

from mtpctl.data.problems import Problem

PROBLEM = Problem("rows.jsonl:1", "last letter of vijug:", "g")


@contextmanager
def model(*answers: str) -> Iterator[tuple[str, list]]:
    """A model that gives these answers, one after the other, at a base URL; and the conversations that it was sent."""
    asked: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"])
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answers[len(asked) - 1]}}
            body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()


@pytest.mark.parametrize(("answers", "reward"), [(["g"], 1.0), (["x", " g"], 0.5), (["x", "y"], 0.0)])
def test_rewards_are_as_meant(answers: list[str], reward: float) -> None:
    with model(*answers) as (base_url, asked):
        assert asyncio.run(run(PROBLEM, base_url, second=0.5)) == reward
    assert len(asked) == len(answers)


def test_the_second_question_has_the_first_answer_before_it() -> None:
    with model("x", "g") as (base_url, asked):
        asyncio.run(run(PROBLEM, base_url))
    assert [message["content"] for message in asked[1]] == ["last letter of vijug:", "x", AGAIN]
