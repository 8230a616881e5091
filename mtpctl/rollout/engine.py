"""What every engine does the same way: requests and their samples, weight updates, deadlines, and knowing that it is dead.

An engine lives in one event loop, in a Ray actor or in a test. Every wait has a deadline: an engine that does not answer is
`EngineDead`, never a hang.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, TypeVar

from mtpctl.errors import UserError
from mtpctl.plan.buckets import Bucket
from mtpctl.rollout.environments import last_turn, length_to_stop
from mtpctl.rollout.protocol import ABORTED, DEADLINE, EngineDead, Health, Occupancy, SpecStats, add_positions
from mtpctl.samples import GenerationRequest, Sample, Speculation
from mtpctl.sync.engine_target import EngineClient, EngineTarget
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import PauseMode, Section, TargetDirty, VersionConflict
from mtpctl.sync.session import SyncReport, update_target

T = TypeVar("T")
CONTROL_DEADLINE_S = 120.0


@dataclass(slots=True)
class Stretch:
    """What an engine made for one request in one go: tokens, their log-probs, the versions that made them, and why it ended.

    `spans` are `(start, end, version)` over `tokens`.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str | None
    speculation: Speculation = field(default_factory=Speculation)

    def agree(self) -> None:
        """Drop what only tokens or only log-probs have: an abort may leave them told up to different places."""
        kept = min(len(self.tokens), len(self.logprobs))
        del self.tokens[kept:], self.logprobs[kept:]
        self.spans = [(start, min(end, kept), version) for start, end, version in self.spans if start < kept]


