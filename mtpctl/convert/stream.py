"""Hugging Face tensors that arrive one by one, into Megatron modules, through the one mapping.

A Megatron parameter may be made of several tensors (q, k and v lie interleaved in one): each is kept until the last of its
parameter is there, then converted, split over the tensor-parallel ranks and copied, and let go. So no more than the pieces
of unfinished parameters is held beside what the transport holds itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from mtpctl.convert.bridge import WeightBridge, names_of

Destination = Callable[[Tensor], Tensor]
"""From a live parameter to the tensor that its new value is written to: itself, or a copy that goes live later."""


class StreamMap:
    """Which tensors make which parameters of these modules. Made once; all ranks make it together.

    `names` are all tensors that the model's Hugging Face folder may hold.
    """

    def __init__(self, bridge: WeightBridge, chunks: list[torch.nn.Module], names: Collection[str]) -> None:
        self.bridge, self.chunks = bridge.mapping(), chunks
        tasks = [task for task in self.bridge.build_conversion_tasks(bridge.told(names), chunks) if task is not None]
        self.tasks: list[Any] = [task for task in tasks if task.megatron_module is not None]
        self.known = {name for task in tasks for name in names_of(task)}
        """Names that some rank takes in."""


class WeightStream:
    """One section of one update: `add` every tensor of it once, then `finish`. All ranks do so in the same order."""

    def __init__(self, stream_map: StreamMap, names: Collection[str], destination: Destination) -> None:
        self.map = stream_map
        self.destination = destination
        self.waiting = [task for task in stream_map.tasks if set(names_of(task)) <= set(names)]
        self.uses = Counter(name for task in self.waiting for name in names_of(task))
        self.held: dict[str, Tensor] = {}
        self.applied = 0

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Take in a whole tensor. It may be a view of memory that goes away after `settle`."""
        if not self.uses[name]:
            return
        self.held[name] = tensor
        for task in [task for task in self.waiting if name in names_of(task) and all(n in self.held for n in names_of(task))]:
            self._apply(task)
            self.waiting.remove(task)
        # A tensor of which every parameter is made is done with.
        self.held = {kept: value for kept, value in self.held.items() if self.uses[kept]}

    def settle(self) -> None:
        """Copy what is still held, so that the memory it came in can go."""
        self.held = {name: tensor.clone() for name, tensor in self.held.items()}

    def finish(self) -> None:
        """Raise ValueError naming what is missing; else bring copies on other pipeline stages up to date."""
        if self.waiting:
            missing = sorted({name for task in self.waiting for name in names_of(task) if name not in self.held})
            raise ValueError(f"the update ended without {', '.join(missing[:8])}")
        self.map.bridge._broadcast_shared_embeddings(self.map.chunks)

    def _apply(self, task: Any) -> None:
        weights = self.map.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self.held)
        converted = task.mapping.hf_to_megatron(weights, task.megatron_module)
        if converted is not None:
            self.destination(task.param_weight).copy_(converted)
            self.applied += 1
        for name in names_of(task):
            self.uses[name] -= 1
