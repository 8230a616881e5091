"""From the recipe to vLLM's own options, without importing vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mtpctl.errors import UserError
from mtpctl.plan.buckets import ADAPTED
from mtpctl.plan.memory import CPU_KV_CACHE_BYTES
from mtpctl.recipe.model import DTYPES
from mtpctl.recipe.rollout import VLLM_ADAPTER_RANKS, VllmConfig
from mtpctl.recipe.train import EXPERT_TARGETS, LoraConfig
from mtpctl.rollout.vllm.plugin import OURS, TRANSFER_BACKEND

Arguments = dict[str, Any]
"""Keyword arguments of vLLM's `AsyncEngineArgs`."""
SCHEDULERS = {
    False: "mtpctl.rollout.vllm.scheduler.SwitchingScheduler",
    True: "mtpctl.rollout.vllm.scheduler.AsyncSwitchingScheduler",
}
"""vLLM's scheduler under `speculation.auto`, by whether it schedules a step while the one before it runs."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """All that one engine needs to start: `args` for vLLM, `environment` for its process, `threads` for torch (0: torch's choice).

    `in_loop` runs the engine core in the caller's process instead of one of its own. `release_kv`: a paused engine frees the memory of
    its KV cache. `routes`: the layers whose routes of experts its samples carry; none where they carry none.
    """

    args: Arguments
    in_loop: bool
    threads: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    release_kv: bool = False
    routes: tuple[int, ...] = ()

    @property
    def model(self) -> str:
        """Folder or hub id."""
        return str(self.args["model"])


def engine_settings(
    rollout: VllmConfig,
    *,
    model: str,
    precision: Literal["fp32", "bf16"],
    device: Literal["cpu", "cuda"],
    seed: int = 0,
    tokenizer: str | None = None,
    adapter: LoraConfig | None = None,
    release_kv: bool = False,
    routes: tuple[int, ...] = (),
) -> VllmSettings:
    """Options of one engine. What `rollout.engine_args` names wins over everything chosen here.

    `tokenizer` is the folder or hub id of another tokenizer than the model's; stop strings need one, those of an environment
    too. `adapter`: the one that weight syncs send; None where they send none. `release_kv`, `routes`: see `VllmSettings`.

    On a CPU the engine runs with few threads beside a trainer on the same cores: no compilation, no prefix cache (its
    blocks hold 128 tokens), a fixed KV cache, and the core in the actor's own process.
    """
    cpu = device == "cpu"
    k = rollout.speculation.num_tokens
    args: Arguments = {
        "model": model,
        "dtype": DTYPES[precision if rollout.dtype == "auto" else rollout.dtype],
        "seed": seed,
        "tensor_parallel_size": rollout.tp,
        "max_num_seqs": rollout.max_in_flight,
        "enforce_eager": rollout.eager or cpu,
        "enable_prefix_caching": not cpu,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "skip_tokenizer_init": not rollout.stop and tokenizer is None,
        # With "auto", vLLM's front end accepts grammars that the backend in the engine core then fails to compile.
        "structured_outputs_config": {"backend": "xgrammar"},
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_extension_cls": "mtpctl.rollout.vllm.receiver.WorkerExtension",
    }
    if k:
        method = rollout.speculation.draft_method
        speculative: dict[str, object] = {"method": "mtp", "num_speculative_tokens": k, "draft_sample_method": method}
        args["speculative_config"] = speculative
    if k and rollout.speculation.auto:
        speculative["num_speculative_tokens_per_batch_size"] = _every_number(k, rollout.max_in_flight)
        ahead = bool(rollout.engine_args.get("async_scheduling", not cpu))
        args |= {"async_scheduling": ahead, "scheduler_cls": SCHEDULERS[ahead]}
        if not args["enforce_eager"]:
            args["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(k, rollout.max_in_flight)}
    if tokenizer is not None:
        args["tokenizer"] = tokenizer
    if rollout.context is not None:
        args["max_model_len"] = rollout.context
    if rollout.kv_cache_bytes is not None or cpu:
        args["kv_cache_memory_bytes"] = rollout.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if not cpu:
        args["gpu_memory_utilization"] = rollout.gpu_memory
    if adapter is not None:
        room = next(rank for rank in VLLM_ADAPTER_RANKS if rank >= adapter.rank)
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        if not EXPERT_TARGETS & set(adapter.targets):
            # Left to itself vLLM makes room in every layer, experts among them.
            args["lora_target_modules"] = sorted({leaf for target in adapter.targets for leaf in ADAPTED[target]})
    if release_kv:
        args["enable_sleep_mode"] = True
    if routes:
        args["enable_return_routed_experts"] = True
    if rollout.tp > 1:
        # An engine is on one host. vLLM would take Ray for its workers where its process sits in a placement group.
        args["distributed_executor_backend"] = "mp"
    args |= rollout.engine_args
    if args.get("speculative_config"):
        # Also for another speculator, such as n-gram: its drafts are counted like those of an MTP head.
        args.setdefault("per_request_spec_decode_metrics", "summary")
    in_loop = cpu and args["tensor_parallel_size"] == 1
    environment = _environment(cpu, in_loop, rollout.threads)
    return VllmSettings(args, in_loop, threads=rollout.threads, environment=environment, release_kv=release_kv, routes=routes)


def _every_number(k: int, requests: int) -> list[tuple[int, int, int]]:
    """A schedule `(fewest requests, most requests, drafts)` in which each number of drafts up to `k` occurs.

    vLLM captures CUDA graphs for the numbers in it. Raises UserError where `requests` are too few for that.
    """
    if requests <= k:
        raise UserError(f"rollout.max_in_flight: {requests} is too small for speculation.auto with num_tokens: {k}; set it above {k}")
    return [(drafts + 1, drafts + 1, drafts) for drafts in range(k)] + [(k + 1, requests, k)]


def capture_sizes(k: int, requests: int) -> list[int]:
    """Tokens of the steps to capture as CUDA graphs: up to `requests` requests, with 0 to `k` drafts each."""
    counts = {1, 2, 4, *range(8, min(requests, 256) + 1, 8), *range(256, requests + 1, 16), requests}
    return sorted({count * (drafts + 1) for count in counts if count <= requests for drafts in range(k + 1)})


def _environment(cpu: bool, in_loop: bool, threads: int) -> dict[str, str]:
    """Variables that must be set before vLLM, or torch, is imported."""
    variables = {
        OURS: "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if not cpu:
        # A process that has used CUDA cannot be forked, and the caller may have used it.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        # Nothing in a step gains by more threads, and idle ones spin, at the cost of the thread that launches kernels. A value that a
        # scheduler or a launcher has set is meant for training.
        variables["OMP_NUM_THREADS"] = str(threads or 1)
    if cpu:
        # vLLM compiles single functions even in eager mode, which takes seconds and a C++ compiler.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if in_loop:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    elif cpu:
        # Several ranks: vLLM would bind each to a NUMA node of its own, and refuses where there are fewer.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if cpu and threads:
        # Waiting threads sleep at once: spinning would take the cores from a trainer on the same machine.
        variables |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    return variables
