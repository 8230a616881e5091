"""Feedback and rewards of the agent of mytask. Run `pytest` in this folder. Requires the sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from agent import run

from mtpctl.data.problems import Problem

ROWS = [json.loads(line) for line in Path(__file__).with_name("held_out.jsonl").read_text().splitlines()]
EXAMPLE = {"shown": "f('abcdef')", "expected": "'bcd'", "tests": ["assert f('uvwxyz') == 'vwx'"]}
PROBLEM = Problem("rows.jsonl:1", "letters 2 to 4:", "f=lambda w:w[1:4]", fields=EXAMPLE)
WRONG, RIGHT, BROKEN, ENDLESS = "f=lambda w:w[2:4]", "f=lambda w:w[1:4]", "f=lambda w:", "while True: pass"


@contextmanager
def model(*answers: str) -> Iterator[tuple[str, list]]:
    """A server that returns these answers in order. Yields its base URL, and the conversations that it received."""
    conversations: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            conversations.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"])
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answers[len(conversations) - 1]}}
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
    ("answers", "reward", "feedback"),
    [
        ([RIGHT], 1.0, []),
        ([WRONG, RIGHT], 0.5, ["'cd', not 'bcd':"]),
        ([WRONG, WRONG], 0.0, ["'cd', not 'bcd':"]),
        ([BROKEN, RIGHT], 0.5, ["SyntaxError: invalid syntax, not 'bcd':"]),
        ([ENDLESS, RIGHT], 0.5, ["it took too long, not 'bcd':"]),
        (["", RIGHT], 0.5, ["NameError: name 'f' is not defined, not 'bcd':"]),
    ],
)
def test_code_is_run_corrected_and_tested(answers: list[str], reward: float, feedback: list[str]) -> None:
    with model(*answers) as (base_url, conversations):
        result = asyncio.run(run(PROBLEM, base_url, tries=2, retry_reward=0.5))
    assert result == {"reward": reward, "passed": float(reward > 0), "corrected": float(reward == 0.5)}
    assert [message["content"] for message in conversations[-1][2::2]] == feedback


def test_code_of_every_row_passes() -> None:
    for row in ROWS[:5]:
        with model(row["answer"]) as (base_url, _):
            problem = Problem("held_out.jsonl:1", row["question"], row["answer"], fields=row)
            assert asyncio.run(run(problem, base_url)) == {"reward": 1.0, "passed": 1.0, "corrected": 0.0}
