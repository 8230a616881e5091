"""The section `sync`: how new weights reach engines and log-prob servers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.model import model_folder, tensor_names
from mtpctl.recipe.rollout import VLLM_ADAPTER_RANKS
from mtpctl.recipe.section import Complaints, PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

_PACKED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


class SyncBase(Section):
    bucket_bytes: PositiveInt = Field(1 << 30, description="Maximum size of a bucket of tensors, in bytes.")
    sections: list[Literal["target", "draft", "adapter"]] = Field(
        ["target", "draft"],
        description="Weights sent at each sync. With train.lora, target sends the merged weights; adapter replaces target and sends only "
        "the adapter.",
    )
    verify: Literal["first", "always", "never"] = Field(
        "first", description="Syncs at which both ends compare checksums of every tensor that is sent."
    )
    pause: Literal["keep", "abort", "wait"] = Field(
        "keep",
        description="Requests in flight at a sync. keep: they are paused; abort: they are aborted and continued afterwards; wait: the "
        "sync waits for them.",
    )
    deadline_s: PositiveFloat = Field(120.0, description="Timeout of a sync, in seconds.")
    delta: bool = Field(False, description="Send only elements that changed since the previous version; for nccl, storage and shm.")
    kv: Literal["recompute", "keep"] = Field(
        "recompute",
        description="KV cache of requests in flight at a sync. recompute: it is recomputed with the new weights; keep: requests keep the "
        "cache computed with the old weights.",
    )
    release_kv: bool = Field(False, description="Free the KV cache of the engines during a sync.")
    on_collapse: Literal["warn", "error"] = Field("warn", description="Reaction if draft acceptance halves after a sync.")


class ShmConfig(SyncBase):
    transport: Literal["shm"] = Field("shm", description="Files in shared memory, or on a file system that several hosts share.")


class IpcConfig(SyncBase):
    transport: Literal["ipc"] = Field("ipc", description="CUDA IPC memory handles on one host.")


class NcclConfig(SyncBase):
    transport: Literal["nccl"] = Field("nccl", description="NCCL between any hosts. Default unless cluster.device is cpu, which uses shm.")


class StorageConfig(SyncBase):
    transport: Literal["storage"] = Field("storage", description="Files in object storage, which each host downloads; CPU and GPU.")
    url: str | None = Field(
        None,
        description="Required with transport storage. URL of a folder that only this run uses for its weight versions: s3://BUCKET/FOLDER "
        "or another fsspec URL. `{name}` and `{seed}` are replaced.",
    )
    relay: bool = Field(
        False,
        description="Hosts of engines download from each other in a chain, so that the store sends each version to one of them. Log-prob "
        "ranks still download from the store.",
    )


SyncConfig = Annotated[ShmConfig | IpcConfig | NcclConfig | StorageConfig, Field(discriminator="transport")]


@dataclass(frozen=True, slots=True)
class Transport:
    """Properties of a transport.

    Attributes:
        pushes: sender and receivers transfer at the same time; if false, receivers read from the version store later.
        cuda: both ends are GPUs.
        one_process_per_gpu: no two of its processes may share a GPU.
    """

    pushes: bool
    cuda: bool
    one_process_per_gpu: bool = False


TRANSPORTS = {
    "shm": Transport(pushes=False, cuda=False),
    "ipc": Transport(pushes=True, cuda=True),
    "nccl": Transport(pushes=True, cuda=True, one_process_per_gpu=True),
    "storage": Transport(pushes=False, cuda=False),
}
"""Transports by `sync.transport`. Each has a module of the same name in `mtpctl.sync.transports`."""

PUSH_TRANSPORTS = tuple(name for name, transport in TRANSPORTS.items() if transport.pushes)


def check_sections(sync: SyncBase) -> Complaints:
    """Report sections that do not form a complete version, and buckets that are too small."""
    if len(set(sync.sections)) != len(sync.sections) or ("target" in sync.sections) == ("adapter" in sync.sections):
        yield f"sync.sections: must contain either target or adapter, and optionally draft, each once, got [{', '.join(sync.sections)}]"
    if sync.bucket_bytes < 1024:
        yield f"sync.bucket_bytes: must be at least 1024, got {sync.bucket_bytes}"


def check_transport(recipe: Recipe) -> Complaints:
    """Report transports that the devices do not support, and engines that cannot free their KV cache."""
    device, transport, rollout = recipe.cluster.device, recipe.sync.transport, recipe.rollout
    if device == "cpu" and TRANSPORTS[transport].cuda:
        yield f"sync.transport: {transport} needs CUDA; set shm for cluster.device: cpu, or leave it out"
    if TRANSPORTS[transport].one_process_per_gpu and "rl" in recipe.train.stages:
        logprob_gpus = recipe.logprob.gpus if recipe.logprob.standalone else 1
        shares = {"train.gpus": recipe.train.gpus, "rollout.gpus": rollout.gpus, "logprob.gpus": logprob_gpus}
        if shared := [field for field, share in shares.items() if share and share < 1]:
            field = shared[-1]
            yield f"sync.transport: {transport} supports one process per GPU, but with {field}: {shares[field]:g} two share one; set ipc"
    if recipe.sync.delta and transport == "ipc":
        yield "sync.delta: ipc copies between GPUs of one host faster than changes are found; set it to false, or sync.transport: nccl"
    if recipe.sync.release_kv:
        if not rollout.traits.release_kv:
            yield "sync.release_kv: works with rollout.engine: vllm; set it to false"
        elif recipe.device == "cpu":
            yield "sync.release_kv: a CPU engine cannot free its KV cache; set it to false"
        elif rollout.engine_args.get("enable_sleep_mode", True) is False:
            yield "sync.release_kv: needs vLLM's sleep mode; remove rollout.engine_args.enable_sleep_mode: false"


def sync_notes(sync: SyncBase) -> Iterator[str]:
    """Lines for plans about how a sync differs from the default."""
    if sync.kv == "keep":
        yield "requests in flight at a sync keep the KV cache of the old weights (sync.kv: keep)"
    if isinstance(sync, StorageConfig) and sync.relay:
        yield "hosts of engines download in a chain, and only the first one from the store (sync.relay)"


def check_kv(recipe: Recipe) -> Complaints:
    """Report settings that `sync.kv: keep` does not support."""
    sync, rollout, alternative = recipe.sync, recipe.rollout, "set sync.kv: recompute"
    if sync.kv == "recompute":
        return
    if not rollout.traits.keep_kv:
        yield (
            f"sync.kv: keep works with rollout.engine: vllm, because the prefix cache of {rollout.traits.title} would keep old weights' "
            f"blocks for later requests; {alternative}"
        )
    if sync.pause != "keep":
        yield f"sync.kv: with sync.pause: {sync.pause} no request is in flight at a sync; set sync.pause: keep, or {alternative}"
    if not recipe.async_.partial_rollout:
        yield f"sync.kv: with async.partial_rollout: false no request is in flight at a sync; set it to true, or {alternative}"
    if sync.release_kv:
        yield f"sync.kv: sync.release_kv frees the cache that sync.kv: keep retains; set it to false, or {alternative}"
    if recipe.numerics == "bitwise":
        yield f"sync.kv: with keep, log-probs differ from those of the trainer, which numerics: bitwise rules out; {alternative}"
    for argument in ("kv_transfer_config", "kv_offloading_size"):
        if rollout.engine_args.get(argument) is not None:
            yield f"rollout.engine_args.{argument}: its cache may mix weight versions with sync.kv: keep; remove it, or {alternative}"


def changes_every_element(recipe: Recipe) -> bool:
    """Whether an update changes almost every trained element. Not in bf16, in which most changes are rounded away."""
    return recipe.train.precision == "fp32" and recipe.sent_precision == "fp32"


def sync_cautions(recipe: Recipe) -> Iterator[str]:
    """Caution about deltas that would be as large as the weights."""
    if recipe.sync.delta and changes_every_element(recipe):
        yield (
            "sync.delta: an update changes almost every trained element in fp32, so most syncs stay complete; set it to false, or "
            "train.precision: bf16"
        )


def check_adapter_sync(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    """Report adapters that the engines cannot load."""
    rollout, lora = recipe.rollout, recipe.train.lora
    if "adapter" not in recipe.sync.sections:
        return
    if lora is None:
        yield "sync.sections: there is no adapter without train.lora; replace adapter by target, or set train.lora"
        return
    if not rollout.traits.adapters:
        yield "sync.sections: adapter works with rollout.engine: vllm; replace it by target, which sends merged weights"
    if shape is not None and shape.window is not None:
        yield f"sync.sections: vLLM has no adapters for {shape.family}; replace adapter by target, which sends merged weights"
    limit = rollout.engine_args.get("max_lora_rank", VLLM_ADAPTER_RANKS[-1])
    if isinstance(limit, int) and lora.rank > limit:
        source = "vLLM" if "max_lora_rank" not in rollout.engine_args else "rollout.engine_args.max_lora_rank"
        yield f"train.lora.rank: {lora.rank} exceeds {limit}, the maximum of {source}; lower it, or sync target instead of adapter"
    if rollout.engine_args.get("enable_lora", True) is False:
        yield "sync.sections: adapter needs an engine with adapters; remove rollout.engine_args.enable_lora: false"
    if "linear_kv_up_proj" in lora.targets:
        yield (
            "train.lora.targets: linear_kv_up_proj: vLLM merges its weight into attention at startup, where an adapter has no effect; "
            "leave it out, or sync target instead of adapter"
        )
    packed = [target for target in ("linear_fc1", "linear_fc2") if target in lora.targets]
    folder = model_folder(recipe.model)
    if shape is not None and shape.moe and packed and folder is not None and any(map(_PACKED_EXPERTS.search, tensor_names(folder))):
        yield (
            f"train.lora.targets: {folder} packs the experts of a layer in one tensor, for which PEFT has no adapter names; "
            f"leave out {' and '.join(packed)}, or sync target instead of adapter"
        )


def check_live_weights(recipe: Recipe, config: Mapping[str, object]) -> Complaints:
    """Report engines whose weights an RL sync cannot update in place."""
    rollout = recipe.rollout
    if "rl" not in recipe.train.stages or not rollout.traits.unquantized_only:
        return
    if method := rollout.engine_args.get("quantization"):
        yield f"rollout.engine_args.quantization: the weights of a quantizing engine ({method}) cannot be synced; leave it out"
    elif config.get("quantization_config"):
        yield (
            "model.path: its weights are quantized, and engines that generate with them cannot be synced; convert it with "
            "mtpctl convert-hf to a checkpoint and back, and name that folder"
        )
    if rollout.engine_args.get("pipeline_parallel_size", 1) != 1:
        yield "rollout.engine_args.pipeline_parallel_size: an engine with pipeline stages cannot be synced; set rollout.tp instead"
