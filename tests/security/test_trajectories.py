"""Clients that take problems without the key, or more of them than their share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from mtpctl.environments.gateway.server import Assignment, Gateway
from mtpctl.web.server import listen
from tests.fakes.http_answers import assert_rejected
from tests.fakes.scripted_engine import Scripted, byte_tokenizer, model_of, request_of


@contextlib.asynccontextmanager
async def handing_out(count: int, limit: int) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that has so many problems, of which one address may have `limit`."""
    model = model_of(Scripted(lambda text, call: "yes"))
    async with Gateway(model, byte_tokenizer(), "toy", 50, listen("127.0.0.1", 0), client_limit=limit) as one:
        left = iter(range(count))

        async def problem() -> Assignment:
            if next(left, None) is None:
                await asyncio.Event().wait()
            secret, _ = one.open(request_of())
            return one.assign(secret, {})

        one.next_problem = problem
        async with httpx.AsyncClient(base_url=one.address, headers={"authorization": f"Bearer {one.token}"}, timeout=30) as web:
            yield one, web


def test_only_clients_with_the_key_get_problems() -> None:
    async def run() -> None:
        async with handing_out(2, 2) as (one, web):
            for key in (None, "Bearer guess", f"bearer {one.token}x", one.token):
                headers = {} if key is None else {"authorization": key}
                async with httpx.AsyncClient(base_url=one.address) as stranger:
                    assert_rejected(await stranger.post("/v1/trajectories", headers=headers), 401)
            assert (await web.post("/v1/trajectories")).status_code == 200

    asyncio.run(run())


def test_one_client_cannot_take_all_trajectories() -> None:
    async def run() -> None:
        async with handing_out(8, 3) as (one, web):
            answers = await asyncio.gather(*(web.post("/v1/trajectories") for _ in range(8)))
            assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
            assert_rejected(next(answer for answer in answers if answer.status_code == 429), 429)
            elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
            async with httpx.AsyncClient(base_url=one.address, headers=web.headers, transport=elsewhere) as other:
                assert (await other.post("/v1/trajectories")).status_code == 200
            taken = next(answer for answer in answers if answer.status_code == 200).json()["base_url"]
            one.close(taken.split("/")[4])
            assert (await web.post("/v1/trajectories")).status_code == 200, "a trajectory that has ended makes room"

    asyncio.run(run())
