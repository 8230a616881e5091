"""One vLLM engine: responses with log-probs, version spans, speculation counts and routes, and a target for weight updates."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.cluster.process import importing
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.rollout.engine import Engine, GenerationChunk, speculation_counts
from mtpctl.rollout.installed import check_options
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.vllm.client import VllmClient, adapter_request
from mtpctl.rollout.vllm.patches import logprobs, pauses
from mtpctl.rollout.vllm.serving import rejection, sampling_of
from mtpctl.rollout.vllm.settings import Arguments, VllmSettings
from mtpctl.samples import GenerationRequest, Speculation
from mtpctl.sync.engine_target import ADAPTER, ADAPTER_ID
from mtpctl.sync.protocol import PauseMode

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmEngine(Engine):
    """vLLM in this process. Build with `await VllmEngine.start(settings)`."""

    def __init__(self, llm: AsyncLLM, settings: VllmSettings, version: int) -> None:
        super().__init__(
            VllmClient(llm),
            version=version,
            context=int(llm.model_config.max_model_len),
            slots=int(settings.args["max_num_seqs"]),
            holds=("target", "draft", "adapter") if "speculative_config" in settings.args else ("target", "adapter"),
        )
        self._llm = llm
        self._settings = settings
        self._released = False

    @classmethod
    async def start(cls, settings: VllmSettings, *, version: int = 0) -> VllmEngine:
        """Load the model and warm up. `version` is the version of its weights until the first update.

        Raises UserError for an unknown name in `rollout.engine_args` and for heads that vLLM has no attention for, and what vLLM raises
        for a model it cannot load; where its core fails in a process of its own, with the exception of that process.
        """
        os.environ.update(settings.environment)
        check_plugin()
        with importing():
            import torch
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

        if settings.threads:
            torch.set_num_threads(settings.threads)
        check_engine_args(settings.args)
        args = AsyncEngineArgs(**settings.args)
        check_heads(args)
        # vLLM sizes a step by the usage. By default it takes 2,048 tokens of prompts a step, on an H200 an eighth of what it takes for
        # offline generation, which a rollout is.
        use = UsageContext.LLM_CLASS
        if settings.in_loop:
            from mtpctl.rollout.vllm.patches.loop import core_in_loop

            with core_in_loop():
                llm = AsyncLLM.from_engine_args(args, usage_context=use)
        else:
            with named_in_failures():
                llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args, usage_context=use)
        engine = cls(llm, settings, version)
        await engine._within(llm.update_weight_version(str(version)), "setting the weight version")
        if settings.args.get("enable_lora"):
            await engine._target.hold_adapter()
        return engine

    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], room: int) -> GenerationChunk:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        output = None
        try:
            asked = self._llm.generate(tokens_input(prompt), self._sampling(request, room), request_id, lora_request=self._adapter())
            async for step in asked:
                output = step
        except VLLMClientError as error:
            raise UserError(rejection(error)) from error
        if output is None:
            raise self._died(RuntimeError(f"request {request_id} ended without an output"))
        if output.outputs[0].finish_reason == "error":
            raise UserError("response_format: vLLM cannot compile it; send a simpler schema or grammar")
        cached = output.num_cached_tokens if self._llm.vllm_config.cache_config.enable_prefix_caching else None
        return _chunk(output.outputs[0], self._settings.routes, cached)

    def _read(self, tokens: list[int]) -> str:
        return str(self._llm.get_tokenizer().decode(tokens, skip_special_tokens=True))

    async def _abort(self, request_ids: list[str]) -> None:
        await pauses.fetch_partial_outputs(self._llm, request_ids)
        await self._llm.abort(request_ids)

    def _adapter(self) -> LoRARequest | None:
        """The adapter that requests are answered with; None for an engine without adapters."""
        folder = self._target.adapter
        return None if folder is None else adapter_request(ADAPTER, ADAPTER_ID, str(folder))

    def _sampling(self, request: GenerationRequest, room: int) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request.stop and self._settings.args["skip_tokenizer_init"]:
            raise UserError("stop strings need the engine's tokenizer: name them in rollout.stop, or stop by token ids")
        steering = sampling_of(request.steering, drafts="speculative_config" in self._settings.args) if request.steering else {}
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
            # The request contains all end tokens of the run. vLLM would otherwise use those of its own tokenizer, if it loads one.
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop),
            routed_experts_prompt_start=request.sample.routed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # The front end finds stop strings and trims the tokens behind them: it needs log-probs and routes together with the tokens.
            extra_args=None if request.stop else dict(logprobs.DEFERRED),
            **steering,
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "abort":
            await self._within(self._abort(list(self._in_flight)), "aborting responses")
        await self._within(pauses.pause(self._llm, mode), f"pausing ({mode})")
        self._paused = True
        if self._settings.release_kv and not self._released:
            await self._within(self._llm.release_kv_cache_memory(), "giving the KV cache back")
            self._released = True

    async def resume(self) -> None:
        self._check_alive()
        if self._released:
            await self._within(self._llm.wake_up(["kv_cache"]), "taking memory for the KV cache")
            self._released = False
        await self._within(self._llm.resume_generation(), "resuming")
        self._paused = False

    @property
    def speculates_by_choice(self) -> bool:
        return "scheduler_cls" in self._settings.args

    async def speculate(self, drafts: int | None = None, *, look_again: bool = False) -> SpeculationState:
        if not self.speculates_by_choice:
            raise UserError("rollout.speculation.auto: is off, so the number of draft tokens is fixed at the start")
        state: SpeculationState = await self._within(
            self._llm.engine_core.call_utility_async("mtpctl_speculation", drafts, look_again), "asking the scheduler"
        )
        return state

    @property
    def _errored(self) -> bool:
        return bool(self._llm.errored)

    async def shutdown(self) -> None:
        self._llm.shutdown()
        self._target.close()


def check_plugin() -> None:
    """Raise EnvironmentMissing where vLLM's processes would not find mtpctl's patches and weight receiver."""
    if not entry_points(group="vllm.general_plugins", name="mtpctl"):
        raise EnvironmentMissing("mtpctl: vLLM finds its plugin through the package's entry point; install mtpctl (pip install -e .)")


def check_engine_args(args: Arguments) -> None:
    """Raise UserError for a name that vLLM does not know, with the nearest one that it does."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    check_options("vLLM", [field.name for field in fields(AsyncEngineArgs)], args)


