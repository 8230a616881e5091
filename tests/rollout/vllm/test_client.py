"""A vLLM server over HTTP that misbehaves: other clients do not wait for it indefinitely."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mtpctl.rollout.vllm import client
from mtpctl.rollout.vllm.client import ServedEngine
from mtpctl.sync.protocol import Manifest, SectionPlan, SyncError

SENT = Manifest(1, "shm", "/nowhere", {"target": SectionPlan(())})


class Server:
    """Answers like a vLLM server and records its requests; `slow` ones are executed without an answer."""

    def __init__(self) -> None:
        self.routes: list[str] = []
        self.queries: list[str] = []
        self.slow: set[str] = set()
        self.refused: set[str] = set()
        self.paused, self.released = False, False
        self.free = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                route, _, query = self.path.partition("?")
                server.routes.append(route)
                server.queries += [query] if route == "/pause" else []
                if route in ("/pause", "/resume"):
                    server.paused = route == "/pause"
                if route in server.slow:
                    server.free.wait(20)
                    return
                message: dict[str, Any] = {
                    "weight_version": "0",
                    "world_size": 1,
                    "results": [False],
                    "data": [],
                    "is_paused": server.paused,
                }
                if route == "/release_kv_cache_memory" and server.released:
                    server.refused.add(route)
                    message = {"detail": "memory of kv_cache has to be resident"}
                server.released = route == "/release_kv_cache_memory" or (server.released and route != "/wake_up")
                body = json.dumps(message).encode()
                self.send_response(500 if route in server.refused else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    result = Server()
    yield result
    result.free.set()
    result.http.shutdown()
    result.http.server_close()


async def update(server: Server, sent: Manifest = SENT) -> None:
    engine = await ServedEngine.connect(server.url)
    await engine.update(sent, mode="wait", verify=False, deadline_s=10)


def test_pause_that_times_out_is_undone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses that have to end first may take longer than the deadline."""
    monkeypatch.setattr(client, "TIMEOUT_S", 0.5)
    server.slow.add("/pause")
    with pytest.raises(SyncError, match=r"/pause\?mode=wait&clear_cache=true: no answer within 0\.5 s"):
        asyncio.run(update(server))
    assert not server.paused, server.routes


@pytest.mark.parametrize(("keep_kv", "cleared"), [(False, "true"), (True, "false")])
def test_pause_keeps_the_cache_only_if_set(server: Server, keep_kv: bool, cleared: str) -> None:
    async def synced() -> None:
        engine = await ServedEngine.connect(server.url, keep_kv=keep_kv)
        await engine.update(Manifest(1, "shm", "/nowhere", {}), mode="keep", verify=False, deadline_s=10)

    asyncio.run(synced())
    assert server.queries == [f"mode=keep&clear_cache={cleared}"]


def test_paused_server_resumes_only_with_complete_weights(server: Server) -> None:
    """Whoever paused it may have been killed when its weights were halfway another version's."""
    server.paused = True
    server.refused |= {"/start_weight_update", "/update_weights"}
    with pytest.raises(SyncError, match=f"{server.url} was already paused, and remains paused"):
        asyncio.run(update(server))
    assert server.paused
    server.refused = {"/update_weights"}
    asyncio.run(update(server, Manifest(1, "shm", "/nowhere", {})))
    assert not server.paused and server.routes.count("/update_weights") == 2, "what was left of that sync is ended first"


@pytest.mark.parametrize("release_kv", [True, False])
def test_cache_that_a_killed_sync_has_released_is_allocated_again(server: Server, release_kv: bool) -> None:
    server.paused = server.released = True

    async def synced() -> None:
        engine = await ServedEngine.connect(server.url, release_kv=release_kv)
        await engine.update(Manifest(1, "shm", "/nowhere", {}), mode="keep", verify=False, deadline_s=10)

    asyncio.run(synced())
    assert not (server.paused or server.released)


def test_server_that_refuses_weights_keeps_serving_the_old_ones(server: Server) -> None:
    server.refused.add("/start_weight_update")
    with pytest.raises(SyncError):
        asyncio.run(update(server))
    assert not server.paused and "/pause" in server.routes
