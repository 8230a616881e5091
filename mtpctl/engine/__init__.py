"""Megatron at work: process groups, packed micro-batches, updates, log-probs, export."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.engine.batch import MicroBatch, Sequence
    from mtpctl.engine.checkpoint import latest_checkpoint, publish_checkpoint
    from mtpctl.engine.config import EngineConfig
    from mtpctl.engine.engine import MegatronEngine, Scores
    from mtpctl.engine.objective import NextToken, Objective
    from mtpctl.engine.parallel import Rank
    from mtpctl.engine.pointer import newest, pointer_of
    from mtpctl.engine.scoring import DraftScores, TokenScores, Want, score_tokens

__all__ = [
    "DraftScores",
    "EngineConfig",
    "MegatronEngine",
    "MicroBatch",
    "NextToken",
    "Objective",
    "Rank",
    "Scores",
    "Sequence",
    "TokenScores",
    "Want",
    "latest_checkpoint",
    "newest",
    "pointer_of",
    "publish_checkpoint",
    "score_tokens",
]

_HOMES = {
    "MicroBatch": "batch",
    "Sequence": "batch",
    "latest_checkpoint": "checkpoint",
    "publish_checkpoint": "checkpoint",
    "EngineConfig": "config",
    "MegatronEngine": "engine",
    "Scores": "engine",
    "NextToken": "objective",
    "Objective": "objective",
    "Rank": "parallel",
    "newest": "pointer",
    "pointer_of": "pointer",
    "DraftScores": "scoring",
    "TokenScores": "scoring",
    "Want": "scoring",
    "score_tokens": "scoring",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
