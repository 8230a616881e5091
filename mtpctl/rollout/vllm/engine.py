"""One vLLM engine: responses with log-probs, version spans, speculation counts and routes, and a target for weight updates."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.cluster.process import gc_paused_for_imports
from mtpctl.compat.transformers import import_transformers
from mtpctl.errors import PrerequisiteMissing, RuntimeFailure, UserError
from mtpctl.plan.memory import GIB
from mtpctl.recipe.numerics import check_gpu
from mtpctl.rollout.engine import Engine, GenerationChunk, speculation_from_histogram
from mtpctl.rollout.installed import check_options
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.vllm import plugin
from mtpctl.rollout.vllm.client import VllmClient, adapter_request
from mtpctl.rollout.vllm.fp8_loading import LOAD_FORMAT
from mtpctl.rollout.vllm.patches import NUMERICS, cores, logprobs, pauses
from mtpctl.rollout.vllm.serving import format_rejection, sampling_args
from mtpctl.rollout.vllm.settings import SCHEDULER_CLASSES, Arguments, VllmSettings
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
    """A vLLM engine in this process. Create with `await VllmEngine.start(settings)`."""

    def __init__(self, llm: AsyncLLM, settings: VllmSettings, version: int) -> None:
        super().__init__(
            VllmClient(llm),
            version=version,
            context=int(llm.model_config.max_model_len),
            slots=int(settings.args["max_num_seqs"]),
            sections=("target", "draft", "adapter") if settings.has_drafter else ("target", "adapter"),
        )
        self._llm = llm
        self._settings = settings
        self._kv_released = False

    @classmethod
    async def start(cls, settings: VllmSettings, *, version: int = 0) -> VllmEngine:
        """Load the model and warm up. `version`: the version of its weights.

        Raises UserError for an unknown name in `rollout.engine_args` and for settings that vLLM does not support on this machine, and
        PrerequisiteMissing if vLLM's processes would not find the plugin. Raises vLLM's errors for a model that it cannot load, with the
        root cause if the core fails in another process.
        """
        set_environment(settings.environment)
        check_plugin()
        if not settings.in_loop and not settings.args.get("numa_bind"):  # binding replaces the executable that is spawned
            cores.start_fork_server()
        with gc_paused_for_imports():
            import_transformers()  # faster than vLLM's import of it
            import torch
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

        if settings.threads:
            torch.set_num_threads(settings.threads)
        check_engine_args(settings.args)
        if settings.environment.get(NUMERICS) == "bitwise":
            check_bitwise(settings.args)
            if settings.in_loop:
                plugin.install()  # vLLM loads plugins once per process, perhaps for an engine with other numerics
        args = AsyncEngineArgs(**settings.args | compute_kv_cache_option(settings))
        check_head_size(args)
        # LLM_CLASS raises the default number of tokens per step, on an H200 from 2,048 to 16,384.
        usage_context = UsageContext.LLM_CLASS
        if settings.in_loop:
            from mtpctl.rollout.vllm.patches.loop import core_in_loop

            with core_in_loop():
                llm = AsyncLLM.from_engine_args(args, usage_context=usage_context)
        else:
            with add_root_cause():
                llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args, usage_context=usage_context)
        engine = cls(llm, settings, version)
        try:
            await engine._with_deadline(llm.update_weight_version(str(version)), "setting the weight version")
            if settings.verifies_blocks:
                check_verification(await engine._with_deadline(VllmClient(llm).rpc("mtpctl_verification"), "reading the verification rule"))
            if settings.args.get("load_format") == LOAD_FORMAT:
                check_kernels(await engine._with_deadline(VllmClient(llm).rpc("mtpctl_packed_fp8"), "reading the FP8 kernels"))
            if settings.args.get("enable_lora"):
                await engine._target.load_zero_adapter()
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def _answer(self, request: GenerationRequest, request_id: str, prompt: list[int], max_tokens: int) -> GenerationChunk:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        output = None
        try:
            sampling_params = self._sampling_params(request, max_tokens)
            async for step in self._llm.generate(tokens_input(prompt), sampling_params, request_id, lora_request=self._adapter_request()):
                output = step
        except VLLMClientError as error:
            raise UserError(format_rejection(error)) from error
        if output is None:
            raise self._mark_failed(RuntimeError(f"request {request_id} ended without an output"))
        if output.outputs[0].finish_reason == "error":
            if sampling_params.structured_outputs is None:
                raise RuntimeFailure(f"vLLM ended request {request_id} with an error; see the log of the engine")
            raise UserError("response_format: vLLM cannot compile it; send a simpler schema or grammar")
        num_cached_tokens = output.num_cached_tokens if self._llm.vllm_config.cache_config.enable_prefix_caching else None
        return _chunk(output.outputs[0], self._settings.routes, num_cached_tokens, keeps_kv=self._settings.keep_kv)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._llm.get_tokenizer().decode(tokens, skip_special_tokens=True))

    async def _abort(self, request_ids: list[str]) -> None:
        await pauses.fetch_partial_outputs(self._llm, request_ids)
        await self._llm.abort(request_ids)

    def _adapter_request(self) -> LoRARequest | None:
        """The adapter of requests; None for an engine without adapters."""
        folder = self._target.adapter
        return None if folder is None else adapter_request(ADAPTER, ADAPTER_ID, str(folder))

    def _sampling_params(self, request: GenerationRequest, max_tokens: int) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request.stop and self._settings.args["skip_tokenizer_init"]:
            raise UserError("stop strings need the engine's tokenizer: name them in rollout.stop, or stop by token ids")
        extra_sampling = (
            sampling_args(request.extra_sampling, drafts="speculative_config" in self._settings.args) if request.extra_sampling else {}
        )
        # A continued response must not reuse the random numbers of its first part.
        seed = None if request.seed is None else (request.seed + 1_000_003 * len(request.sample.response_ids)) % (1 << 62)
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=seed,
            max_tokens=max_tokens,
            stop=request.stop or None,
            stop_token_ids=request.stop_token_ids or None,
            # The request contains all end tokens. By default vLLM adds the end tokens of its tokenizer, if it loads one.
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(request.stop),
            routed_experts_prompt_start=request.sample.num_routed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # For a request with stop strings, the front end may trim tokens, so it needs log-probs and routes with every output.
            extra_args=None if request.stop else dict(logprobs.DEFERRED),
            **extra_sampling,
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "abort":
            await self._with_deadline(self._abort(list(self._in_flight)), "aborting responses")
        await self._with_deadline(pauses.pause(self._llm, mode, clear_cache=not self._settings.keep_kv), f"pausing ({mode})")
        self._paused = True
        if self._settings.release_kv and not self._kv_released:
            await self._with_deadline(self._llm.release_kv_cache_memory(), "freeing the KV cache")
            self._kv_released = True

    async def resume(self) -> None:
        self._check_alive()
        if self._kv_released:
            await self._with_deadline(self._llm.wake_up(["kv_cache"]), "allocating the KV cache")
            self._kv_released = False
        await self._with_deadline(self._llm.resume_generation(), "resuming")
        self._paused = False

    @property
    def auto_speculation(self) -> bool:
        return self._settings.args.get("scheduler_cls") in SCHEDULER_CLASSES.values()

    async def control_speculation(self, drafts: int | None = None, *, weights_changed: bool = False) -> SpeculationState:
        if not self.auto_speculation:
            raise UserError("rollout.speculation.auto: is off, so the number of draft tokens is fixed at the start")
        state: SpeculationState = await self._with_deadline(
            self._llm.engine_core.call_utility_async("mtpctl_speculation", drafts, weights_changed), "asking the scheduler"
        )
        return state

    async def set_immediate_admission(self, enabled: bool) -> None:
        """True: start each request as soon as a slot is free. False: see `mtpctl.rollout.vllm.patches.admission`."""
        await self._with_deadline(
            self._llm.engine_core.call_utility_async("mtpctl_set_immediate_admission", enabled), "setting the admission"
        )

    @property
    def _errored(self) -> bool:
        return bool(self._llm.errored)

    async def shutdown(self) -> None:
        self._llm.shutdown()
        cores.stop_fork_server()
        self._target.close()


_replaced_variables: dict[str, tuple[str | None, str]] = {}
"""Environment variables that engines of this process set: the previous value, and the engine's."""


