"""The common part of vLLM and SGLang engines: requests and their samples, weight updates, deadlines, and failure.

An engine runs in one event loop, in a Ray actor or in a test. Every call has a deadline: an engine that does not answer raises
`EngineDead` and never hangs.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from mtpctl.errors import UserError
from mtpctl.plan.buckets import Bucket
from mtpctl.rollout.protocol import (
    ABORTED,
    DEADLINE,
    EngineDead,
    Health,
    Occupancy,
    SpeculationState,
    add_positions,
    last_turn,
    length_to_stop,
)
from mtpctl.routes import Routes
from mtpctl.samples import GenerationRequest, Sample, Speculation
from mtpctl.sync.engine_target import EngineClient, EngineTarget
from mtpctl.sync.protocol import Manifest, PauseMode, Section, TargetDirty, VersionConflict
from mtpctl.sync.remote import prefetch, start_relay
from mtpctl.sync.update import SyncReport, manifests_to, update_target

CONTROL_DEADLINE_S = 120.0


@dataclass(slots=True)
class GenerationChunk:
    """The output of an engine for one request: tokens, log-probs (nats), versions, finish reason.

    A response is one chunk, or several if it was aborted and continued. `spans` are `(start, end, version)` over `tokens`. `routes` begin
    with the first prompt token for which the sample has no routes. `cached`: prompt tokens that were in the prefix cache; None if the
    engine has no prefix cache. `keeps_kv`: the engine keeps the KV cache across weight updates, so all spans but the first count as stale.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str | None
    speculation: Speculation = field(default_factory=Speculation)
    routes: Routes | None = None
    cached: int | None = None
    keeps_kv: bool = False

    def trim_to_shorter(self) -> None:
        """Drop tokens without log-probs and log-probs without tokens: after an abort either list may be longer."""
        length = min(len(self.tokens), len(self.logprobs))
        del self.tokens[length:], self.logprobs[length:]
        self.spans = [(start, min(end, length), version) for start, end, version in self.spans if start < length]


