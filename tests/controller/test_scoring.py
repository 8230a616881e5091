"""Old log-probs computed concurrently with generation, and late answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from mtpctl.controller.scoring import ATTEMPTS, OldLogprobScorer
from mtpctl.errors import RuntimeFailure
from mtpctl.logprob.dispatch import Counters
from mtpctl.logprob.protocol import DeadlineExceeded, Scored, ScoreRequest
from mtpctl.logprob.server import LogprobServer
from mtpctl.routes import Routes
from mtpctl.samples import Sample

GIVEN, RECORDED = np.zeros((2, 1, 2), np.uint8), np.ones((2, 1, 2), np.uint8)


class Server:
    """Times out as often as configured, then answers with version 3."""

    def __init__(self, late: int, error: Exception | None = None) -> None:
        self.late, self.error = late, error
        self.counters = Counters()
        self.scored_requests: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> Scored:
        self.scored_requests.append(request)
        if self.error is not None:
            raise self.error
        if len(self.scored_requests) <= self.late:
            raise DeadlineExceeded("no answer within 600 s")
        self.counters.requests += 1
        return Scored(3, [-1.0, -2.0], [0.5, 0.5], routes=RECORDED if request.record else None)


def score(server: Server) -> tuple[Sample, dict[str, float]]:
    scoring = OldLogprobScorer(cast(LogprobServer, server), temperature=0.7)
    sample = Sample("p", "g", [5], response_ids=[1, 2])
    return asyncio.run(scoring(sample)), scoring.metrics()


def test_late_answer_is_requested_again() -> None:
    sample, metrics = score(server := Server(late=1))
    assert (list(sample.old_logprobs or ()), sample.old_version) == ([-1.0, -2.0], 3)
    assert (metrics["logprob/late"], metrics["logprob/left_to_trainer"]) == (1, 0)
    assert [request.temperature for request in server.scored_requests] == [0.7, 0.7]


def test_trainer_scores_requests_that_time_out_twice() -> None:
    sample, metrics = score(server := Server(late=99))
    assert (sample.old_logprobs, sample.old_version) == (None, None)
    assert len(server.scored_requests) == ATTEMPTS
    assert (metrics["logprob/late"], metrics["logprob/left_to_trainer"]) == (2, 1)
    assert "logprob/wait_seconds" not in metrics, "of no answer"


def test_lost_server_ends_the_run() -> None:
    with pytest.raises(RuntimeFailure, match="every log-prob replica failed"):
        score(Server(0, RuntimeFailure("every log-prob replica failed: 0: …")))


@pytest.mark.parametrize(("replay", "retained"), [("rollout", GIVEN), ("recompute", RECORDED), ("off", GIVEN)])
def test_sample_is_scored_with_its_routes_or_gets_those_of_the_pass(replay: Any, retained: Routes) -> None:
    server = Server(0)
    sample = Sample("p", "g", [5], response_ids=[1, 2], routes=GIVEN, index=3)
    asyncio.run(OldLogprobScorer(cast(LogprobServer, server), temperature=0.7, replay=replay)(sample))
    (request,) = server.scored_requests
    assert sample.routes is not None and np.array_equal(sample.routes, retained) and request.name == "p/3"
    assert (request.routes is GIVEN, request.record) == (replay == "rollout", replay == "recompute")
