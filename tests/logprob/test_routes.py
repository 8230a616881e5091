"""Scores under the routes of a request, and routes in an answer, by direct calls and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mtpctl.logprob.http import make_app
from mtpctl.logprob.protocol import RequestRefused, Scored, ScoreRequest
from mtpctl.logprob.rank import ScoreRank
from mtpctl.logprob.replica import Replica
from mtpctl.logprob.server import LogprobServer
from mtpctl.routes import Routes, RouteShape, from_json, to_json
from mtpctl.web.guard import HttpBounds
from tests.fakes.logprob_ranks import LocalRanks, Loop, replica_config, serve
from tests.fakes.tiny import drawn_routes
from tests.fakes.toys import TOYS, toy_folder

TOKENS = [[7 + i * j % 200 for j in range(30)] for i in (3, 5, 7)]


@pytest.fixture(scope="module")
def server(run: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogprobServer]:
    folder: Path = toy_folder(TOYS["glm4-moe"], tmp_path_factory.mktemp("glm") / "model", 0, "fp32")
    rank = ScoreRank(replica_config(folder), 0)
    bounds = rank.build("")

    async def start(_: int) -> Replica:
        return Replica(LocalRanks(rank), bounds, 0, keep_previous=False)

    created = run(serve(start))
    yield created
    run(created.close())
    rank.engine.close()


def routes_of(server: LogprobServer, seed: int, tokens: int = 29) -> Routes:
    assert server.bounds.routes == RouteShape((1,), 2, 6)
    return drawn_routes(server.bounds.routes, tokens, seed)


def scores(server: LogprobServer, run: Loop, requests: list[ScoreRequest]) -> list[Scored]:
    async def ask() -> list[Scored]:
        result = {index: scored async for index, scored in server.stream(requests)}
        return [result[index] for index in range(len(requests))]

    return run(ask())


def test_each_request_is_scored_under_its_own_routes_whatever_it_shares_a_pass_with(server: LogprobServer, run: Loop) -> None:
    inputs = [routes_of(server, 0), None, routes_of(server, 2, 15)]
    mixed = scores(server, run, [ScoreRequest(ids, 10, routes=r, record=True) for ids, r in zip(TOKENS, inputs, strict=True)])
    free = scores(server, run, [ScoreRequest(ids, 10) for ids in TOKENS])
    for place, (scored, routes) in enumerate(zip(mixed, inputs, strict=True)):
        (alone,) = scores(server, run, [ScoreRequest(TOKENS[place], 10, routes=routes)])
        assert alone.logprobs == pytest.approx(scored.logprobs, abs=1e-6) and alone.routes is None
        assert scored.routes is not None and len(scored.routes) == 29
        if routes is not None:
            assert np.array_equal(scored.routes[: len(routes)], routes)
        # Routes that one pass returns can be replayed in another.
        (again,) = scores(server, run, [ScoreRequest(TOKENS[place], 10, routes=scored.routes)])
        assert again.logprobs == pytest.approx(scored.logprobs, abs=1e-6)
        assert (scored.logprobs == pytest.approx(free[place].logprobs, abs=1e-6)) == (routes is None)


def test_mismatched_routes_are_rejected_with_the_samples_name(server: LogprobServer, run: Loop) -> None:
    with pytest.raises(RequestRefused, match=r"routes: sample p1/2: routes contain expert 6, but the model has 6"):
        run(server.score(ScoreRequest(TOKENS[0], routes=np.full((3, 1, 2), 6, np.uint8), name="p1/2")))
    with pytest.raises(RequestRefused, match=r"routes: routes have 31 tokens, but the sequence has 30"):
        run(server.score(ScoreRequest(TOKENS[0], routes=routes_of(server, 0, 31))))


def test_http_accepts_and_returns_routes_as_json(server: LogprobServer, run: Loop) -> None:
    app = make_app(server, None, "toy", key=None, bounds=HttpBounds())

    async def post(**body: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            return await client.post("/v1/logprobs", json=body)

    routes = routes_of(server, 4)
    (direct,) = scores(server, run, [ScoreRequest(TOKENS[0], 10, routes=routes)])
    answer = run(post(token_ids=TOKENS[:2], prompt_length=10, routes=[to_json(routes), None], record_routes=True))
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["data"]
    assert first["logprobs"] == pytest.approx(direct.logprobs, abs=1e-6)
    assert np.array_equal(from_json(first["routes"]), routes)
    assert from_json(second["routes"]).shape == (29, 1, 2)
    plain = run(post(token_ids=TOKENS[0], routes=to_json(routes))).json()["data"][0]
    assert plain["routes"] is None
    refused = run(post(token_ids=TOKENS[0], routes={**to_json(routes), "shape": [1, 1, 1]}))
    assert refused.status_code == 400 and "routes: data: has 58 bytes" in refused.text
    few = run(post(token_ids=TOKENS[:2], routes=[None]))
    assert few.status_code == 400 and "routes: has 1 entries for 2 sequences" in few.text
