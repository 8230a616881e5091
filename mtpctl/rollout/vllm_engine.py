"""One vLLM engine: responses with log-probs, version spans and speculation counts, and a target for weight updates.

Runs inside an event loop, in a Ray actor or in a test. Every wait has a deadline: an engine that does not answer is
`EngineDead`, never a hang.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from importlib.metadata import entry_points
from itertools import count
from typing import Any, TypeVar

from mtpctl.plan import Bucket
from mtpctl.recipe import EnvironmentMissing, UserError
from mtpctl.rollout.protocol import DEADLINE, EngineDead, Health, Occupancy, SpecStats, add_positions
from mtpctl.rollout.vllm_settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample, Speculation
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import PauseMode, Section, TargetDirty, VersionConflict
from mtpctl.sync.session import SyncReport, update_target
from mtpctl.sync.vllm_target import ADAPTER, ADAPTER_ID, EngineClient, VllmTarget, adapter_request

T = TypeVar("T")
CONTROL_DEADLINE_S = 120.0


class VllmEngine:
    """Build with `await VllmEngine.start(settings)`."""

    def __init__(self, llm: Any, settings: VllmSettings, version: int) -> None:
        self._llm = llm
        self._settings = settings
        self._context = int(llm.model_config.max_model_len)
        self._ids = count()
        self._in_flight: set[str] = set()
        self._occupied = Occupancy(int(settings.args["max_num_seqs"]))
        self._stats = SpecStats()
        self._paused = False
        self._failure = ""
        self._holds: tuple[Section, ...] = (
            ("target", "draft", "adapter") if "speculative_config" in settings.args else ("target", "adapter")
        )
        self._target = VllmTarget(EngineClient(llm), version, within=self._within, paused=lambda: self._paused, holds=self._holds)

    @classmethod
    async def start(cls, settings: VllmSettings, *, version: int = 0) -> VllmEngine:
        """Load the model and warm up. `version` is what its weights count as until the first update.

        Raises UserError for an unknown name in `rollout.engine_args`, and what vLLM raises for a model it cannot load.
        """
        os.environ.update(settings.environment)
        check_plugin()
        import torch
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if settings.threads:
            torch.set_num_threads(settings.threads)
        check_engine_args(settings.args)
        args = AsyncEngineArgs(**settings.args)
        if settings.in_loop:
            from mtpctl.compat.vllm_loop import core_in_loop

            with core_in_loop():
                llm = AsyncLLM.from_engine_args(args)
        else:
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
        engine = cls(llm, settings, version)
        await engine._within(llm.update_weight_version(str(version)), "setting the weight version")
        return engine

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
        room = min(request.max_tokens - len(sample.response_ids), self._context - len(prompt))
        if room <= 0:
            if not sample.response_ids:
                raise UserError(f"prompt {sample.prompt_id} has {len(prompt)} tokens, the context {self._context}: raise rollout.context")
            sample.finish_reason = "length"
            return sample
        request_id = f"{sample.prompt_id}/{sample.index}/{next(self._ids)}"
        self._in_flight.add(request_id)
        self._occupied.count(len(self._in_flight))
        try:
            output, late = await self._run(request, request_id, prompt, room)
        finally:
            self._in_flight.discard(request_id)
            self._occupied.count(len(self._in_flight))
        completion = output.outputs[0]
        self._append(sample, completion)
        sample.finish_reason = DEADLINE if late else completion.finish_reason
        return sample

    async def _run(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> tuple[Any, bool]:
        """The final output, and whether the deadline cut it."""
        from vllm.inputs.engine import tokens_input

        late = False

        async def give_up() -> None:
            nonlocal late
            await asyncio.sleep(request.deadline_s)
            late = True
            await self._llm.abort(request_id)

        timer = asyncio.ensure_future(give_up())
        try:
            output = None
            asked = self._llm.generate(tokens_input(prompt), self._sampling(request, room), request_id, lora_request=self._adapter())
            async for step in asked:
                output = step
        except Exception as error:
            if self._llm.errored:
                raise self._died(error) from error
            raise
        finally:
            timer.cancel()
        if output is None:
            raise self._died(RuntimeError(f"request {request_id} ended without an output"))
        return output, late

    def _adapter(self) -> Any:
        """The adapter that requests are answered with, once one came."""
        folder = self._target.adapter
        return None if folder is None else adapter_request(ADAPTER, ADAPTER_ID, str(folder))

    def _sampling(self, request: GenerationRequest, room: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request.stop and self._settings.args["skip_tokenizer_init"]:
            raise UserError("stop strings need the engine's tokenizer: name them in rollout.stop, or stop by token ids")
        # A continued response must not draw again the random numbers of its first part.
        seed = None if request.seed is None else (request.seed + 1_000_003 * len(request.sample.response_ids)) % (1 << 62)
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=seed,
            max_tokens=room,
            stop=request.stop or None,
            stop_token_ids=request.stop_token_ids or None,
            ignore_eos=self._settings.args["skip_tokenizer_init"],
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _append(self, sample: Sample, completion: Any) -> None:
        tokens, logprobs = list(completion.token_ids), list(completion.logprobs.logprobs) if completion.logprobs else []
        if len(tokens) != len(logprobs):
            raise self._died(RuntimeError(f"vLLM gave {len(logprobs)} log-probs for {len(tokens)} tokens"))
        for span in completion.weight_versions or []:
            sample.append(tokens[span.start : span.end], logprobs[span.start : span.end], int(span.version))
        if completion.spec_decode_metrics is not None:
            counts = _speculation(completion.spec_decode_metrics)
            add_counts(sample.speculation, counts)
            self._stats.add(counts)
        self._stats.tokens += len(tokens)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop scheduling, and drop the KV cache, which the next weights would make stale.

        `keep` freezes responses, `abort` makes their `generate` return at once with what they have, `wait` lets them end.
        """
        if mode == "abort":
            await self._within(self._llm.abort(list(self._in_flight)), "aborting responses")
        await self._within(self._llm.pause_generation(mode=mode, clear_cache=True), f"pausing ({mode})")
        self._paused = True

    async def resume(self) -> None:
        """Go on. Raises TargetDirty where weights are of two versions."""
        self._check_alive()
        await self._within(self._llm.resume_generation(), "resuming")
        self._paused = False

    async def spec_stats(self) -> SpecStats:
        """Speculation over all responses since the start."""
        return self._stats

    @property
    def speculates_by_choice(self) -> bool:
        """Whether the engine was started with `speculation.auto`."""
        return "scheduler_cls" in self._settings.args

    async def speculate(self, drafts: int | None = None, *, look_again: bool = False) -> dict[str, Any]:
        """Have every step propose `drafts` tokens, or with -1 as many as pay; None only asks.

        Returns `drafts` in use, how often the engine looked (`looks`) and changed its mind (`switches`), and `told`, the last time
        that it did, in words. Raises UserError for an engine that was started without `speculation.auto`.
        """
        if not self.speculates_by_choice:
            raise UserError("rollout.speculation.auto: is off, so the number of draft tokens is fixed at the start")
        state: dict[str, Any] = await self._within(
            self._llm.engine_core.call_utility_async("mtpctl_speculation", drafts, look_again), "asking the scheduler"
        )
        return state

    async def health(self) -> Health:
        """Whether the engine can serve, and if not, why."""
        reason = self._failure or ("weights of two versions" if self._target.dirty else "")
        if self._llm.errored and not reason:
            reason = "the engine core has died"
        return Health(not reason, self._target.version, len(self._in_flight), reason, self._occupied.count(len(self._in_flight)))

    async def shutdown(self) -> None:
        """End the engine. May be called again."""
        self._llm.shutdown()
        self._target.close()

    # ------------------------------------------------------------------------------------------- weight updates

    @property
    def version(self) -> int:
        """The version whose weights are live."""
        return self._target.version

    async def update(self, manifest: Manifest, *, mode: PauseMode = "keep", verify: bool = False, deadline_s: float = 120.0) -> SyncReport:
        """Pause, take in the sections of `manifest` that the engine holds (`draft` where it drafts), check them if asked to, resume.

        Raises what `update_target` raises; after a SyncError the engine goes on with the weights it had.
        """
        if self._target.updating is not None:
            raise VersionConflict(f"an update to version {self._target.updating} is under way")
        started = time.monotonic()
        await self.pause(mode)
        try:
            report = await update_target(self, manifest, verify=verify, deadline_s=deadline_s, holds=self._holds)
            if self.speculates_by_choice:
                await self.speculate(look_again=True)
        finally:
            if not self._target.dirty and not self._failure:
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

    # ------------------------------------------------------------------------------------------------- deadlines

    async def _within(self, step: Awaitable[T], what: str) -> T:
        try:
            return await asyncio.wait_for(step, CONTROL_DEADLINE_S)
        except TimeoutError as error:
            raise self._died(RuntimeError(f"{what} took longer than {CONTROL_DEADLINE_S:.0f} s")) from error

    def _check_alive(self) -> None:
        if self._target.dirty:
            raise TargetDirty("this engine holds weights of two versions: restart it")
        if self._failure or self._llm.errored:
            raise EngineDead(self._failure or "the engine core has died")

    def _died(self, error: Exception) -> EngineDead:
        self._failure = self._failure or f"{type(error).__name__}: {error}"
        return EngineDead(self._failure)