def check_heads(args: AsyncEngineArgs) -> None:
    """Raise UserError for heads of a size that vLLM has no attention for on a CPU; vLLM itself fails at the first request only."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, sizes = args.create_model_config(), CPUAttentionBackend.get_supported_head_sizes()
    if not model.use_mla and (size := model.get_head_size()) not in sizes:
        raise UserError(f"model: on a CPU vLLM has no attention for heads of {size}; those of {', '.join(map(str, sizes))} it has")


def _chunk(completion: CompletionOutput, layers: tuple[int, ...], cached: int | None) -> GenerationChunk:
    from vllm.logprobs import FlatLogprobs

    metrics, logprobs, routes = completion.spec_decode_metrics, completion.logprobs, completion.routed_experts
    return GenerationChunk(
        tokens=list(completion.token_ids),
        logprobs=list(logprobs.logprobs) if isinstance(logprobs, FlatLogprobs) else [],
        spans=[(span.start, span.end, int(span.version)) for span in completion.weight_versions or []],
        finish_reason=completion.finish_reason,
        speculation=Speculation() if metrics is None else speculation_counts(metrics.histogram, metrics.num_draft_tokens),
        # vLLM numbers all layers of the decoder; those without experts stay 0.
        routes=routes[:, list(layers)] if layers and routes is not None else None,
        cached=cached,
    )


# Why vLLM's engine core failed to start, read from what its process wrote to stderr.
#
# The core runs in a process of its own. Where it dies before it serves, `AsyncLLM` says no more than that it did, and the traceback is on
# the stderr that the core inherited. In a Ray actor that is a file in Ray's session folder, which is removed with the session.

STDERR = Path("/proc/self/fd/2")
TAIL_BYTES = 256 << 10
"""Bytes from the end of stderr that are searched."""

FAILED = "Engine core initialization failed"
_REFERS_ELSEWHERE = (FAILED, "WorkerProc initialization failed")
"""Errors by which one of vLLM's processes says that another one has failed."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"^(?P<process>\([^()]* pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")


@contextmanager
def named_in_failures(stderr: Path = STDERR) -> Iterator[None]:
    """Have the error of an engine core that fails to start inside the block name the exception that its process died of.

    Where `stderr` is no file (a terminal, a pipe), or has no traceback, the error is raised as vLLM made it.
    """
    began = _size(stderr)
    try:
        yield
    except RuntimeError as error:
        if FAILED not in str(error) or began is None or (cause := root_cause(_tail(stderr, began))) is None:
            raise
        raise RuntimeError(f"{error}; root cause: {cause}") from error


def root_cause(text: str) -> str | None:
    """The exception in `text`, as `Name: message`, that the failure goes back to; None where `text` has no traceback.

    That is the last one before an error that refers to another process. Only the first line of a message counts.
    """
    # Processes write at the same time; vLLM's log lines say which one a line is from.
    open_tracebacks: set[str] = set()
    last = None
    for raw in text.splitlines():
        line = _COLOUR.sub("", raw)
        prefix = _LOG_PREFIX.match(line)
        assert prefix is not None, "the pattern matches an empty prefix too"
        process, line = prefix["process"] or "", line[prefix.end() :]
        if line == _TRACEBACK:
            open_tracebacks.add(process)
        elif process in open_tracebacks and _EXCEPTION.match(line):
            open_tracebacks.remove(process)
            if not any(message in line for message in _REFERS_ELSEWHERE):
                last = line
            elif last is not None:
                break
    return last


def _size(path: Path) -> int | None:
    """Bytes of a file; None for anything else."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _tail(path: Path, began: int) -> str:
    """What was written since the file had `began` bytes, or the end of it."""
    try:
        with path.open("rb") as file:
            file.seek(max(began, file.seek(0, 2) - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