def set_environment(variables: Mapping[str, str]) -> None:
    """Set the variables of a new engine, and restore variables that only earlier engines of this process have set.

    A variable that was changed since then keeps its value.
    """
    for name in [name for name, (_, engine_value) in _replaced_variables.items() if os.environ.get(name) != engine_value]:
        del _replaced_variables[name]
    for name in _replaced_variables.keys() - variables.keys():
        previous_value, _ = _replaced_variables.pop(name)
        if previous_value is None:
            del os.environ[name]
        else:
            os.environ[name] = previous_value
    for name, value in variables.items():
        previous_value = _replaced_variables[name][0] if name in _replaced_variables else os.environ.get(name)
        _replaced_variables[name] = previous_value, value
        os.environ[name] = value


def check_plugin() -> None:
    """Raise PrerequisiteMissing if vLLM's processes would not find mtpctl's plugin."""
    if not entry_points(group="vllm.general_plugins", name="mtpctl"):
        raise PrerequisiteMissing("mtpctl: vLLM finds its plugin through the package's entry point; install mtpctl (pip install -e .)")


def check_verification(worker_rules: list[object]) -> None:
    """Raise UserError if a worker does not use the requested block verification. vLLM ignores it silently if it is not supported.

    `worker_rules`: the rule of each worker (`WorkerExtension.mtpctl_verification`).
    """
    if any(rule != "block" for rule in worker_rules):
        raise UserError(
            "rollout.speculation.verification: vLLM ignores block here and verifies token by token, because it uses its V1 model runner "
            "(on a CPU, or with VLLM_USE_V2_MODEL_RUNNER=0); set token, or unset the variable on a GPU"
        )


