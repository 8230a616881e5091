"""Malicious clients of the gateway are rejected with a reason, memory stays constant, and a regular agent is served concurrently."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.environment import with_tree
from tests.fakes.gateway import KEY

GROWTH_MIB = 64
"""Growth of resident memory that counts as flat: half of what all bodies together may hold."""
TURNS = 60
HELLO = [{"role": "user", "content": "1+1?"}]


@pytest.fixture
def gateway() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process, and its address with the secrets of two trajectories."""
    command = [sys.executable, "-m", "tests.fakes.gateway", str(TURNS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=with_tree())
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()
    finally:
        process.kill()
        process.wait()


class Hostile:
    """Sends random requests to the gateway, to its own trajectory and to trajectories that do not exist."""

    def __init__(self, address: str, secret: str, seed: int) -> None:
        self.address, self.base = address, f"{address}/t/{secret}/v1"
        self.random = random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self.limits = Counter[str]()

    async def run(self, count: int) -> None:
        todo = iter(range(count))
        async with httpx.AsyncClient(timeout=60) as client:

            async def worker() -> None:
                for _ in todo:
                    await self._one(client)

            await asyncio.gather(*(worker() for _ in range(16)))

    async def _one(self, client: httpx.AsyncClient) -> None:
        url, content, headers = self._request()
        headers = {"content-type": self.random.choice(["application/json"] * 9 + ["text/plain"])} | headers
        if self.random.random() < 0.1:
            # Hangs up while it is being answered.
            asking = asyncio.create_task(client.post(url, content=content, headers=headers))
            await asyncio.sleep(self.random.random() * 0.004)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        answer = await client.post(url, content=content, headers=headers)
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"] and len(error["message"]) < 2000
            self.limits[str(error.get("code"))] += 1

    def _request(self) -> tuple[str, bytes, dict[str, str]]:
        draw = self.random
        chat: dict[str, Any] = {"model": "x", "messages": HELLO}
        kinds: list[tuple[str, Any]] = [
            ("/chat/completions", chat),
            ("/chat/completions", chat | {"stream": True, "n": draw.choice([1, 2, 64, 65, 10**9])}),
            ("/chat/completions", chat | {"max_tokens": draw.choice([0, -1, 1e99, "x", 1])}),
            ("/chat/completions", chat | {"messages": draw.choice([[], {}, "x", [3], [{"role": 1}], HELLO * 2000])}),
            (
                "/chat/completions",
                chat | {"messages": [{"role": draw.choice(["user", "unknown", ""]), "content": "x" * draw.randint(0, 200_000)}]},
            ),
            ("/chat/completions", chat | {"stop": draw.choice([["a"] * 10_000, "x" * 100_000, [1], {"a": 1}])}),
            ("/chat/completions", chat | {"tools": draw.choice([[{}] * 1000, [{"x": "y" * 10_000}], 3, "x"])}),
            ("/chat/completions", b'{"messages": ' + b"[" * draw.randint(1, 100_000)),
            ("/chat/completions", bytes(draw.randbytes(draw.randint(0, 1000)))),
            ("/chat/completions", b"x" * (9 << 20)),
            ("/reward", {"reward": draw.choice(["x", None, 1e308, float("nan"), [1], {"a": {}}])}),
            ("/reward", b"[" * 50_000),
            ("/nothing/here", {}),
        ]
        # Bodies of megabytes are one in a hundred, since reading them is all that the other requests then wait for.
        path, body = kinds[-4] if draw.random() < 0.01 else draw.choice(kinds[:9] + kinds[10:])
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        place = draw.random()
        if place < 0.1:
            return f"{self.address}/v1/trajectories", content, {"authorization": draw.choice(["Bearer guess", "x", f"Bearer {KEY}"])}
        if place < 0.2:
            return f"{self.address}/t/{draw.choice(['none', '..', '%00', 'x' * 2000])}/v1{path}", content, {}
        if place < 0.3:
            return f"{self.address}/v1/chat/completions", content, {"authorization": draw.choice(["Bearer guess", f"Bearer {KEY}"])}
        return f"{self.base}{path}", content, {"mtpctl-reward": draw.choice(["0.5", "nan", "x" * 1000])} if draw.random() < 0.1 else {}


async def honest(address: str, secret: str, until: asyncio.Event) -> list[float]:
    """Seconds per answer for an agent that continues one conversation up to its budget, and then makes requests that are rejected."""
    waited = []
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(TURNS):
            if until.is_set():
                break
            began = time.monotonic()
            answer = await client.post(f"{address}/t/{secret}/v1/chat/completions", json={"messages": HELLO})
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "yes"
            waited.append(time.monotonic() - began)
            await asyncio.sleep(0.1)
    return waited


def attack(process: subprocess.Popen[str], text: list[str], count: int) -> None:
    address, secret, other = text
    resident = psutil.Process(process.pid).memory_info

    async def run(count: int, seed: int) -> tuple[Hostile, list[float]]:
        hostile, done = Hostile(address, secret, seed), asyncio.Event()
        serving = asyncio.create_task(honest(address, other, done)) if seed else None
        await hostile.run(count)
        done.set()
        return hostile, await serving if serving is not None else []

    asyncio.run(run(count // 10, 0))  # What the first requests take is enough for all others.
    before = resident().rss
    hostile, waited = asyncio.run(run(count, 1))
    grown = (resident().rss - before) / 2**20
    print(f"{count} requests: {dict(hostile.statuses)}, {dict(hostile.limits)}; memory {before / 2**20:.0f} MiB {grown:+.1f}")
    print(f"{len(waited)} answers to another agent, the longest after {1000 * max(waited):.0f} ms")
    assert grown < GROWTH_MIB
    assert set(hostile.statuses) <= {200, 400, 401, 404, 405, 410, 413, 415, 429, 503}, hostile.statuses
    assert hostile.limits["budget_exceeded"] and hostile.statuses[401] and hostile.statuses[410]
    assert len(waited) > 1
    assert httpx.get(f"{address}/health").json() == {"status": "ok", "trajectories": 2}, "what single requests began is closed"


def test_hostile_requests(gateway: tuple[subprocess.Popen[str], list[str]]) -> None:
    attack(*gateway, 600)


@pytest.mark.slow
def test_ten_thousand_hostile_requests(gateway: tuple[subprocess.Popen[str], list[str]]) -> None:
    attack(*gateway, 10_000)
