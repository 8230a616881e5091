"""Attacks over HTTP on the three servers of the package: the gateway, the log-prob server and the status page.

Each attack must be answered with a 4xx and one line, or with a closed connection, and a client that comes after it must be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpctl.controller.status import create_status_app
from mtpctl.environments.gateway.requests import FieldRules
from mtpctl.environments.gateway.server import Gateway
from mtpctl.logprob.http import make_app
from mtpctl.logprob.protocol import Bounds, Scored, ScoreRequest
from mtpctl.logprob.replica import Replica
from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.runs import LiveStatus
from mtpctl.web.guard import HOSTS_VARIABLE, Guard, HttpBounds
from mtpctl.web.server import address_of, listen, serving
from tests.fakes.http_answers import assert_rejected
from tests.fakes.logprob import FakeRank
from tests.fakes.logprob_ranks import LocalRanks, serve
from tests.fakes.scripted_engine import Scripted, byte_tokenizer, model_of, request_of

JSON = {"content-type": "application/json"}
CHAT: Any = {"messages": [{"role": "user", "content": "1+1?"}]}
SCORE: Any = {"token_ids": [1, 2, 3]}


class Target:
    """A server under attack: its address, a request that it answers, and the paths that take a body."""

    def __init__(self, address: str, path: str, body: Any, posts: list[str]) -> None:
        self.address, self.path, self.body, self.posts = address, path, body, posts

    async def check_alive(self, web: httpx.AsyncClient) -> None:
        answer = await (web.get(self.path) if self.body is None else web.post(self.path, json=self.body))
        assert answer.status_code == 200, answer.text

    async def raw(self, data: bytes) -> bytes:
        """The server's reply to these bytes, until it closes the connection."""
        host, port = self.address.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def gateway(tmp_path: Path) -> AsyncIterator[Target]:
    model = model_of(Scripted(lambda text, call: "yes"))
    async with Gateway(model, byte_tokenizer(), "toy", 50, listen("127.0.0.1", 0), rules=FieldRules(client_sampling=True)) as one:
        one.create_single_request = request_of
        secret, _ = one.open(request_of())
        posts = ["/v1/chat/completions", f"/t/{secret}/v1/chat/completions", f"/t/{secret}/v1/reward", f"/t/{secret}/v1/finish"]
        yield Target(one.address, posts[0], CHAT, posts)


class ScoringRank(FakeRank):
    """Returns entropies as well."""

    def score(self, requests: list[ScoreRequest], version: int) -> list[Scored]:
        return [Scored(each.version, each.logprobs, [0.0] * len(each.logprobs)) for each in super().score(requests, version)]


@contextlib.asynccontextmanager
async def logprobs(tmp_path: Path) -> AsyncIterator[Target]:
    async def start(_: int) -> Replica:
        return Replica(LocalRanks(ScoringRank()), Bounds(512, 320, 1), 0, keep_previous=False)

    server, bound = await serve(start), listen("127.0.0.1", 0)
    bounds = HttpBounds(body_s=0.5, header_s=0.5, drain_s=1.0)
    async with serving(make_app(server, byte_tokenizer(), "toy", bounds=bounds), bound):
        yield Target(address_of(bound), "/v1/logprobs", SCORE, ["/v1/logprobs", "/v1/completions"])
    await server.close()


@contextlib.asynccontextmanager
async def status(tmp_path: Path) -> AsyncIterator[Target]:
    bound = listen("127.0.0.1", 0)
    async with serving(create_status_app(LiveStatus(tmp_path, {}, History([], [])), lambda: None), bound):
        yield Target(address_of(bound), "/status.json", None, [])


SERVERS: dict[str, Callable[[Path], contextlib.AbstractAsyncContextManager[Target]]] = {
    "gateway": gateway,
    "log-prob server": logprobs,
    "status page": status,
}
every_server = pytest.mark.parametrize("name", SERVERS)


