"""The `Generator` protocol of engines and pools, its types, and the construction of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict

from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.samples import GenerationRequest, Sample, Speculation, response_limit

ABORTED = "abort"
"""Finish reason of a response that was interrupted, and can be continued."""
DEADLINE = "deadline"
"""Finish reason of a response that exceeded its `deadline_s`."""
ENVIRONMENT_ERROR = "environment_error"
"""Finish reason of a response whose environment failed. The response is complete up to the failure."""

ToolCallParser = Callable[[str, Sequence[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
"""Parses the text of an answer, given the tools. Returns the text without calls, and the name and arguments (JSON) of each call."""


class EngineDead(RuntimeFailure):
    """An engine died or does not answer. Another engine must generate its responses."""


@dataclass(slots=True)
class SpecStats:
    """Speculation counts, summed over responses.

    `drafted` and `accepted` count draft tokens, `accepted_by_position[i]` accepted drafts at position i, `steps` verification steps,
    `tokens` response tokens.
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
        """Tokens per verification step, including the sampled one; 1 without speculation."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    def add(self, counts: Speculation, tokens: int) -> None:
        self.drafted += counts.drafted
        self.accepted += counts.accepted
        self.steps += counts.steps
        self.tokens += tokens
        add_positions(self.accepted_by_position, counts.accepted_by_position)


def add_positions(total: list[int], counts: list[int]) -> None:
    """Add counts by position in place; `total` grows as needed."""
    total.extend([0] * (len(counts) - len(total)))
    for position, count in enumerate(counts):
        total[position] += count


class SpeculationState(TypedDict):
    """State of an engine with `rollout.speculation.auto`.

    `drafts`: draft tokens of the next step. `in_trial`: whether a trial is in progress (see `rollout.switch`). `trials`: completed trials.
    `switches`: changes of the choice. `message`: the last change, as a sentence. `steps`, `step_s` (median seconds per decoding step) and
    `draft_s` (median seconds of drafting per step) are by number of drafts, since the last call.
    """

    drafts: int
    in_trial: bool
    trials: int
    switches: int
    message: str
    steps: dict[int, int]
    step_s: dict[int, float]
    draft_s: NotRequired[dict[int, float]]


@dataclass(frozen=True, slots=True)
class Health:
    """State of one engine: responses `in_flight`, the live weight `version`, and occupied slot-seconds (see `Occupancy`)."""

    alive: bool
    version: int = 0
    in_flight: int = 0
    reason: str = ""
    occupied_s: float = 0.0


class Occupancy:
    """Sums the seconds for which an engine's request slots are occupied, over all slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._occupied_slots = 0
        self._seconds = 0.0
        self._since = time.monotonic()

    def record(self, in_flight: int) -> float:
        """Record the current number of requests, including waiting requests. Returns the sum of occupied slot-seconds."""
        now = time.monotonic()
        self._seconds += self._occupied_slots * (now - self._since)
        self._occupied_slots, self._since = min(in_flight, self._slots), now
        return self._seconds


class Generator(Protocol):
    """Generates responses to requests."""

    def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        """Yield every request's sample once, with its response appended, in the order in which they finish.

        Takes requests from the iterable when it has room for them. A finished sample has a `finish_reason` of `stop`, `length`,
        `deadline` or `environment_error`. The sample of a request that became `unwanted` has `abort`, and nothing appended.
        """
        ...

    async def control_speculation(self, drafts: int | None = None) -> list[SpeculationState]:
        """Set the number of draft tokens per step; -1: automatic, None: unchanged. Only with `rollout.speculation.auto`.

        Returns one entry per engine.
        """
        ...


async def as_completed(
    requests: AsyncIterable[GenerationRequest],
    answer: Callable[[GenerationRequest], Awaitable[Sample]],
    wait_for_room: Callable[[Callable[[], int]], Awaitable[object]],
) -> AsyncGenerator[Sample]:
    """Answer requests concurrently, and yield the samples in the order in which they finish. The first error ends the iteration.

    `wait_for_room` is awaited before each request after the first. Its argument is a function that returns the number of requests whose
    samples have not been yielded.
    """
    results: asyncio.Queue[Sample | BaseException | None] = asyncio.Queue()
    tasks: set[asyncio.Task[None]] = set()
    outstanding = 0

    def get_outstanding() -> int:
        return outstanding

    async def answer_request(request: GenerationRequest) -> None:
        try:
            results.put_nowait(await answer(request))
        except Exception as error:
            results.put_nowait(error)

    async def admit() -> None:
        nonlocal outstanding
        try:
            async for request in requests:
                outstanding += 1
                tasks.add(task := asyncio.create_task(answer_request(request)))
                task.add_done_callback(tasks.discard)
                await wait_for_room(get_outstanding)
            results.put_nowait(None)
        except Exception as error:
            results.put_nowait(error)

    admission, is_admitting = asyncio.create_task(admit()), True
    try:
        while is_admitting or outstanding:
            result = await results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                is_admitting = False
                continue
            outstanding -= 1
            yield result
    finally:
        for task in (admission, *tasks):
            task.cancel()


def find_stop_length(decode: Callable[[list[int]], str], tokens: list[int], stop: Sequence[str]) -> int | None:
    """Length of the shortest prefix of `tokens` whose text, by `decode`, contains a stop string; None if no prefix does."""

    def has_stop(length: int) -> bool:
        text = decode(tokens[:length])
        return any(string in text for string in stop)

    if not has_stop(len(tokens)):
        return None
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle + 1, high)
    return low


def find_last_turn_start(sample: Sample) -> int:
    """Index in the response at which the model's last turn begins: after the last token of the environment, whose mask is 0."""
    return sample.loss_mask.tobytes().rfind(0) + 1


class EnvironmentSession(Protocol):
    """The environment of one response. Its methods fill in `Sample.environment` and raise nothing."""

    @property
    def stop(self) -> list[str]:
        """Strings that end a turn; known after `open`."""

    async def open(self, sample: Sample) -> bool:
        """Create the environment. False if that fails, which ends the response."""

    async def append_reply(self, sample: Sample) -> bool:
        """Append the environment's reply to a turn that stopped. False if the response ends here."""

    async def compute_reward(self, sample: Sample) -> None:
        """Request the environment's reward for a complete response."""

    def close(self) -> None:
        """Close the environment in the background."""


class TurnRunner(Protocol):
    """Opens an environment for each response; see `mtpctl.environments.turns.TurnSessions`."""

    def new_session(self, request: GenerationRequest) -> EnvironmentSession: ...

    async def close(self) -> None:
        """Wait until every environment is closed."""


def create_request(
    rollout: RolloutBase, sample: Sample, *, context: int, end_ids: Sequence[int], seed: int | None = None, problem: object = None
) -> GenerationRequest:
    """Build the request for the response of `sample`, with the recipe's sampling settings and limits.

    Args:
        context: maximum tokens of prompt and response together.
        end_ids: the run's end tokens (`mtpctl.data.end_tokens`), including `rollout.stop_ids`.
        seed: seed of this response.
        problem: passed to an environment or agent.
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
