"""One vLLM engine: responses with log-probs, version spans, speculation counts and routes, and a target for weight updates."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from mtpctl.cluster.process import importing
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.rollout.engine import Engine, GenerationChunk, speculation_counts
from mtpctl.rollout.installed import check_options
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.vllm import root_cause
from mtpctl.rollout.vllm.client import VllmClient, adapter_request
from mtpctl.rollout.vllm.patches import aborts, logprobs
from mtpctl.rollout.vllm.patches import pause as vllm_pause
from mtpctl.rollout.vllm.settings import Arguments, VllmSettings
from mtpctl.rollout.vllm.steering import rejection, sampling_of
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
            places=int(settings.args["max_num_seqs"]),
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
            with root_cause.named_in_failures():
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
        await aborts.fetch_partial_outputs(self._llm, request_ids)
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
        await self._within(vllm_pause.pause(self._llm, mode), f"pausing ({mode})")
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
