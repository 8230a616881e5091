"""Hugging Face tensors that arrive one by one, into Megatron modules, through the one mapping.

A Megatron parameter may be made of several tensors (q, k and v are interleaved in one). Each is held until the last one of its parameter
arrives. The parameter is then converted, split over the tensor-parallel ranks and copied, and its tensors are released, so that memory
beside the transport's own holds only the tensors of unfinished parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from mtpctl.convert.bridge import WeightBridge
from mtpctl.convert.upstream import LocalTask, is_local, names_of

Destination = Callable[[Tensor], Tensor]
"""From a parameter to the tensor that its new value is written to: itself, or a copy that takes its place later."""


class StreamMap:
    """Which tensors make which parameters of these modules. All ranks build it together.

    names: of all tensors that the model's Hugging Face folder may hold.
    """

    def __init__(self, bridge: WeightBridge, chunks: list[torch.nn.Module], names: Collection[str]) -> None:
        self.bridge, self.chunks = bridge.mapping(), chunks
        tasks = [task for task in self.bridge.build_conversion_tasks(bridge.pretrained(names), chunks) if task is not None]
        self.tasks = [task for task in tasks if is_local(task)]
        self.known = {name for task in tasks for name in names_of(task)}
        """Names of the tensors that some rank needs."""


class WeightStream:
    """One section of one weight update: `add` each of its tensors once, then `finish`. All ranks do so in the same order."""

    def __init__(self, stream_map: StreamMap, names: Collection[str], destination: Destination) -> None:
        self.map = stream_map
        self.destination = destination
        self.waiting = [task for task in stream_map.tasks if set(names_of(task)) <= set(names)]
        self.uses = Counter(name for task in self.waiting for name in names_of(task))
        self.held: dict[str, Tensor] = {}
        self.applied = 0

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor, and apply the parameters that it completes. It may be a view of memory that is valid until `settle`."""
        if not self.uses[name]:
            return
        self.held[name] = tensor
        for task in [task for task in self.waiting if name in names_of(task) and all(n in self.held for n in names_of(task))]:
            self._apply(task)
            self.waiting.remove(task)
        # A tensor is released when every parameter that needs it is applied.
        self.held = {kept: value for kept, value in self.held.items() if self.uses[kept]}

    def settle(self) -> None:
        """Copy the tensors that are still held, so that the caller can reuse the memory they came in."""
        self.held = {name: tensor.clone() for name, tensor in self.held.items()}

    def finish(self) -> None:
        """End the section: update the copies of embeddings on other pipeline stages. Raises ValueError naming tensors that are missing."""
        if self.waiting:
            missing = sorted({name for task in self.waiting for name in names_of(task) if name not in self.held})
            raise ValueError(f"the update ended without {', '.join(missing[:8])}")
        self.map.bridge._broadcast_shared_embeddings(self.map.chunks)

    def _apply(self, task: LocalTask) -> None:
        weights = self.map.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self.held)
        converted = task.mapping.hf_to_megatron(weights, task.megatron_module)
        if converted is not None:
            self.destination(task.param_weight).copy_(converted)
            self.applied += 1
        for name in names_of(task):
            self.uses[name] -= 1
