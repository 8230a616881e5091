"""`mtpctl logprob-serve` as it is started by a user, under clients that mean harm: refused with a reason, memory flat, others served."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.environment import with_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEY = "s3cret"
HEAD = f"POST /v1/logprobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
CONNECTIONS = 10_000
GROWTH_MIB = 64
"""Growth of the server's resident memory that counts as flat: what all bodies together may hold is twice that."""


class Server:
    """The command in a separate process."""

    def __init__(self, folder: Path, cwd: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "mtpctl", "logprob-serve", "--model", str(folder), "--port", "0"]
        environment = with_tree(MTPCTL_API_KEY=KEY)
        self.process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if "http://" in line)
        self.port = int(line.split("127.0.0.1:")[1].split("/")[0])

    def memory_mib(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    def connect(self, timeout: float = 60) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def post(self, body: bytes, key: str = KEY) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", "/v1/logprobs", body, {"authorization": f"Bearer {key}", "content-type": "application/json"})
        response = connection.getresponse()
        status, text = response.status, response.read().decode()
        connection.close()
        return status, text


class Others:
    """A regular client that keeps sending requests, and its waiting times."""

    def __init__(self, server: Server) -> None:
        self.server, self.waited = server, [0.0]
        self.failures: list[Any] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        body = json.dumps({"token_ids": list(range(40))}).encode()
        while not self._ending.is_set():
            began = time.monotonic()
            answer = self.server.post(body)
            self.waited.append(time.monotonic() - began)
            if answer[0] != 200:
                self.failures.append(answer)
            time.sleep(0.02)

    def since(self, mark: int) -> str:
        taken = self.waited[mark:] or [0.0]
        return f"{len(taken)} answers to others, median {1000 * statistics.median(taken):.0f} ms, longest {1000 * max(taken):.0f} ms"

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(folder, tmp_path_factory.mktemp("serve"))
    yield one
    one.process.terminate()
    assert one.process.wait(60) == 0


@pytest.fixture
def others(server: Server) -> Iterator[Others]:
    asking = Others(server)
    while len(asking.waited) < 20:
        time.sleep(0.05)
    yield asking
    asking.end()
    assert asking.failures == []


def check_growth(what: str, server: Server, others: Others, before: float, mark: int, bound: float = GROWTH_MIB) -> None:
    """Print the figures, and hold the growth of memory (MiB) against its bound."""
    time.sleep(0.5)
    grown = server.memory_mib() - before
    print(f"{what}: memory {before:.0f} MiB {grown:+.1f}; {others.since(mark)}")
    assert grown < bound


@pytest.mark.parametrize(
    ("what", "body", "key", "times", "status", "reason"),
    [
        ("broken JSON", b'{"token_ids": [1,', KEY, 200, 400, "not valid JSON"),
        ("an id out of range", b'{"token_ids": [1, 99999]}', KEY, 200, 400, "99999 is not a token"),
        ("10^7 tokens", b'{"token_ids": [' + b"1," * (10**7 - 1) + b"1]}", KEY, 10, 413, "bytes"),
        ("10^6 tokens", b'{"token_ids": [' + b"1," * (10**6 - 1) + b"1]}", KEY, 20, 400, "more than the 512 positions"),
        ("a wrong key", b'{"token_ids": [1, 2]}', "guess", 200, 401, "a key is needed"),
    ],
)
def test_invalid_requests_are_rejected_and_do_not_delay_others(
    server: Server, others: Others, what: str, body: bytes, key: str, times: int, status: int, reason: str
) -> None:
    before, mark = server.memory_mib(), len(others.waited)
    for _ in range(times):
        result, text = server.post(body, key)
        assert result == status and reason in text
    check_growth(f"{times} x {what} -> {status}", server, others, before, mark)


def test_slow_bodies_time_out_and_do_not_delay_others(server: Server, others: Others) -> None:
    """500 clients that send a byte now and then are answered 408, once their time is over."""
    before, mark = server.memory_mib(), len(others.waited)
    slow = [server.connect() for _ in range(500)]
    for connection in slow:
        connection.sendall(f"{HEAD}Content-Length: 5000\r\n\r\n{{".encode())
    for _ in range(4):
        time.sleep(4)
        for connection in slow:
            connection.sendall(b" ")
    answers = [connection.recv(100) for connection in slow]
    for connection in slow:
        connection.close()
    assert all(b" 408 " in answer for answer in answers)
    check_growth("500 slow bodies -> 408", server, others, before, mark)


def test_ten_thousand_connections_opened_and_dropped(server: Server, others: Others) -> None:
    """Half say nothing, half break off within a body. What the first flood took is enough for the next one."""
    flood(server, others, GROWTH_MIB)
    flood(server, others, GROWTH_MIB / 8)


def flood(server: Server, others: Others, bound: float) -> None:
    before, mark = server.memory_mib(), len(others.waited)
    began = time.monotonic()
    for number in range(CONNECTIONS):
        with server.connect() as connection:
            if number % 2:
                connection.sendall(f"{HEAD}Content-Length: 5000\r\n\r\n{{".encode())
    seconds = time.monotonic() - began
    deadline = time.monotonic() + 30
    while len(psutil.Process(server.process.pid).net_connections()) > 20 and time.monotonic() < deadline:
        time.sleep(0.2)
    left = len(psutil.Process(server.process.pid).net_connections())
    check_growth(f"{CONNECTIONS} connections opened and dropped in {seconds:.0f} s, {left} left", server, others, before, mark, bound)
    assert left <= 20
