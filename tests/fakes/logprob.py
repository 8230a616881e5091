"""Fake log-prob replicas without a model: the score of a token is minus its id."""

from __future__ import annotations

import time
from typing import Any

from mtpctl.errors import RuntimeFailure
from mtpctl.logprob.protocol import Bounds, Scored, ScoreRequest
from mtpctl.logprob.replica import Replica
from mtpctl.sync.protocol import Manifest, SectionPlan
from tests.fakes.logprob_ranks import LocalRanks


class FakeRank:
    """Answers every token with minus its id; takes `seconds` for each token of a batch."""

    def __init__(self, seconds: float = 0.0, version: int = 0, poison: int | None = None) -> None:
        self.seconds, self.version, self.poison = seconds, version, poison
        self.batches: list[list[int]] = []
        self.refuse: Exception | None = None
        self.incoming = version

    def score(self, requests: list[ScoreRequest], version: int) -> list[Scored]:
        self.batches.append([request.tokens for request in requests])
        time.sleep(self.seconds * sum(request.tokens for request in requests))
        if any(self.poison in request.token_ids for request in requests):
            raise ValueError("not a number")
        assert version == self.version
        return [Scored(version, [-float(i) for i in r.token_ids[r.prompt_length :]], []) for r in requests]

    def ping(self) -> list[int]:
        return [self.version]

    def begin_update(self, manifest: dict[str, Any], version: int, section: str) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.incoming = version

    def receive(self, *indices: int) -> None: ...

    def finish_update(self) -> None:
        self.version = self.incoming

    def abort_update(self) -> list[int]:
        return [self.version]

    def checksums(self) -> dict[str, str]:
        return {"w": "another"}


class Started:
    """Starts replicas and remembers them."""

    def __init__(self, **rank: Any) -> None:
        self.rank = rank
        self.ranks: list[LocalRanks] = []
        self.failing = 0

    async def __call__(self, index: int) -> Replica:
        if self.failing:
            self.failing -= 1
            raise RuntimeFailure("no memory")
        self.ranks.append(LocalRanks(FakeRank(**self.rank)))
        return Replica(self.ranks[-1], Bounds(512, 320, 1), 0, keep_previous=False)


def manifest(version: int) -> Manifest:
    return Manifest(version, "shm", "nowhere", {"target": SectionPlan(())})


class Store:
    """Published versions."""

    def __init__(self) -> None:
        self.there: list[int] = []

    def versions(self) -> list[int]:
        return self.there

    def open(self, version: int) -> Manifest:
        return manifest(version)
