"""Ray: the cluster of a run, waiting for its actors, and replicas that die and come back; and where processes meet."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.heap import importing, settle_heap
from mtpctl.cluster.local import check_room, cluster, on_one_host
from mtpctl.cluster.replicas import Lifecycle, Replicas, Seat, start_all

if TYPE_CHECKING:
    from mtpctl.cluster.meeting import address_of, host_store, join_store

__all__ = [
    "Lifecycle",
    "Replicas",
    "Seat",
    "address_of",
    "check_room",
    "cluster",
    "host_store",
    "importing",
    "join_store",
    "on_one_host",
    "settle_heap",
    "start_all",
    "within",
]

_MEETING = ("address_of", "host_store", "join_store")
"""They need torch, which importing this folder does not."""


def __getattr__(name: str) -> Any:
    if name in _MEETING:
        return getattr(importlib.import_module(f"{__name__}.meeting"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
