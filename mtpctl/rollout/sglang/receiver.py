"""Receives weights into a live SGLang engine, as SGLang's custom weight loader in each of its processes.

Target and drafter are separate models with one receiver each. The two receivers share one inbox.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from mtpctl.sync.parameters import Shard, TpRank, match_shards
from mtpctl.sync.protocol import ABORTED_BY_SENDER, PlanMismatch, SectionPlan, SyncError
from mtpctl.sync.receiver import Inbox, RankSums, StepReceiver, UpdateStep

_RECEIVERS: dict[int, ModelReceiver] = {}
"""By `id` of the model, which exists as long as the process."""

_inbox = cache(Inbox)
"""The inbox of this process for a device."""


class AnsweredStep(UpdateStep):
    """A step, and the folder in which every process and model writes its result."""

    answers: str


def take(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Apply one step of an update of `model`. Never raises: the result is written to the folder `answers` of the step."""
    step: AnsweredStep = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    receiver = _RECEIVERS.setdefault(id(model), ModelReceiver(model))
    answer: dict[str, object]
    try:
        answer = {"result": receiver.take(step)}
    except Exception as error:
        receiver.steps.fail(str(error))
        answer = {"error": str(error), "misfit": isinstance(error, PlanMismatch)}
    part = Path(step["answers"]) / f"{os.getpid()}-{id(model)}"
    part.write_text(json.dumps(answer))


class ModelReceiver:
    """Receives sections of manifests into one live model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.steps = StepReceiver(_inbox(next(model.parameters()).device))

    def take(self, step: UpdateStep) -> RankSums | None:
        """Apply one step. Raises PlanMismatch in `begin`, SyncError in `buckets` and `finish`, and always in `abort`."""
        match step["action"]:
            case "begin":
                self.steps.begin(step, self._match)
            case "buckets":
                self.steps.receive(step)
            case "finish":
                if self.steps.finish() is None:
                    raise SyncError("there is no update to finish")
            case "sums":
                return self.steps.sums()
            case _:
                raise SyncError(ABORTED_BY_SENDER)
        return None

    def _match(self, plan: SectionPlan) -> dict[str, Shard]:
        from sglang.srt.runtime_context import get_parallel

        rename = getattr(self._model, "map_model_name_to_mtp_param_name", None)
        tp = TpRank(get_parallel().tp_rank, get_parallel().tp_size)
        shared_with = _shared(cast(_Drafter, self._model)) if rename is not None else None
        return match_shards(self._model, plan, rename=rename, shared_with=shared_with, tp=tp)


class _Drafter(Protocol):
    """A drafter of SGLang."""

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]: ...


def _shared(drafter: _Drafter) -> nn.Module:
    """Embedding and head that a drafter shares with its target."""
    shared = nn.Module()
    shared.embed, shared.head = drafter.get_embed_and_head()
    return shared