class Engine(ABC):
    """An engine that is loaded and serves. Subclasses say how a request is answered, paused and aborted."""

    def __init__(self, client: EngineClient, *, version: int, context: int, places: int, holds: tuple[Section, ...]) -> None:
        self._context = context
        self._ids = count()
        # In the order in which they came, which is that in which engines begin with them. Set: it has a place.
        self._in_flight: dict[str, asyncio.Event] = {}
        self._places = places
        self._occupied = Occupancy(places)
        self._stats = SpecStats()
        self._paused = False
        self._patience_s = CONTROL_DEADLINE_S
        self._failure = ""
        self._holds: Collection[Section] = holds
        self._target = EngineTarget(client, version, within=self._within, paused=lambda: self._paused, holds=holds)

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: GenerationRequest) -> Sample:
        """The request's sample, grown by what was generated now.

        A sample that already has a response goes on behind it. The finish reason is `stop`, `length`, `deadline`, or
        `abort` after `pause("abort")`: then the tokens so far are kept and the sample may be given to any engine again.

        Raises UserError for a request that the engine cannot serve, EngineDead where the engine fails, and TargetDirty
        where it holds parts of two weight versions.
        """
        self._check_alive()
        sample = request.sample
        prompt = sample.prompt_ids + sample.response_ids
        room = min(request.max_tokens - len(sample.response_ids), self._room(len(prompt)))
        if room <= 0:
            if not sample.response_ids:
                raise UserError(f"prompt {sample.prompt_id} has {len(prompt)} tokens, the context {self._context}: raise rollout.context")
            sample.finish_reason = "length"
            return sample
        request_id = f"{sample.prompt_id}/{sample.index}/{next(self._ids)}"
        self._in_flight[request_id] = asyncio.Event()
        self._give_places()
        try:
            stretch, seconds, late = await self._until_deadline(request, request_id, prompt, room)
        finally:
            del self._in_flight[request_id]
            self._give_places()
        seam = len(sample.response_ids)
        self._append(sample, stretch)
        sample.spent_s += seconds
        sample.finish_reason = DEADLINE if late else stretch.finish_reason
        if request.stop:
            self._stop_over(seam, sample, request.stop)
        return sample

    def _stop_over(self, seam: int, sample: Sample, stop: Sequence[str]) -> None:
        """End a response at the stop string that lies over `seam`, where it went on: the engine reads what is behind that alone."""
        turn, reach = last_turn(sample), max(len(each.encode()) for each in stop)
        if seam <= turn:
            return
        # A token is a byte of text at least.
        first = max(turn, seam - reach)
        length = length_to_stop(self._read, sample.response_ids[first : seam + reach], stop)
        if length is not None:
            sample.cut(first + length)
            sample.finish_reason = "stop"

    def _room(self, tokens: int) -> int:
        """How many tokens the engine can make behind so many; 0 or less where none."""
        return self._context - tokens

    def _give_places(self) -> None:
        """The first in line are worked on."""
        for placed in islice(self._in_flight.values(), self._places):
            placed.set()
        self._occupied.count(len(self._in_flight))

    async def _until_deadline(
        self, request: GenerationRequest, request_id: str, prompt: list[int], room: int
    ) -> tuple[Stretch, float, bool]:
        """What was made, in how many seconds since the request had a place, and whether the deadline cut it."""
        placed, late = self._in_flight[request_id], False
        began: float | None = None

        async def give_up() -> None:
            nonlocal began, late
            await placed.wait()
            began = time.monotonic()
            await asyncio.sleep(request.deadline_s)
            late = True
            await self._abort([request_id])

        timer = asyncio.ensure_future(give_up())
        try:
            stretch = await self._answer(request, request_id, prompt, room)
        except Exception as error:
            if self._errored:
                raise self._died(error) from error
            raise
        finally:
            timer.cancel()
        seconds = 0.0 if began is None else time.monotonic() - began
        return stretch, seconds, late or (stretch.finish_reason == ABORTED and began is not None and seconds >= request.deadline_s)

    def _append(self, sample: Sample, stretch: Stretch) -> None:
        if stretch.finish_reason == ABORTED:
            stretch.agree()
        if len(stretch.tokens) != len(stretch.logprobs):
            raise self._died(RuntimeError(f"{len(stretch.logprobs)} log-probs came for {len(stretch.tokens)} tokens"))
        for start, end, version in stretch.spans:
            sample.append(stretch.tokens[start:end], stretch.logprobs[start:end], version)
        add_counts(sample.speculation, stretch.speculation)
        self._stats.add(stretch.speculation, len(stretch.tokens))

    @abstractmethod
    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> Stretch:
        """At most `room` tokens behind `prompt`."""

    @abstractmethod
    def _read(self, tokens: list[int]) -> str:
        """Text of `tokens`, as the engine looks for stop strings in it."""

    @abstractmethod
    async def _abort(self, request_ids: list[str]) -> None:
        """Have these requests end at once, with what they have."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop making tokens, and see to it that the KV cache is made anew: the next weights would leave it stale.

        `keep` freezes responses, `abort` makes their `generate` return at once with what they have, `wait` lets them end.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Go on. Raises TargetDirty where the weights are no one version's."""

    @abstractmethod
    async def speculate(self, drafts: int | None = None, *, look_again: bool = False) -> dict[str, Any]:
        """See `Generator.speculate`. Raises UserError for an engine that was started without `speculation.auto`."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine. May be called again."""

    @property
    @abstractmethod
    def _errored(self) -> bool:
        """Whether the engine's own processes have failed."""

    @property
    def speculates_by_choice(self) -> bool:
        """Whether the engine was started with `speculation.auto`."""
        return False

    async def spec_stats(self) -> SpecStats:
        """Speculation over all responses since the start."""
        return self._stats

    async def health(self) -> Health:
        """Whether the engine can serve, and if not, why."""
        reason = self._failure or ("weights that are no one version's" if self._target.dirty else "")
        if self._errored and not reason:
            reason = "the engine core has died"
        return Health(not reason, self._target.version, len(self._in_flight), reason, self._occupied.count(len(self._in_flight)))

    # ------------------------------------------------------------------------------------------- weight updates

    @property
    def version(self) -> int:
        """The version whose weights are live."""
        return self._target.version

    async def update(self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0) -> SyncReport:
        """Pause, take in the sections of `manifest` that the engine holds (`draft` where it drafts), check them if asked to, resume.

        An engine that was paused stays so. Raises what `update_target` raises; after a SyncError the engine goes on with the weights
        it had.
        """
        if self._target.updating is not None:
            raise VersionConflict(f"an update to version {self._target.updating} is under way")
        started, stood = time.monotonic(), self._paused
        self._patience_s = max(CONTROL_DEADLINE_S, deadline_s)
        try:
            await self.pause(mode)
            report = await update_target(self, manifest, verify=verify, deadline_s=deadline_s, holds=self._holds)
            if self.speculates_by_choice:
                await self.speculate(look_again=True)
        finally:
            self._patience_s = CONTROL_DEADLINE_S
            if not stood and not self._target.dirty and not self._failure:
                await self.resume()
        stall = time.monotonic() - started
        return SyncReport(report.version, report.nbytes, report.seconds, stall, report.verified)

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """See `WeightTarget`. The engine must be paused."""
        self._check_alive()
        await self._target.begin_update(plan, version, section)

    async def receive(self, *buckets: Bucket) -> None:
        """See `WeightTarget`."""
        await self._target.receive(*buckets)

    async def finish_update(self) -> None:
        """See `WeightTarget`."""
        await self._target.finish_update()

    async def abort_update(self) -> None:
        """See `WeightTarget`. Weights already overwritten are taken again from the version before, where it is kept."""
        await self._target.abort_update()

    async def checksums(self) -> dict[str, str]:
        """See `WeightTarget`."""
        return await self._target.checksums()

    def distrust(self) -> None:
        """See `WeightTarget`."""
        self._target.distrust()

    # ------------------------------------------------------------------------------------------------- deadlines

    async def _within(self, step: Awaitable[T], what: str) -> T:
        seconds = self._patience_s
        try:
            return await asyncio.wait_for(step, seconds)
        except TimeoutError as error:
            raise self._died(RuntimeError(f"{what} took longer than {seconds:.0f} s")) from error
        except Exception as error:
            if self._errored:
                raise self._died(error) from error
            raise

    def _check_alive(self) -> None:
        if self._target.dirty:
            raise TargetDirty("the weights of this engine are no one version's: restart it")
        if self._failure or self._errored:
            raise EngineDead(self._failure or "the engine core has died")

    def _died(self, error: Exception) -> EngineDead:
        said: BaseException = error
        while not str(said) and said.__cause__ is not None:
            said = said.__cause__
        self._failure = self._failure or f"{type(said).__name__}: {said}"
        return EngineDead(self._failure)


def add_counts(total: Speculation, more: Speculation) -> None:
    """Add the counts of one stretch of a response to its sample's."""
    total.drafted += more.drafted
    total.accepted += more.accepted
    total.steps += more.steps
    add_positions(total.accepted_by_position, more.accepted_by_position)


def speculation_counts(by_count: list[int], drafted: int) -> Speculation:
    """Counts by position from a histogram of how many steps accepted exactly j drafts."""
    by_position = [sum(by_count[position + 1 :]) for position in range(len(by_count) - 1)]
    return Speculation(drafted, sum(by_position), by_position, sum(by_count))


def check_options(engine: str, known: Collection[str], asked: Collection[str]) -> None:
    """Raise UserError for an option that `engine` does not know, with the nearest one that it does."""
    from difflib import get_close_matches

    for name in asked:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise UserError(f"rollout.engine_args.{name}: {engine} has no such option" + (f"; did you mean {near[0]}?" if near else ""))