def check_plugin() -> None:
    """Raise EnvironmentMissing where vLLM's processes would not find mtpctl's stand-ins and weight receiver."""
    if not entry_points(group="vllm.general_plugins", name="mtpctl"):
        raise EnvironmentMissing("mtpctl: vLLM finds its plugin through the package's entry point; install mtpctl (pip install -e .)")


def check_engine_args(args: dict[str, Any]) -> None:
    """Raise UserError for a name that vLLM does not know, with the nearest one that it does."""
    from dataclasses import fields
    from difflib import get_close_matches

    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs)]
    for name in args:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise UserError(f"rollout.engine_args.{name}: vLLM has no such option" + (f"; did you mean {near[0]}?" if near else ""))


def add_counts(total: Speculation, more: Speculation) -> None:
    """Add the counts of one stretch of a response to its sample's."""
    total.drafted += more.drafted
    total.accepted += more.accepted
    total.steps += more.steps
    add_positions(total.accepted_by_position, more.accepted_by_position)


def _speculation(metrics: Any) -> Speculation:
    """vLLM's histogram (how many steps accepted exactly j drafts) as counts by position."""
    by_count = metrics.histogram
    by_position = [sum(by_count[position + 1 :]) for position in range(len(by_count) - 1)]
    return Speculation(metrics.num_draft_tokens, sum(by_position), by_position, sum(by_count))