def check_kernels(worker_reasons: list[object]) -> None:
    """Raise UserError if a worker's kernels pack FP8 weights, which could not be updated.

    `worker_reasons`: the results of `WorkerExtension.mtpctl_packed_fp8`.
    """
    if (reason := next(filter(None, worker_reasons), None)) is not None:
        raise UserError(f"rollout.quantization: {reason}")


def check_engine_args(args: Arguments) -> None:
    """Raise UserError for a name that vLLM does not know, with the closest known one."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    check_options("vLLM", [field.name for field in fields(AsyncEngineArgs)], args)


def check_bitwise(args: Arguments) -> None:
    """Raise UserError for a GPU or dtype that `numerics: bitwise` does not support. Does not initialize CUDA."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        check_gpu(current_platform.get_device_name(), capability and (capability.major, capability.minor), str(args["dtype"]))


def compute_kv_cache_option(settings: VllmSettings) -> Arguments:
    """vLLM's option for the KV cache size of an engine that shares its GPU; empty if vLLM measures the size.

    Measuring fails on a shared GPU, because it counts allocations of other processes. Raises UserError if no memory is left for the cache.
    """
    if settings.outside_cache is None or settings.args.get("kv_cache_memory_bytes") is not None:
        return {}
    from vllm.platforms import current_platform

    memory_share = settings.args["gpu_memory_utilization"]
    # The memory is read through NVML, because initializing CUDA would allocate a context in this process.
    cache_bytes = int(current_platform.get_device_total_memory() * memory_share) - settings.outside_cache
    if cache_bytes <= 0:
        raise UserError(
            f"rollout.gpu_memory: {memory_share:g} of the GPU leaves no memory for a KV cache after {settings.outside_cache / GIB:.1f} GiB "
            "of weights, activations and CUDA graphs; use fewer engines per GPU, or lower train.gpus"
        )
    return {"kv_cache_memory_bytes": cache_bytes}


