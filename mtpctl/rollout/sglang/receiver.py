"""Weights into a live SGLang engine: called in each of its processes with a step, as SGLang's custom weight loader.

The steps are those of `mtpctl.rollout.vllm.receiver`; target and drafter are models of their own, each with its receiver, behind one end
of the transfer.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtpctl.sync.manifest import SectionPlan, buckets_from
from mtpctl.sync.places import Place, Ranks
from mtpctl.sync.protocol import ABORTED_BY_SENDER, PlanMismatch, SyncError
from mtpctl.sync.receiver import Scratch, SectionReceiver, match
from mtpctl.sync.transports.base import BucketReader, Readers

_LIVE: dict[int, ModelReceiver] = {}
"""By `id` of the model, which lives as long as the process."""


def take(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """One step of an update of `model`. Never raises: the sender reads what became of it in the folder that the step names."""
    step = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    receiver = _LIVE.setdefault(id(model), ModelReceiver(model))
    answer: dict[str, Any]
    try:
        answer = {"result": receiver.take(step)}
    except Exception as error:
        receiver.fail(str(error))
        answer = {"error": str(error), "misfit": isinstance(error, PlanMismatch)}
    part = Path(step["answers"]) / f"{os.getpid()}-{id(model)}"
    part.write_text(json.dumps(answer))


class Arrivals:
    """What the models of a process share: its end of a transfer, which a process joins once, and the plans, which come once."""

    def __init__(self, device: torch.device) -> None:
        self.readers = Readers(device)
        self.plans: dict[str, SectionPlan] = {}


@cache
def _arrivals(device: torch.device) -> Arrivals:
    return Arrivals(device)


class ModelReceiver:
    """Takes sections of manifests into one live model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: dict[str, dict[str, Place]] = {}
        arrivals = _arrivals(next(model.parameters()).device)
        self._readers, self._plans = arrivals.readers, arrivals.plans
        self._reader: BucketReader | None = None
        self._current: SectionReceiver | None = None
        self._taken: SectionReceiver | None = None

    def take(self, step: dict[str, Any]) -> Any:
        """One step. Raises PlanMismatch in `begin`, SyncError in `buckets` and `finish`, and in `abort` always."""
        action = step["action"]
        if action == "begin":
            self._begin(step)
        elif action == "buckets":
            self._receive(step)
        elif action == "finish":
            self._finish()
        elif action == "sums":
            return self._sums()
        else:
            raise SyncError(ABORTED_BY_SENDER)
        return None

    def fail(self, reason: str) -> None:
        """Tell the others of a transfer that this end gives up."""
        self._readers.fail(reason)
        self._current = None

    def _begin(self, step: dict[str, Any]) -> None:
        reader = self._readers.open(step["transport"], step["address"])
        name = step["plan_name"]
        if step["plan"]:
            self._plans[name] = SectionPlan(buckets_from(json.loads(step["plan"])))
        plan = self._plans[name]
        if name not in self._places and not step["discard"]:
            self._places[name] = self._match(plan)
        self._current = Scratch(plan, self._readers.device) if step["discard"] else SectionReceiver(plan, self._places[name])
        reader.begin(step["version"], step["section"])
        self._reader = reader

    def _match(self, plan: SectionPlan) -> dict[str, Place]:
        from sglang.srt.runtime_context import get_parallel

        rename = getattr(self._model, "map_model_name_to_mtp_param_name", None)
        ranks = Ranks(get_parallel().tp_rank, get_parallel().tp_size)
        return match(self._model, plan, rename=rename, elsewhere=_shared(self._model) if rename is not None else None, ranks=ranks)

    def _receive(self, step: dict[str, Any]) -> None:
        if self._current is None or self._reader is None:
            raise SyncError("a bucket came before its section was begun")
        buckets = self._current.plan.buckets[step["first"] : step["first"] + step["count"]]
        for bucket, data in self._reader.stream(step["section"], buckets):
            self._current.receive(bucket, data)

    def _finish(self) -> None:
        if self._current is None:
            raise SyncError("there is no update to finish")
        self._current.finish()
        if not isinstance(self._current, Scratch):
            self._taken = self._current
        self._current = None
        self._readers.settle()

    def _sums(self) -> dict[str, list[dict[str, int]]]:
        if self._taken is None:
            return {}
        return {name: [asdict(part) for part in parts] for name, parts in self._taken.sums().items()}


def _shared(drafter: Any) -> nn.Module:
    """Embedding and head of a drafter, which are its target's."""
    held = nn.Module()
    held.embed, held.head = drafter.get_embed_and_head()
    return held
