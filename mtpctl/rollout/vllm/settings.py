"""Converts the recipe to vLLM's options, without importing vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mtpctl.errors import UserError
from mtpctl.families.reading import DRAFTER, shape_of
from mtpctl.plan.buckets import ADAPTED
from mtpctl.plan.memory import CPU_KV_CACHE_BYTES, ENGINE_STEP_TOKENS
from mtpctl.plan.placement import ENGINE_MEMORY_SHARE
from mtpctl.recipe.model import DTYPES, engine_method, read_config
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.rollout import VLLM_ADAPTER_RANKS, VllmConfig
from mtpctl.recipe.train import EXPERT_TARGETS, LoraConfig
from mtpctl.rollout.vllm.fp8_loading import DRAFTER_QUANTIZED, FOLDER, LOAD_FORMAT, PRECISION, with_fp8
from mtpctl.rollout.vllm.patches import IMMEDIATE_ADMISSION, NUMERICS
from mtpctl.rollout.vllm.plugin import ENGINE_MARKER, TRANSFER_BACKEND

MAX_GRAPH_TOKENS = 2048
"""Maximum tokens of a step with prefill that is replayed as CUDA graphs."""
Arguments = dict[str, Any]
"""Keyword arguments of vLLM's `AsyncEngineArgs`."""
SCHEDULER_CLASSES = {
    False: "mtpctl.rollout.vllm.patches.drafter.SwitchingScheduler",
    True: "mtpctl.rollout.vllm.patches.drafter.AsyncSwitchingScheduler",
}
"""Schedulers for `speculation.auto`, by whether scheduling is asynchronous."""