class Engine(ABC):
    """A loaded engine. Subclasses implement how it answers a request, pauses and aborts."""

    def __init__(self, client: EngineClient, *, version: int, context: int, slots: int, holds: tuple[Section, ...]) -> None:
        """`slots`: requests that the engine runs concurrently; `holds`: sections of a manifest that it applies."""
        self._context = context
        self._ids = count()
        # In order of arrival, which is the order in which engines start requests. The event is set when the request gets a slot.
        self._in_flight: dict[str, asyncio.Event] = {}
        self._slots = slots
        self._occupied = Occupancy(slots)
        self._paused = False
        self._patience_s = CONTROL_DEADLINE_S
        self._failure = ""
        self._holds: Collection[Section] = holds
        self._target = EngineTarget(client, version, with_deadline=self._with_deadline, paused=lambda: self._paused, holds=holds)

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: GenerationRequest) -> Sample:
        """Append a response to the request's sample, and return the sample. A partial response is continued.

        The finish reason is `stop`, `length`, `deadline`, or `abort` after `pause("abort")`: any engine can continue such a sample.

        Raises UserError for a request that the engine does not support, EngineDead if the engine fails, and TargetDirty if it has parts
        of two weight versions.
        """
        self._check_alive()
        sample = request.sample
        prompt = sample.token_ids.tolist()
        room = min(request.max_tokens - len(sample.response_ids), self._room(len(prompt)))
        if room <= 0:
            if not sample.response_ids:
                raise UserError(f"prompt {sample.prompt_id} has {len(prompt)} tokens, the context {self._context}: raise rollout.context")
            sample.finish_reason = "length"
            return sample
        request_id = f"{sample.prompt_id}/{sample.index}/{next(self._ids)}"
        self._in_flight[request_id] = asyncio.Event()
        self._assign_slots()
        try:
            chunk, seconds, late = await self._until_deadline(request, request_id, prompt, room)
        finally:
            del self._in_flight[request_id]
            self._assign_slots()
        seam = len(sample.response_ids)
        self._append(sample, chunk)
        sample.spent_s += seconds
        sample.finish_reason = DEADLINE if late else chunk.finish_reason
        if request.stop:
            self._stop_across(seam, sample, request.stop)
        return sample

    def _stop_across(self, seam: int, sample: Sample, stop: Sequence[str]) -> None:
        """End a response at a stop string that spans `seam`, the start of this chunk. The engine itself searches only this chunk."""
        turn, reach = last_turn(sample), max(len(each.encode()) for each in stop)
        if seam <= turn:
            return
        # A token is at least one byte of text.
        first = max(turn, seam - reach)
        length = length_to_stop(self._read, sample.response_ids[first : seam + reach].tolist(), stop)
        if length is not None:
            sample.truncate(first + length)
            sample.finish_reason = "stop"

    def _room(self, tokens: int) -> int:
        """Number of tokens that the engine can generate after a prompt of `tokens`; 0 or less for none."""
        return self._context - tokens

    def _assign_slots(self) -> None:
        """Set the events of the requests that have a slot."""
        for has_slot in islice(self._in_flight.values(), self._slots):
            has_slot.set()
        self._occupied.count(len(self._in_flight))

    async def _until_deadline(
        self, request: GenerationRequest, request_id: str, prompt: list[int], room: int
    ) -> tuple[GenerationChunk, float, bool]:
        """The chunk, the seconds since the request got a slot, and whether the deadline ended it."""
        has_slot, late = self._in_flight[request_id], False
        began: float | None = None

        async def abort_at_deadline() -> None:
            nonlocal began, late
            await has_slot.wait()
            began = time.monotonic()
            await asyncio.sleep(request.deadline_s)
            late = True
            await self._abort([request_id])

        timer = asyncio.ensure_future(abort_at_deadline())
        try:
            chunk = await self._answer(request, request_id, prompt, room)
        except Exception as error:
            if self._errored:
                raise self._died(error) from error
            raise
        finally:
            timer.cancel()
        seconds = 0.0 if began is None else time.monotonic() - began
        return chunk, seconds, late or (chunk.finish_reason == ABORTED and began is not None and seconds >= request.deadline_s)

    def _append(self, sample: Sample, chunk: GenerationChunk) -> None:
        if chunk.finish_reason == ABORTED:
            chunk.trim_to_shorter()
        if len(chunk.tokens) != len(chunk.logprobs):
            raise self._died(RuntimeError(f"{len(chunk.logprobs)} log-probs came for {len(chunk.tokens)} tokens"))
        if not sample.response_ids:
            sample.cached_tokens = chunk.cached
        for number, (start, end, version) in enumerate(chunk.spans):
            stale = chunk.keeps_kv and number > 0
            sample.append(chunk.tokens[start:end], chunk.logprobs[start:end], version, stale_kv=stale)
        if chunk.routes is not None and chunk.tokens:
            sample.add_routes(chunk.routes)
        counts = sample.speculation
        counts.drafted += chunk.speculation.drafted
        counts.accepted += chunk.speculation.accepted
        counts.steps += chunk.speculation.steps
        add_positions(counts.accepted_by_position, chunk.speculation.accepted_by_position)

    @abstractmethod
    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> GenerationChunk:
        """Generate at most `room` tokens after `prompt`."""

    @abstractmethod
    def _read(self, tokens: list[int]) -> str:
        """Decode `tokens` to the text in which the engine searches for stop strings."""

    @abstractmethod
    async def _abort(self, request_ids: list[str]) -> None:
        """End these requests immediately, with the tokens that they have."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating, and clear the KV cache, which the next weights would make stale.

        With `sync.kv: keep`, running requests keep their part of the cache, and later requests do not reuse it.
        `keep` freezes responses, `abort` makes their `generate` return immediately with the tokens so far, `wait` first lets them finish.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Continue generating. Raises TargetDirty if the engine has parts of two weight versions."""

    @abstractmethod
    async def speculate(self, drafts: int | None = None, *, look_again: bool = False) -> SpeculationState:
        """Set the number of draft tokens per step; -1: automatic, None: unchanged.

        `look_again` makes the engine time all numbers of drafts again. Raises UserError for an engine without `speculation.auto`.
        """

    async def admit_at_once(self, at_once: bool) -> None:
        """Start each request as soon as a slot is free; False: hold requests back if that is faster.

        Raises UserError if the engine cannot hold requests back.
        """
        if not at_once:
            raise UserError("admission: this engine starts each request as soon as a slot is free")

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine. May be called again."""

    @property
    @abstractmethod
    def _errored(self) -> bool:
        """Whether the engine's own processes have failed."""

    @property
    def auto_speculation(self) -> bool:
        """Whether the engine was started with `speculation.auto`."""
        return False

    async def health(self) -> Health:
        """Whether the engine can serve, and if not, why."""
        reason = self._failure or ("weights that are no one version's" if self._target.dirty else "")
        if self._errored and not reason:
            reason = "the engine core has died"
        return Health(not reason, self._target.version, len(self._in_flight), reason, self._occupied.count(len(self._in_flight)))

    # ------------------------------------------------------------------------------------------- weight updates

    @property
    def version(self) -> int:
        """The version of the live weights."""
        return self._target.version

    async def update(self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0) -> SyncReport:
        """Pause, apply the engine's sections of `manifest` (`draft` only if it drafts), optionally verify them, and resume.

        Files in object storage are downloaded before the pause. A paused engine stays paused. Raises what `update_target` raises. After a
        SyncError the engine continues with its old weights.
        """
        if self._target.updating is not None:
            raise VersionConflict(f"an update to version {self._target.updating} is under way")
        if manifest.transport == "storage":
            await asyncio.to_thread(prefetch, manifests_to(manifest, self._target.version))
        started, was_paused = time.monotonic(), self._paused
        self._patience_s = max(CONTROL_DEADLINE_S, deadline_s)
        try:
            await self.pause(mode)
            report = await update_target(self, manifest, verify=verify, deadline_s=deadline_s, holds=self._holds)
            if self.auto_speculation:
                await self.speculate(look_again=True)
        finally:
            self._patience_s = CONTROL_DEADLINE_S
            if not was_paused and not self._target.dirty and not self._failure:
                await self.resume()
        stall = time.monotonic() - started
        return SyncReport(report.version, report.nbytes, report.seconds, stall, report.verified)

    async def serve_relay(self, url: str) -> str:
        """Serve what this host downloads from the store at `url` to other hosts. Returns `host:port`."""
        return await asyncio.to_thread(start_relay, url)

    async def begin_update(self, plan: Manifest, version: int, section: Section) -> None:
        """See `WeightTarget`. The engine must be paused."""
        self._check_alive()
        await self._target.begin_update(plan, version, section)

    async def receive(self, *buckets: Bucket) -> None:
        await self._target.receive(*buckets)

    async def finish_update(self) -> None:
        await self._target.finish_update()

    async def abort_update(self) -> None:
        """See `WeightTarget`. Overwritten weights are restored from the previous version, if that was persisted."""
        await self._target.abort_update()

    async def checksums(self) -> dict[str, str]:
        return await self._target.checksums()

    def mark_dirty(self) -> None:
        self._target.mark_dirty()

    # ------------------------------------------------------------------------------------------------- deadlines

    async def _with_deadline[T](self, step: Awaitable[T], what: str) -> T:
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
        cause: BaseException = error
        while not str(cause) and cause.__cause__ is not None:
            cause = cause.__cause__
        self._failure = self._failure or f"{type(cause).__name__}: {cause}"
        return EngineDead(self._failure)


def speculation_counts(by_count: list[int], drafted: int) -> Speculation:
    """Counts by position from a histogram: `by_count[j]` steps accepted exactly j drafts."""
    by_position = [sum(by_count[position + 1 :]) for position in range(len(by_count) - 1)]
    return Speculation(drafted, sum(by_position), by_position, sum(by_count))
