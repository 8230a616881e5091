"""The log-prob server: old log-probs from ranks of their own, beside generation; scheduler, replicas, manager, HTTP face."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.logprob.dispatch import ServerLimits
    from mtpctl.logprob.placed import start_server
    from mtpctl.logprob.protocol import Bounds, Late, QueueFull, ReplicaDead, RequestRefused, Scored, ScoreRequest, VersionGone
    from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
    from mtpctl.logprob.replica import Replica, start_replica
    from mtpctl.logprob.server import LogprobServer

_HOMES = {
    "Bounds": "protocol",
    "Late": "protocol",
    "LogprobServer": "server",
    "QueueFull": "protocol",
    "Replica": "replica",
    "ReplicaConfig": "rank",
    "ReplicaDead": "protocol",
    "RequestRefused": "protocol",
    "ScoreRank": "rank",
    "ScoreRequest": "protocol",
    "Scored": "protocol",
    "ServerLimits": "dispatch",
    "VersionGone": "protocol",
    "start_replica": "replica",
    "start_server": "placed",
}

__all__ = [
    "Bounds",
    "Late",
    "LogprobServer",
    "QueueFull",
    "Replica",
    "ReplicaConfig",
    "ReplicaDead",
    "RequestRefused",
    "ScoreRank",
    "ScoreRequest",
    "Scored",
    "ServerLimits",
    "VersionGone",
    "start_replica",
    "start_server",
]


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
