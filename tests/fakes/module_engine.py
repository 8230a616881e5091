"""An engine of plain modules, whose workers' end of an update is the real one; its steps can be lost, duplicated and reordered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtpctl.sync.engine_target import EngineTarget
from mtpctl.sync.parameters import match_shards
from mtpctl.sync.protocol import ABORTED_BY_SENDER, SyncError
from mtpctl.sync.receiver import AdapterReceiver, Inbox, StepReceiver, UpdateStep

Tensors = dict[str, torch.Tensor]


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module with copies of these parameters."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))
    return model


class ModuleEngine:
    """An `EngineClient`. `disturb` receives each step, and returns the steps that arrive instead of it."""

    def __init__(self, target: Tensors, draft: Tensors) -> None:
        self.models = {"target": module_of(target), "draft": module_of(draft)}
        inbox = Inbox(torch.device("cpu"))
        self.steps = {section: StepReceiver(inbox) for section in self.models}
        self.adapter: Tensors = {}
        self.disturb: Callable[[UpdateStep], list[UpdateStep]] = lambda step: [step]
        self._section = "target"

    def live(self) -> Tensors:
        """Copies of the live tensors."""
        models: list[Tensors] = [dict(model.named_parameters()) for model in self.models.values()]
        return {name: tensor.detach().clone() for tensors in [*models, self.adapter] for name, tensor in tensors.items()}

    async def start(self, *, draft: bool) -> None:
        self._section = "draft" if draft else "target"

    async def step(self, info: UpdateStep) -> None:
        steps = self.steps[self._section]
        try:
            for each in self.disturb(info):
                match each["action"]:
                    case "begin" if each["section"] == "adapter":
                        steps.begin_with(each, lambda plan: self._adapter_receiver(plan, info))
                    case "begin":
                        steps.begin(each, lambda plan: match_shards(self.models[self._section], plan))
                    case "buckets":
                        steps.receive(each)
                    case _:
                        raise SyncError(ABORTED_BY_SENDER)
        except BaseException as error:
            steps.fail(str(error))
            raise

    def _adapter_receiver(self, plan: Any, info: UpdateStep) -> AdapterReceiver:
        previous = self.steps["target"].received.get("adapter")
        return AdapterReceiver(replace(plan, config=info["config"]), previous=previous)  # type: ignore[arg-type]

    async def finish(self, version: int) -> None:
        self.steps[self._section].finish()

    async def rpc(self, method: str, *args: str) -> list[object]:
        if method == "mtpctl_sums":
            return [steps.sums(args) for steps in self.steps.values()]
        if method == "mtpctl_write_adapter":
            self._written = {name: tensor.clone() for name, tensor in self.steps["target"].received["adapter"].tensors.items()}  # type: ignore[attr-defined]
        return []

    async def load_adapter(self, name: str, number: int, folder: str) -> None:
        if Path(folder) != Path("held"):
            self.adapter = self._written


async def _at_once[T](step: Awaitable[T], what: str) -> T:
    return await step


def engine_target(engine: ModuleEngine) -> EngineTarget:
    """The engine as a target of updates, always paused."""
    return EngineTarget(engine, 0, with_deadline=_at_once, paused=lambda: True)
