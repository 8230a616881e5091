"""Base class of vLLM and SGLang engines: generation of samples, weight updates, deadlines, and failure detection.

An engine runs in one event loop, in a Ray actor or in a test. Control calls have a deadline: if the engine does not answer in time, the
call raises `EngineDead`. A response that reaches its deadline ends with the tokens that it has.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field, replace
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
    find_last_turn_start,
    find_stop_length,
)
from mtpctl.routes import Routes
from mtpctl.samples import GenerationRequest, Sample, Speculation
from mtpctl.sync.engine_target import EngineClient, EngineTarget
from mtpctl.sync.protocol import Manifest, PauseMode, Section, TargetDirty, VersionConflict
from mtpctl.sync.remote import prefetch, start_relay
from mtpctl.sync.update import SyncReport, manifests_to, update_target

CONTROL_DEADLINE_S = 120.0
"""Time limit of a control call to the engine, in seconds. During an update, it is the update's deadline if that is longer."""


@dataclass(slots=True)
class GenerationChunk:
    """The output of an engine for one request: tokens, log-probs (nats), weight versions, finish reason.

    A response is one chunk, or several if it was aborted and continued.

    Attributes:
        spans: `(start, end, version)` over `tokens`.
        routes: of prompt and response tokens, from the first token for which the sample has none.
        num_cached_tokens: prompt tokens that were in the prefix cache; None if the engine has no prefix cache.
        keeps_kv: the engine keeps the KV cache across weight updates, so all spans but the first count as stale.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str | None
    speculation: Speculation = field(default_factory=Speculation)
    routes: Routes | None = None
    num_cached_tokens: int | None = None
    keeps_kv: bool = False

    def trim_to_shorter(self) -> None:
        """Drop tokens without log-probs and log-probs without tokens: after an abort either list may be longer."""
        length = min(len(self.tokens), len(self.logprobs))
        del self.tokens[length:], self.logprobs[length:]
        self.spans = [(start, min(end, length), version) for start, end, version in self.spans if start < length]


class Engine(ABC):
    """A loaded engine. Subclasses implement how it answers a request, pauses and aborts."""

    def __init__(self, client: EngineClient, *, version: int, context: int, slots: int, sections: tuple[Section, ...]) -> None:
        """`slots`: requests that the engine runs concurrently; `sections`: sections of a manifest that it applies."""
        self._context = context
        self._request_numbers = count()
        # Requests in order of arrival, in which engines start them. The event is set when the request gets a slot.
        self._in_flight: dict[str, asyncio.Event] = {}
        self._slots = slots
        self._occupancy = Occupancy(slots)
        self._paused = False
        self._control_deadline_s = CONTROL_DEADLINE_S
        self._failure = ""
        self._sections: Collection[Section] = sections
        self._target = EngineTarget(client, version, with_deadline=self._with_deadline, paused=lambda: self._paused, sections=sections)

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: GenerationRequest) -> Sample:
        """Append a response to the request's sample, and return the sample. A partial response is continued.

        The finish reason is `stop`, `length`, `deadline`, or `abort` after `pause("abort")`: any engine can continue such a sample.

        Raises UserError for a request that the engine does not support, EngineDead if the engine fails, and TargetDirty if its weights
        are a mix of two versions.
        """
        self._check_alive()
        sample = request.sample
        prompt = sample.token_ids.tolist()
        max_tokens = min(request.max_tokens - len(sample.response_ids), self._remaining_context(len(prompt)))
        if max_tokens <= 0:
            if not sample.response_ids:
                raise UserError(
                    f"prompt {sample.prompt_id} has {len(prompt)} tokens, the context has {self._context}; raise rollout.context"
                )
            sample.finish_reason = "length"
            return sample
        request_id = f"{sample.prompt_id}/{sample.index}/{next(self._request_numbers)}"
        self._in_flight[request_id] = asyncio.Event()
        self._assign_slots()
        try:
            chunk, seconds, timed_out = await self._generate_until_deadline(request, request_id, prompt, max_tokens)
        finally:
            del self._in_flight[request_id]
            self._assign_slots()
        chunk_start = len(sample.response_ids)
        self._append_chunk(sample, chunk)
        sample.spent_s += seconds
        # A response may end by itself while its abort is in progress.
        sample.finish_reason = DEADLINE if timed_out and chunk.finish_reason == ABORTED else chunk.finish_reason
        if request.stop:
            self._truncate_at_stop(chunk_start, sample, request.stop)
        return sample

    def _truncate_at_stop(self, chunk_start: int, sample: Sample, stop: Sequence[str]) -> None:
        """End a response at a stop string that spans `chunk_start`, the start of this chunk. The engine itself searches only this chunk."""
        turn_start, max_stop_bytes = find_last_turn_start(sample), max(len(string.encode()) for string in stop)
        if chunk_start <= turn_start:
            return
        # A token has at least one byte of text, so a stop string has at most `max_stop_bytes` tokens.
        search_start = max(turn_start, chunk_start - max_stop_bytes)
        length = find_stop_length(self._decode, sample.response_ids[search_start : chunk_start + max_stop_bytes].tolist(), stop)
        if length is not None:
            sample.truncate(search_start + length)
            sample.finish_reason = "stop"

    def _remaining_context(self, prompt_tokens: int) -> int:
        """Number of tokens that the engine can generate after a prompt of `prompt_tokens` tokens; none if not positive."""
        return self._context - prompt_tokens

    def _assign_slots(self) -> None:
        """Set the events of the requests that have a slot."""
        for has_slot in islice(self._in_flight.values(), self._slots):
            has_slot.set()
        self._occupancy.record(len(self._in_flight))

    async def _generate_until_deadline(
        self, request: GenerationRequest, request_id: str, prompt: list[int], max_tokens: int
    ) -> tuple[GenerationChunk, float, bool]:
        """Return the chunk, the seconds since the request got a slot, and whether the deadline ended it."""
        has_slot, timed_out = self._in_flight[request_id], False
        started_at: float | None = None

        async def abort_at_deadline() -> None:
            nonlocal started_at, timed_out
            await has_slot.wait()
            started_at = time.monotonic()
            await asyncio.sleep(request.deadline_s)
            timed_out = True
            await self._abort([request_id])

        timer = asyncio.ensure_future(abort_at_deadline())
        try:
            chunk = await self._answer(request, request_id, prompt, max_tokens)
        except Exception as error:
            if self._errored:
                raise self._mark_failed(error) from error
            raise
        finally:
            timer.cancel()
        seconds = 0.0 if started_at is None else time.monotonic() - started_at
        if chunk.finish_reason == ABORTED and started_at is not None and seconds >= request.deadline_s:
            timed_out = True  # A pause aborted the request at its deadline, before the timer did.
        return chunk, seconds, timed_out

    def _append_chunk(self, sample: Sample, chunk: GenerationChunk) -> None:
        if chunk.finish_reason == ABORTED:
            chunk.trim_to_shorter()
        if len(chunk.tokens) != len(chunk.logprobs):
            raise self._mark_failed(RuntimeError(f"{len(chunk.logprobs)} log-probs came for {len(chunk.tokens)} tokens"))
        if not sample.response_ids:
            sample.cached_tokens = chunk.num_cached_tokens
        for index, (start, end, version) in enumerate(chunk.spans):
            is_stale = chunk.keeps_kv and index > 0
            sample.append(chunk.tokens[start:end], chunk.logprobs[start:end], version, stale_kv=is_stale)
        if chunk.routes is not None and chunk.tokens:
            sample.add_routes(chunk.routes)
        counts = sample.speculation
        counts.drafted += chunk.speculation.drafted
        counts.accepted += chunk.speculation.accepted
        counts.steps += chunk.speculation.steps
        add_positions(counts.accepted_by_position, chunk.speculation.accepted_by_position)

    @abstractmethod
    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], max_tokens: int) -> GenerationChunk:
        """Generate at most `max_tokens` tokens after `prompt`."""

    @abstractmethod
    def _decode(self, tokens: list[int]) -> str:
        """Decode `tokens` to the text in which the engine searches for stop strings."""

    @abstractmethod
    async def _abort(self, request_ids: list[str]) -> None:
        """End these requests immediately, with the tokens that they have."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating, and clear the KV cache, which the next weights would make stale.

        With `sync.kv: keep`, running requests keep their part of the cache, and later requests do not reuse it.
        `mode`: `keep` freezes responses, `abort` makes `generate` return immediately with partial responses, `wait` first finishes them.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Continue generating. Raises TargetDirty if the weights are a mix of two versions."""

    @abstractmethod
    async def control_speculation(self, drafts: int | None = None, *, weights_changed: bool = False) -> SpeculationState:
        """Set the number of draft tokens per step; -1: automatic, None: unchanged.

        `weights_changed`: the weights were updated, so the acceptance must be measured again. Raises UserError for an engine without
        `speculation.auto`.
        """

    async def set_immediate_admission(self, enabled: bool) -> None:
        """True: start each request as soon as a slot is free. False: hold requests back if that is faster.

        Raises UserError if the engine cannot hold requests back.
        """
        if not enabled:
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
        reason = self._failure or ("the weights are a mix of two versions" if self._target.dirty else "")
        if self._errored and not reason:
            reason = "the engine core has died"
        return Health(not reason, self._target.version, len(self._in_flight), reason, self._occupancy.record(len(self._in_flight)))

    # ------------------------------------------------------------------------------------------- weight updates

    @property
    def version(self) -> int:
        """The version of the live weights."""
        return self._target.version

    async def update(self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0) -> SyncReport:
        """Pause, apply the engine's sections of `manifest` (`draft` only with a drafter), optionally verify them, and resume.

        Files in object storage are downloaded before the pause. An engine that was paused before stays paused. Raises the errors of
        `update_target`. After a SyncError the engine continues with its old weights.
        """
        if self._target.updating is not None:
            raise VersionConflict(f"an update to version {self._target.updating} is under way")
        if manifest.transport == "storage":
            await asyncio.to_thread(prefetch, manifests_to(manifest, self._target.version))
        started_at, was_paused = time.monotonic(), self._paused
        self._control_deadline_s = max(CONTROL_DEADLINE_S, deadline_s)
        try:
            await self.pause(mode)
            paused_at = time.monotonic()
            report = await update_target(self, manifest, verify=verify, deadline_s=deadline_s, sections=self._sections)
            if self.auto_speculation:
                await self.control_speculation(weights_changed=True)
        finally:
            self._control_deadline_s, updated_at = CONTROL_DEADLINE_S, time.monotonic()
            if not was_paused and not self._target.dirty and not self._failure:
                await self.resume()
        resumed_at = time.monotonic()
        phases = {"pause": paused_at - started_at, **report.phases, "resume": resumed_at - updated_at}
        return replace(report, stall_seconds=resumed_at - started_at, phases=phases)

    async def serve_relay(self, url: str) -> str:
        """Serve the files that this host downloads from the store at `url` to other hosts. Returns the relay's `host:port`."""
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

    async def checksums(self, *sections: Section) -> dict[str, str]:
        return await self._target.checksums(*sections)

    def mark_dirty(self) -> None:
        self._target.mark_dirty()

    # ------------------------------------------------------------------------------------------------- deadlines

    async def _with_deadline[T](self, step: Awaitable[T], action: str) -> T:
        deadline_s = self._control_deadline_s
        try:
            return await asyncio.wait_for(step, deadline_s)
        except TimeoutError as error:
            raise self._mark_failed(RuntimeError(f"{action} took longer than {deadline_s:.0f} s")) from error
        except Exception as error:
            if self._errored:
                raise self._mark_failed(error) from error
            raise

    def _check_alive(self) -> None:
        if self._target.dirty:
            raise TargetDirty("the weights of this engine are a mix of two versions: restart it")
        if self._failure or self._errored:
            raise EngineDead(self._failure or "the engine core has died")

    def _mark_failed(self, error: Exception) -> EngineDead:
        """Record the first failure, and return the error to raise."""
        cause: BaseException = error
        while not str(cause) and cause.__cause__ is not None:
            cause = cause.__cause__
        self._failure = self._failure or f"{type(cause).__name__}: {cause}"
        return EngineDead(self._failure)


def speculation_from_histogram(histogram: list[int], drafted: int) -> Speculation:
    """Compute the counts by position from a histogram: `histogram[j]` steps accepted exactly j drafts."""
    accepted_by_position = [sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)]
    return Speculation(drafted, sum(accepted_by_position), accepted_by_position, sum(histogram))