def attack(name: str, tmp_path: Path, drive: Callable[[Target, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with SERVERS[name](tmp_path) as target, httpx.AsyncClient(base_url=target.address, timeout=30) as web:
            await target.check_alive(web)
            await drive(target, web)
            await target.check_alive(web)

    asyncio.run(asyncio.wait_for(run(), 120))


# ------------------------------------------------------------------------------------------ requests of other pages


@every_server
def test_request_with_a_rebound_host_is_rejected(name: str, tmp_path: Path) -> None:
    hosts = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "a@127.0.0.1", "127.0.0.1:80:90", ""]

    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        for host in hosts:
            assert_rejected(await web.get(target.path if target.body is None else "/health", headers={"host": host}), 403)
            for path in target.posts:
                assert_rejected(await web.post(path, json=target.body, headers={"host": host}), 403)

    attack(name, tmp_path, drive)


@every_server
def test_addresses_and_names_of_this_machine_are_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS_VARIABLE, "gate.corp, other.corp")
    hosts = [
        "127.0.0.1:1",
        "localhost:8338",
        "LOCALHOST",
        "[::1]:9",
        "10.1.2.3",
        "trainer:80",
        "x.localhost",
        "gate.corp:443",
        "Other.Corp.",
    ]

    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        for host in [*hosts, socket.gethostname()]:
            answer = await web.request("GET" if target.body is None else "POST", target.path, json=target.body, headers={"host": host})
            assert answer.status_code == 200, (host, answer.text)

    attack(name, tmp_path, drive)


@every_server
def test_request_from_another_origin_is_rejected(name: str, tmp_path: Path) -> None:
    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        authority = target.address.removeprefix("http://")
        for origin in ("http://evil.example", "null", f"http://{authority}.evil.example", "http://127.0.0.1:1", "file://", ""):
            for path in [*target.posts, target.path]:
                assert_rejected(await web.post(path, json=target.body, headers={"origin": origin}), 403)
            assert_rejected(await web.get(target.path, headers={"origin": origin}), 403)
        own = {"origin": target.address}
        answer = await web.request("GET" if target.body is None else "POST", target.path, json=target.body, headers=own)
        assert answer.status_code == 200

    attack(name, tmp_path, drive)


@pytest.mark.parametrize("name", ["gateway", "log-prob server"])
def test_body_that_is_not_declared_as_json_is_rejected(name: str, tmp_path: Path) -> None:
    kinds = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp", "json", "", None]

    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        for path in target.posts:
            for kind in kinds:
                headers = {} if kind is None else {"content-type": kind}
                answer = await web.post(path, content=json.dumps(target.body), headers=headers)
                assert_rejected(answer, 415)
        answer = await web.post(target.path, content=json.dumps(target.body), headers={"content-type": "application/json; charset=utf-8"})
        assert answer.status_code == 200

    attack(name, tmp_path, drive)


# ------------------------------------------------------------------------------------------------------- bodies

BODIES: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"\xff\xfe{\x00}\x00",
    b"\x00",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}",
    b'{"messages": [], "messages": [{"role": "user", "content": "x"}]}',
    b'{"token_ids": [1, 2], "token_ids": [3, 4]}',
    b'{"prompt": "ab", "echo": true, "max_tokens": 0, "echo": true}',
    b'{"token_ids": [' + b"9" * 4000 + b", 1]}",
    b'{"token_ids": [99999999999999999999, 1]}',
    b'{"token_ids": [18446744073709551616, 1]}',
    b'{"token_ids": [1, -1]}',
    b'{"token_ids": [1, -9223372036854775808]}',
    b'{"token_ids": [1, 2.0]}',
    b'{"token_ids": [1, null]}',
    b'{"token_ids": [NaN, 1]}',
    b'{"token_ids": [1, 2], "temperature": NaN}',
    b'{"token_ids": [1, 2], "temperature": 1e999}',
    b'{"token_ids": [1, 2], "temperature": -1}',
    b'{"token_ids": [1, 2], "timeout_s": Infinity}',
    b'{"token_ids": [1, 2], "prompt_length": 9223372036854775807}',
    b'{"token_ids": [1, 2], "prompt_length": -1}',
    b'{"token_ids": [1, 2], "version": 9223372036854775807}',
    b'{"token_ids": [1, 2], "version": -1}',
    b'{"token_ids": [1, 2], "routes": {"dtype": "uint8", "shape": [9999999999, 9999999999, 9999999999], "data": "AA=="}}',
    b'{"token_ids": [1, 2], "mask": [1, 1, 1, 1]}',
    b'{"token_ids": [1, 2], "user": "' + b"x" * 1000 + b'"}',
    b'{"token_ids": [1, 2], "a\\nb": 1}',
    b'{"text": "\\ud800"}',
    b'{"prompt": "\\udfff", "echo": true, "max_tokens": 0}',
    b'{"prompt": "ab", "echo": true, "max_tokens": 0, "suffix": "x"}',
    b'{"prompt": "ab", "echo": true, "max_tokens": 0, "unknown": 1}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 99999999999999999999}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{% for i in range(9**9) %}"}}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"9999999999999": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [-5]}',
    b'{"reward": NaN}',
    b'{"reward": -Infinity}',
    b'{"reward": 1e999}',
    b'{"reward": "nan"}',
    b'{"reward": "1e999"}',
    b'{"reward": [1]}',
    b'{"reward": 0.5, "reward": 1}',
]