WEIGHTLESS_DRAFTERS: dict[str, dict[str, object]] = {"ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4}, "suffix": {}}
"""Drafters without weights, with their options in vLLM. N-grams have 2 to 4 tokens."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of one engine: `args` for vLLM, `environment` of its process, `threads` for torch (0: torch's default).

    `in_loop`: run the engine core in the caller's process. `release_kv`: a paused engine frees its KV cache. `keep_kv`: running requests
    keep their KV cache at a pause. `routes`: MoE layers whose routes are recorded in samples. `outside_cache`: bytes that the engine needs
    in addition to its KV cache, which gets the rest of its share of the GPU's memory; None: vLLM measures them.
    """

    args: Arguments
    in_loop: bool
    threads: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    release_kv: bool = False
    keep_kv: bool = False
    routes: tuple[int, ...] = ()
    outside_cache: int | None = None

    @property
    def has_drafter(self) -> bool:
        """Whether the engine has a drafter with weights."""
        speculative_config = self.args.get("speculative_config") or {}
        return bool(speculative_config) and speculative_config.get("method") not in WEIGHTLESS_DRAFTERS

    @property
    def verifies_blocks(self) -> bool:
        """Whether the engine is configured for block verification."""
        return (self.args.get("speculative_config") or {}).get("rejection_sample_method") == "block"

    @property
    def model(self) -> str:
        """Folder or hub id."""
        return str(self.args["model"])


def build_engine_settings(
    rollout: VllmConfig,
    *,
    model: str,
    precision: Literal["fp32", "bf16"],
    device: Literal["cpu", "cuda"],
    seed: int = 0,
    tokenizer: str | None = None,
    adapter: LoraConfig | None = None,
    release_kv: bool = False,
    keep_kv: bool = False,
    routes: tuple[int, ...] = (),
    outside_cache: int | None = None,
    immediate_admission: bool = False,
    host_limited: bool = False,
    numerics: Numerics = "default",
) -> VllmSettings:
    """Settings of one engine. `rollout.engine_args` overrides all options that are set here.

    Args:
        tokenizer: folder or hub id; required for stop strings, including those of environments.
        adapter: the LoRA adapter that weight syncs send, if any.
        release_kv, keep_kv, routes, outside_cache: see `VllmSettings`.
        immediate_admission: start each request as soon as a slot is free. By default, requests are admitted in bursts if
            measured times show that this is faster (`mtpctl.rollout.vllm.patches.admission`).
        host_limited: the model is so small that the host limits its steps. CUDA graphs then also cover steps of more than 512 tokens.
        numerics: the recipe's. `bitwise` needs fp32 on a CPU, or bf16 on a GPU, where it disables compilation.

    On a CPU the engine shares cores with a trainer. It runs without compilation, without a prefix cache (whose blocks would have 128
    tokens), and with a KV cache of fixed size. With one rank, the engine core runs in the actor's process.
    """
    is_cpu = device == "cpu"
    num_drafts = rollout.speculation.num_tokens
    # vLLM rejects graph sizes that are set in both `compilation_config` and one of these options.
    recipe_sets_graph_sizes = bool(rollout.engine_args.keys() & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"})
    args: Arguments = {
        "model": model,
        "dtype": DTYPES[precision if rollout.dtype == "auto" else rollout.dtype],
        "seed": seed,
        "tensor_parallel_size": rollout.tp,
        "max_num_seqs": rollout.max_in_flight,
        "enforce_eager": rollout.eager or is_cpu,
        "enable_prefix_caching": not is_cpu,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "skip_tokenizer_init": not rollout.stop and tokenizer is None,
        # With "auto", vLLM accepts grammars that the engine core's backend fails to compile.
        "structured_outputs_config": {"backend": "xgrammar"},
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_extension_cls": "mtpctl.rollout.vllm.receiver.WorkerExtension",
    }
    if num_drafts:
        method = rollout.speculation.draft_method
        speculative_config: dict[str, object] = {"method": "mtp", "num_speculative_tokens": num_drafts, "draft_sample_method": method}
        if rollout.speculation.method != "model":
            speculative_config = {"method": rollout.speculation.method, "num_speculative_tokens": num_drafts} | WEIGHTLESS_DRAFTERS[
                rollout.speculation.method
            ]
        elif (drafter_method := engine_method(Path(model))) != "mtp":
            speculative_config |= {"method": drafter_method, "model": str(Path(model) / DRAFTER)}
        if rollout.speculation.verification == "block":
            speculative_config["rejection_sample_method"] = "block"
        args["speculative_config"] = speculative_config
    if num_drafts and rollout.speculation.auto:
        speculative_config["num_speculative_tokens_per_batch_size"] = _build_draft_schedule(num_drafts, rollout.max_in_flight)
        async_scheduling = bool(rollout.engine_args.get("async_scheduling", not is_cpu))
        args |= {"async_scheduling": async_scheduling, "scheduler_cls": SCHEDULER_CLASSES[async_scheduling]}
        if not args["enforce_eager"] and not recipe_sets_graph_sizes:
            args["compilation_config"] = {"cudagraph_capture_sizes": _list_switching_graph_sizes(num_drafts, rollout.max_in_flight)}
    elif host_limited and not args["enforce_eager"] and adapter is None and not recipe_sets_graph_sizes:
        max_step_tokens = rollout.engine_args.get("max_num_batched_tokens")
        cudagraph_sizes = _list_host_limited_graph_sizes(
            num_drafts, rollout.max_in_flight, max_step_tokens=max_step_tokens if isinstance(max_step_tokens, int) else ENGINE_STEP_TOKENS
        )
        args["compilation_config"] = {"cudagraph_capture_sizes": cudagraph_sizes}
    if tokenizer is not None:
        args["tokenizer"] = tokenizer
    if rollout.context is not None:
        args["max_model_len"] = rollout.context
    if rollout.kv_cache_bytes is not None or is_cpu:
        args["kv_cache_memory_bytes"] = rollout.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if not is_cpu:
        args["gpu_memory_utilization"] = ENGINE_MEMORY_SHARE if rollout.gpu_memory is None else rollout.gpu_memory
    if adapter is not None:
        max_rank = next(rank for rank in VLLM_ADAPTER_RANKS if rank >= adapter.rank)
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}
        if not EXPERT_TARGETS & set(adapter.targets) or not _may_have_experts(Path(model)):
            # By default vLLM allocates adapters in every layer, including experts, and wraps the embedding. A drafter shares the embedding,
            # whose wrapper then applies the target's batch indices to the drafter's tokens.
            args["lora_target_modules"] = sorted({module for target in adapter.targets for module in ADAPTED[target]})
    if rollout.quantization == "fp8":
        quantize_drafter = rollout.drafter_quantization == "fp8"
        args |= {
            "hf_overrides": partial(with_fp8, folder=model, drafter=quantize_drafter),
            "load_format": LOAD_FORMAT,
            "model_loader_extra_config": {DRAFTER_QUANTIZED: quantize_drafter, PRECISION: precision, FOLDER: model},
        }
    if release_kv:
        args["enable_sleep_mode"] = True
    if routes:
        args["enable_return_routed_experts"] = True
    if rollout.tp > 1 or not is_cpu:
        # In a Ray placement group, vLLM would start several ranks with Ray by default. A single rank in a separate process runs the model
        # while the core schedules the next step.
        args["distributed_executor_backend"] = "mp"
    if numerics == "bitwise":
        args["mamba_ssm_cache_dtype"] = "float32"  # a state must not be rounded between steps
    if numerics == "bitwise" and not is_cpu:
        # Inductor fuses operations, which changes where results are rounded. Without it, only breakable graphs cover steps with prefill.
        # Our patches replace attention, experts and linear attention of the backends that are selected here. Other expert backends pad the
        # weights, and other backends of linear attention compile kernels for minutes.
        graph_options = {"mode": 0} | ({} if args["enforce_eager"] else {"cudagraph_mode": "FULL_AND_PIECEWISE"})
        args["compilation_config"] = args.get("compilation_config", {}) | graph_options
        args |= {"attention_backend": "FLASH_ATTN", "disable_cascade_attn": True, "moe_backend": "triton"}
        args["additional_config"] = {"gdn_prefill_backend": "triton"}
    args |= rollout.engine_args
    if args.get("speculative_config"):
        # This applies to n-gram and suffix drafters too.
        args.setdefault("per_request_spec_decode_metrics", "summary")
    in_loop = is_cpu and args["tensor_parallel_size"] == 1
    environment = _environment(is_cpu, in_loop, rollout.threads) | ({IMMEDIATE_ADMISSION: "1"} if immediate_admission else {})
    environment[NUMERICS] = numerics
    if numerics == "bitwise" and not is_cpu:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # The patches replace the sampler of this model runner.
        # The all-reduces that remain (vLLM's kernel and NCCL) round the sum of two ranks once.
        environment |= {"VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        if not args["enforce_eager"]:
            environment["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    return VllmSettings(
        args,
        in_loop,
        threads=rollout.threads,
        environment=environment,
        release_kv=release_kv,
        keep_kv=keep_kv,
        routes=routes,
        outside_cache=outside_cache,
    )


def _build_draft_schedule(num_drafts: int, max_requests: int) -> list[tuple[int, int, int]]:
    """A schedule `(min requests, max requests, drafts)` with every number of drafts, so that vLLM captures CUDA graphs for each.

    Raises UserError if `max_requests` is too small.
    """
    if max_requests <= num_drafts:
        need = f"speculation.auto with num_tokens: {num_drafts}; set it above {num_drafts}"
        raise UserError(f"rollout.max_in_flight: {max_requests} is too small for {need}")
    return [(drafts + 1, drafts + 1, drafts) for drafts in range(num_drafts)] + [(num_drafts + 1, max_requests, num_drafts)]


def _list_switching_graph_sizes(num_drafts: int, max_requests: int) -> list[int]:
    """Step sizes in tokens for CUDA graphs with `speculation.auto`: up to `max_requests` requests with 0 to `num_drafts` drafts each."""
    request_counts = {1, 2, 4, *range(8, min(max_requests, 256) + 1, 8), *range(256, max_requests + 1, 16), max_requests}
    return sorted({requests * (drafts + 1) for requests in request_counts if requests <= max_requests for drafts in range(num_drafts + 1)})


def _list_host_limited_graph_sizes(num_drafts: int, max_requests: int, *, max_step_tokens: int) -> list[int]:
    """Step sizes in tokens for CUDA graphs of a model whose steps the host limits.

    They cover up to `max_requests` requests with `num_drafts` drafts each, and steps with prefill of up to `MAX_GRAPH_TOKENS` tokens, both
    within `max_step_tokens`. By default vLLM captures at most 512 tokens on Hopper, and launches each kernel of a larger step from Python.
    For a small model this takes longer than padding to a multiple of 128 tokens.
    """
    request_counts = {1, 2, 4, *range(8, min(max_requests, 256) + 1, 8), *range(256, max_requests + 1, 32), max_requests}
    decode_sizes = {requests * (num_drafts + 1) for requests in request_counts if requests <= max_requests}
    prefill_sizes = {*range(8, 257, 8), *range(256, 513, 32), *range(512, MAX_GRAPH_TOKENS + 1, 128)}
    return sorted(size for size in decode_sizes | prefill_sizes if size <= max_step_tokens)


def _environment(is_cpu: bool, in_loop: bool, threads: int) -> dict[str, str]:
    """Variables that must be set before vLLM or torch is imported."""
    variables = {
        ENGINE_MARKER: "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if not is_cpu:
        # A process that has used CUDA cannot be forked.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        # More threads gain nothing in a step, and idle ones spin and slow down the thread that launches kernels. This overrides a
        # launcher's value, which is meant for training.
        variables["OMP_NUM_THREADS"] = str(threads or 1)
    if is_cpu:
        # vLLM compiles some functions even in eager mode, which takes seconds and needs a C++ compiler.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if in_loop:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    elif is_cpu:
        # By default vLLM binds each rank to a separate NUMA node, and fails if there are fewer nodes than ranks.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if is_cpu and threads:
        # Idle threads sleep immediately; spinning would take cores from a trainer on the same machine.
        variables |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    return variables


def _may_have_experts(folder: Path) -> bool:
    """Whether the model has experts, according to its config; True for a model whose folder is not on this machine."""
    return not folder.is_dir() or shape_of(read_config(folder)).moe is not None
