"""Placement, memory, buckets: pure arithmetic over names, shapes and sizes, without torch."""

from mtpctl.plan.buckets import ALIGNMENT, DTYPE_BYTES, Bucket, Entry, TensorSpec, plan_buckets
from mtpctl.plan.memory import (
    OPTIMIZER_SLICE,
    WEIGHT_BYTES,
    EngineMemory,
    LogprobMemory,
    TrainerMemory,
    check_fits,
    engine_memory,
    logprob_memory,
    trainer_memory,
)
from mtpctl.plan.placement import Actor, Host, Placement, place
from mtpctl.plan.sharding import Stage, expert_tp, stage_layers, stages
from mtpctl.plan.wire import ADAPTER_PREFIX, adapter_tensors, bytes_beneath, section_buckets, wire_tensors

__all__ = [
    "ADAPTER_PREFIX",
    "ALIGNMENT",
    "DTYPE_BYTES",
    "OPTIMIZER_SLICE",
    "WEIGHT_BYTES",
    "Actor",
    "Bucket",
    "EngineMemory",
    "Entry",
    "Host",
    "LogprobMemory",
    "Placement",
    "Stage",
    "TensorSpec",
    "TrainerMemory",
    "adapter_tensors",
    "bytes_beneath",
    "check_fits",
    "engine_memory",
    "expert_tp",
    "logprob_memory",
    "place",
    "plan_buckets",
    "section_buckets",
    "stage_layers",
    "stages",
    "trainer_memory",
    "wire_tensors",
]
