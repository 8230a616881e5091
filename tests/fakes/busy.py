"""Replicas with a constant time for each turn, and a tokenizer of bytes."""

from __future__ import annotations

import asyncio

from mtpctl.rollout.protocol import Occupancy
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.replica import FakeReplica

PLACES = 8


class Bytes:
    """Text as its bytes."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


class Steady(FakeReplica):
    """Takes as many seconds for each turn."""

    def __init__(self, turn_s: float = 0.2) -> None:
        super().__init__()
        self.turn_s = turn_s
        self.occupied = Occupancy(PLACES)

    async def generate(self, request: GenerationRequest) -> Sample:
        self.in_flight += 1
        self.occupied.record(self.in_flight)
        await asyncio.sleep(self.turn_s)
        self.in_flight -= 1
        self.occupied.record(self.in_flight)
        request.sample.append(list(b"so!"), [-1.0] * 3, 0)
        request.sample.finish_reason = "stop"
        return request.sample