@pytest.mark.parametrize("name", ["gateway", "log-prob server"])
def test_hostile_body_is_rejected_with_one_line(name: str, tmp_path: Path) -> None:
    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        for path in target.posts:
            for body in BODIES:
                answer = await web.post(path, content=body, headers=JSON)
                if path.endswith("/finish") and (answer.status_code == 200):
                    assert body == b"" or b"reward" not in body  # every body without a reward ends the trajectory
                    continue
                assert_rejected(answer)

    attack(name, tmp_path, drive)


@every_server
def test_body_over_the_size_limit_is_rejected(name: str, tmp_path: Path) -> None:
    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        path = target.posts[0] if target.posts else target.path

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield b" " * (1 << 20)

        assert_rejected(await web.post(path, content=b" " * (9 << 20), headers=JSON), 413)
        assert_rejected(await web.post(path, content=parts(), headers=JSON), 413)

    attack(name, tmp_path, drive)


# ------------------------------------------------------------------------------------------------ heads and paths


@every_server
def test_hostile_head_is_rejected(name: str, tmp_path: Path) -> None:
    heads = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 400 + b"\r\nConnection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX\x00: y\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 1000 + b"\r\n\r\n",
    ]

    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        for head in heads:
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await target.raw(head)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), (head[:60], answer[:200])

    attack(name, tmp_path, drive)


@every_server
def test_unknown_path_is_rejected(name: str, tmp_path: Path) -> None:
    paths = [
        "/../etc/passwd",
        "/%2e%2e/v1/models",
        "//evil.example/",
        "/v1//models",
        "/v1/models/",
        "/%00",
        "/t/../v1/models",
        "/t/%2F/v1/models",
    ]
    paths += ["/" + "x" * 8000, "/v1/logprobs/../models", "/v1/models%0d%0aX: y", "/metrics/..", "/.git/config"]

    async def drive(target: Target, web: httpx.AsyncClient) -> None:
        for path in paths:
            for method in ("GET", "POST", "DELETE", "TRACE"):
                answer = await target.raw(f"{method} {path.replace(' ', '%20')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                status = int(answer.split()[1])
                assert status in (401, 404, 405, 410), (method, path, answer[:200])
                assert b"\r\nlocation:" not in answer.lower() and b"\r\nX: y" not in answer

    attack(name, tmp_path, drive)


# ------------------------------------------------------------------------------------------------- slow clients


def test_slow_client_is_disconnected(tmp_path: Path) -> None:
    """Clients that send a head or body slowly, or that do not read a long reply."""
    answer, bounds = b"x" * (8 << 20), HttpBounds(header_s=0.3, body_s=0.3, drain_s=0.3, stalled_s=0.3)
    let_go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer, "more_body": True})
        if scope["path"] == "/long":
            try:
                await send({"type": "http.response.body", "body": answer, "more_body": True})  # waits until the client has read
                await asyncio.Event().wait()
            finally:
                let_go.set()
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        bound = listen("127.0.0.1", 0)
        async with serving(Guard(app, bounds, None), bound):
            target = Target(address_of(bound), "/", None, [])
            assert await target.raw(b"GET / HT") == b""
            assert (await target.raw(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")).startswith(b"HTTP/1.1 408 ")
            host, port = target.address.removeprefix("http://").rsplit(":", 1)
            with socket.create_connection((host, int(port))) as deaf:
                deaf.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
                await asyncio.wait_for(let_go.wait(), 20)
            async with httpx.AsyncClient(base_url=target.address) as web:
                assert len((await web.get("/")).content) == len(answer)

    asyncio.run(asyncio.wait_for(run(), 60))
