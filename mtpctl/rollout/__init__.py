"""Responses from engines that speculate with the MTP head being trained: the `Generator` protocol, vLLM, SGLang, and a pool."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.rollout.actor import RayReplica, Replica, RolloutActor, start_replica
    from mtpctl.rollout.pool import ReplicaPool
    from mtpctl.rollout.protocol import ABORTED, DEADLINE, EngineDead, Generator, Health, SpecStats
    from mtpctl.rollout.sglang_engine import SglangEngine
    from mtpctl.rollout.sglang_settings import SglangSettings, sglang_engine_settings
    from mtpctl.rollout.start import check_engine_installed, start_pool
    from mtpctl.rollout.vllm_engine import VllmEngine
    from mtpctl.rollout.vllm_settings import VllmSettings, engine_settings

_HOMES = {
    "ABORTED": "protocol",
    "DEADLINE": "protocol",
    "EngineDead": "protocol",
    "Generator": "protocol",
    "Health": "protocol",
    "RayReplica": "actor",
    "Replica": "actor",
    "ReplicaPool": "pool",
    "RolloutActor": "actor",
    "SglangEngine": "sglang_engine",
    "SglangSettings": "sglang_settings",
    "SpecStats": "protocol",
    "VllmEngine": "vllm_engine",
    "VllmSettings": "vllm_settings",
    "check_engine_installed": "start",
    "start_pool": "start",
    "start_replica": "actor",
    "engine_settings": "vllm_settings",
    "sglang_engine_settings": "sglang_settings",
}

__all__ = [
    "ABORTED",
    "DEADLINE",
    "EngineDead",
    "Generator",
    "Health",
    "RayReplica",
    "Replica",
    "ReplicaPool",
    "RolloutActor",
    "SglangEngine",
    "SglangSettings",
    "SpecStats",
    "VllmEngine",
    "VllmSettings",
    "check_engine_installed",
    "engine_settings",
    "sglang_engine_settings",
    "start_pool",
    "start_replica",
]


def __getattr__(name: str) -> Any:
    """Import on first use: engines bring torch along."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"mtpctl.rollout.{_HOMES[name]}"), name)
