"""What generates responses, whichever engine is behind it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtpctl.errors import RuntimeFailure
from mtpctl.samples import GenerationRequest, Sample, Speculation
from mtpctl.sync.protocol import PauseMode

ABORTED = "abort"
"""Finish reason of a response that was cut short by a pause and may be continued."""
DEADLINE = "deadline"
"""Finish reason of a response that took longer than its `deadline_s`."""


class EngineDead(RuntimeFailure):
    """An engine died or no longer answers; what it was working on must be asked again elsewhere."""


@dataclass(slots=True)
class SpecStats:
    """Speculation summed over finished responses.

    `drafted` and `accepted` count draft tokens, `accepted_by_position[i]` how often the draft at position i was accepted,
    `steps` verification steps, `tokens` response tokens.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def accept_rate(self) -> float:
        """Share of draft tokens accepted; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a verification step, the sampled one included; 1 without speculation."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    def add(self, counts: Speculation | SpecStats, tokens: int = 0) -> None:
        """Add one response's counts, or another engine's sums."""
        self.drafted += counts.drafted
        self.accepted += counts.accepted
        self.steps += counts.steps
        self.tokens += counts.tokens if isinstance(counts, SpecStats) else tokens
        add_positions(self.accepted_by_position, counts.accepted_by_position)


def add_positions(total: list[int], more: list[int]) -> None:
    """Add counts by position in place; `total` grows as needed."""
    total.extend([0] * (len(more) - len(total)))
    for position, count in enumerate(more):
        total[position] += count


@dataclass(frozen=True, slots=True)
class Health:
    """State of one engine: `in_flight` responses being made, and the live weight `version`.

    `occupied_s` is `Occupancy.seconds`.
    """

    alive: bool
    version: int = 0
    in_flight: int = 0
    reason: str = ""
    occupied_s: float = 0.0


class Occupancy:
    """How long an engine's places for requests were taken: divided by time and `places`, the share of them in use."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._seconds = 0.0
        self._since = time.monotonic()

    def count(self, in_flight: int) -> float:
        """From now on `in_flight` requests are there; those beyond the places wait. Returns place-seconds so far."""
        now = time.monotonic()
        self._seconds += self._taken * (now - self._since)
        self._taken, self._since = min(in_flight, self._places), now
        return self._seconds


class Generator(Protocol):
    """Responses for requests, as they come, in any order."""

    def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        """Every request's sample, grown by its response, exactly once.

        Requests are drawn as there is room. A finished sample has a `finish_reason` of `stop`, `length` or `deadline`; one that became
        `unwanted` before has `abort`, and no response of this call.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens. `keep` freezes responses, `abort` cuts them to be continued, `wait` lets them end."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def spec_stats(self) -> SpecStats:
        """Speculation since the start."""
        ...

    async def speculate(self, drafts: int | None = None) -> list[dict[str, Any]]:
        """Have every engine propose `drafts` draft tokens a step, with -1 as many as pay; None only asks.

        One entry for each engine: `drafts` in use, `looks`, `switches`, and `told`, its last change of mind in words. For
        engines with `rollout.speculation.auto` alone.
        """
        ...

    async def health(self) -> list[Health]:
        """One entry for each engine."""
        ...