def check_head_size(args: AsyncEngineArgs) -> None:
    """Raise UserError for a head size that vLLM's CPU attention does not support; vLLM itself fails only at the first request."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, head_sizes = args.create_model_config(), CPUAttentionBackend.get_supported_head_sizes()
    if not model.use_mla and (head_size := model.get_head_size()) not in head_sizes:
        raise UserError(
            f"model: on a CPU vLLM has no attention for heads of {head_size}; use a model with {', '.join(map(str, head_sizes))}"
        )


def _chunk(completion: CompletionOutput, layers: tuple[int, ...], num_cached_tokens: int | None, *, keeps_kv: bool) -> GenerationChunk:
    from vllm.logprobs import FlatLogprobs

    metrics, logprobs, routes = completion.spec_decode_metrics, completion.logprobs, completion.routed_experts
    return GenerationChunk(
        tokens=list(completion.token_ids),
        logprobs=list(logprobs.logprobs) if isinstance(logprobs, FlatLogprobs) else [],
        spans=[(span.start, span.end, int(span.version)) for span in completion.weight_versions or []],
        finish_reason=completion.finish_reason,
        speculation=Speculation() if metrics is None else speculation_from_histogram(metrics.histogram, metrics.num_draft_tokens),
        # vLLM's array has all layers of the decoder; those without experts are 0.
        routes=routes[:, list(layers)] if layers and routes is not None else None,
        num_cached_tokens=num_cached_tokens,
        keeps_kv=keeps_kv,
    )


STDERR = Path("/proc/self/fd/2")
TAIL_BYTES = 256 << 10
"""Bytes at the end of stderr to search."""

CORE_FAILED = "Engine core initialization failed"
_SECONDARY_FAILURES = (CORE_FAILED, "WorkerProc initialization failed")
"""Errors of a process that fails because another process failed."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"^(?P<process>\([^()]* pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")


@contextmanager
def add_root_cause(stderr: Path = STDERR) -> Iterator[None]:
    """Add the root cause to the error of an engine core that fails to start in the block.

    The core runs in a separate process. If it dies during startup, `AsyncLLM` only reports that it died; the traceback is in the inherited
    stderr, which in a Ray actor is a file in Ray's session folder. If `stderr` is not a file, or has no traceback, the error is unchanged.
    """
    start = _file_size(stderr)
    try:
        yield
    except RuntimeError as error:
        if CORE_FAILED not in str(error) or start is None or (root_cause := find_root_cause(_read_tail(stderr, start))) is None:
            raise
        raise RuntimeError(f"{error}; root cause: {root_cause}") from error


def find_root_cause(text: str) -> str | None:
    """The exception in `text` that caused the failure, as `Name: message`; None if `text` has no traceback.

    This is the last exception before an error in `_SECONDARY_FAILURES`. Only the first line of a message is used.
    """
    # Lines of several processes are interleaved; vLLM's log prefix names the process.
    open_tracebacks: set[str] = set()
    root_exception = None
    for raw_line in text.splitlines():
        line = _COLOR.sub("", raw_line)
        prefix = _LOG_PREFIX.match(line)
        assert prefix is not None, "the pattern matches an empty prefix too"
        process, line = prefix["process"] or "", line[prefix.end() :]
        if line == _TRACEBACK:
            open_tracebacks.add(process)
        elif process in open_tracebacks and _EXCEPTION.match(line):
            open_tracebacks.remove(process)
            if not any(message in line for message in _SECONDARY_FAILURES):
                root_exception = line
            elif root_exception is not None:
                break
    return root_exception


def _file_size(path: Path) -> int | None:
    """Size of a regular file; None for anything else."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_tail(path: Path, start: int) -> str:
    """The end of the file, from `start` on."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
