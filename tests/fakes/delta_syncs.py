"""A trainer whose weights change a little in each version, and an engine that receives them."""

from __future__ import annotations

import asyncio

import torch

from mtpctl.sync.engine_target import EngineTarget
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.update import SyncReport, update_target
from tests.fakes.module_engine import ModuleEngine, Tensors

TARGET = {"model.embed.weight": (331, 17), "model.layers.0.w": (129, 65), "model.layers.1.w": (70, 13), "model.norm.weight": (67,)}


DRAFT = {"model.mtp_layers.0.w": (53, 31), "model.mtp_layers.0.norm.weight": (5,)}


class Trainer:
    """Weights that change a little from version to version."""

    def __init__(self, *, share: float = 0.01, dtype: torch.dtype = torch.bfloat16) -> None:
        self.share, self.generator = share, torch.Generator().manual_seed(0)
        self.tensors = {name: torch.randn(shape, generator=self.generator).to(dtype) for name, shape in {**TARGET, **DRAFT}.items()}

    def step(self) -> Tensors:
        """Change some elements of some tensors."""
        for tensor in self.tensors.values():
            if torch.rand((), generator=self.generator) < 0.9:
                mask = torch.rand(tensor.shape, generator=self.generator) < self.share
                tensor[mask] = torch.randn(int(mask.sum()), generator=self.generator).to(tensor.dtype)
        return self.copy()

    def copy(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def split(tensors: Tensors) -> tuple[Tensors, Tensors]:
    draft = {name: tensor for name, tensor in tensors.items() if ".mtp_layers." in name}
    return {name: tensor for name, tensor in tensors.items() if name not in draft}, draft


def same(live: Tensors, sent: Tensors) -> bool:
    return live.keys() == sent.keys() and all(torch.equal(live[name].view(torch.uint8), sent[name].view(torch.uint8)) for name in sent)


def update(target: EngineTarget, manifest: Manifest, *, verify: bool = False) -> SyncReport:
    return asyncio.run(update_target(target, manifest, verify=verify))


def new_engine(seed: int = 9) -> ModuleEngine:
    """An engine with other weights."""
    other = torch.Generator().manual_seed(seed)
    return ModuleEngine(*split({name: torch.randn(shape, generator=other).bfloat16() for name, shape in {**TARGET, **DRAFT}.items()}))
