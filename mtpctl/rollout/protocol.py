"""The `Generator` protocol, which every rollout engine and the pool of them have, and the types of its answers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, Protocol, TypedDict

from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.samples import GenerationRequest, Sample, Speculation, response_limit
from mtpctl.sync.protocol import PauseMode

ABORTED = "abort"
"""Finish reason of a response that a pause ended early, and that may be continued."""
DEADLINE = "deadline"
"""Finish reason of a response that took longer than its `deadline_s`."""
ENVIRONMENT_ERROR = "environment_error"
"""Finish reason of a response whose environment failed: it has everything up to there."""


class EngineDead(RuntimeFailure):
    """An engine died or no longer answers; another engine must generate the responses that it had in flight."""


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


class SpeculationState(TypedDict):
    """How an engine with `rollout.speculation.auto` chooses its number of draft tokens.

    `drafts`: the number that the next step proposes. `looking`: it is timing other numbers now; `looks`: how often it has done so;
    `switches`: how often its choice has changed; `told`: the last such change, as a sentence. `steps`, `step_s` and `draft_s` are by
    number of drafts and since the last call: steps, median seconds of a step that only decodes, median seconds of drafting in it.
    """

    drafts: int
    looking: bool
    looks: int
    switches: int
    told: str
    steps: dict[int, int]
    step_s: dict[int, float]
    draft_s: NotRequired[dict[int, float]]


@dataclass(frozen=True, slots=True)
class Health:
    """State of one engine: `in_flight` responses being generated, and the live weight `version`.

    `occupied_s` is `Occupancy.seconds`.
    """

    alive: bool
    version: int = 0
    in_flight: int = 0
    reason: str = ""
    occupied_s: float = 0.0


class Occupancy:
    """Seconds for which an engine's places for requests were taken, summed over the places.

    Divided by the time and by `places` that is the share of places in use.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._seconds = 0.0
        self._since = time.monotonic()

    def count(self, in_flight: int) -> float:
        """Note that `in_flight` requests are there from now on; those beyond the places wait. Returns the sum so far."""
        now = time.monotonic()
        self._seconds += self._taken * (now - self._since)
        self._taken, self._since = min(in_flight, self._places), now
        return self._seconds


class Generator(Protocol):
    """Generates responses to requests."""

    def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        """Yield every request's sample once, with its response appended, in the order in which they finish.

        Takes requests from the iterable as it has room for them. A finished sample has a `finish_reason` of `stop`, `length`,
        `deadline` or `environment_error`; the sample of a request that became `unwanted` before has `abort`, and nothing appended.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. `keep` freezes responses, `abort` ends them to be continued later, `wait` lets them finish first."""
        ...

    async def resume(self) -> None:
        """Go on generating after `pause`."""
        ...

    async def spec_stats(self) -> SpecStats:
        """Speculation counts since the start."""
        ...

    async def speculate(self, drafts: int | None = None) -> list[SpeculationState]:
        """Set the number of draft tokens a step: `drafts`, or with -1 the engine's own choice; None changes nothing.

        Returns one entry for each engine. Only engines with `rollout.speculation.auto` have this.
        """
        ...

    async def health(self) -> list[Health]:
        """One entry for each engine."""
        ...


def length_to_stop(read: Callable[[list[int]], str], tokens: list[int], stop: Sequence[str]) -> int | None:
    """Length of the shortest prefix of `tokens` whose text, by `read`, has a stop string in it; None where no prefix has."""

    def stopped(length: int) -> bool:
        text = read(tokens[:length])
        return any(each in text for each in stop)

    if not stopped(len(tokens)):
        return None
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle + 1, high)
    return low


def last_turn(sample: Sample) -> int:
    """Where the model's last turn begins in the response."""
    return sample.loss_mask.tobytes().rfind(0) + 1


class EnvironmentSession(Protocol):
    """The environment of one response. Its methods fill in `Sample.environment` and raise nothing."""

    @property
    def stop(self) -> list[str]:
        """Strings that end a turn; known after `open`."""

    async def open(self, sample: Sample) -> bool:
        """Create the environment. False if that fails, which ends the response."""

    async def go_on(self, sample: Sample) -> bool:
        """Append the environment's reply to a turn that stopped. False if the response ends here."""

    async def settle(self, sample: Sample) -> None:
        """Request the environment's reward for a complete response."""

    def close(self) -> None:
        """Close the environment in the background."""


class TurnRunner(Protocol):
    """Opens an environment for each response; see `mtpctl.environments.turns.Turns`."""

    def play(self, request: GenerationRequest) -> EnvironmentSession: ...

    async def close(self) -> None:
        """Wait until every environment is closed."""


# The request for one response, with the sampling settings and budgets of a recipe.


def request_for(
    rollout: RolloutBase, sample: Sample, *, context: int, end_ids: Sequence[int], seed: int | None = None, problem: object = None
) -> GenerationRequest:
    """The request that generates `sample`, whose prompt and response may have `context` tokens.

    `end_ids`: the run's end tokens (`mtpctl.data.end_tokens`), `rollout.stop_ids` included. `seed`: of this response alone. `problem`:
    what an environment or agent gets.
    """
    return GenerationRequest(
        sample=sample,
        max_tokens=response_limit(sample, max_tokens=rollout.max_tokens, context=context),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=seed,
        stop=rollout.stop,
        stop_token_ids=list(end_ids),
        deadline_s=rollout.deadline_s,
        problem=problem,
    )
