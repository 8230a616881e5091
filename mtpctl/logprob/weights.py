"""The weights of one log-prob rank, by version: the current ones, on option the previous ones, and an update that is being received.

With `keep_previous` there is a second set of tensors. It holds the previous version; an update is written into it while the current
version goes on answering, and when the update is complete the two sets are exchanged. Without it an update is written straight into
the live tensors, and one that breaks off leaves two versions mixed.

An adapter is merged into the live weights, and the next adapter must be merged into the same base weights. So a copy of the base
weights is kept of every parameter that an adapter changes, from the first adapter on, as this rank holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from mtpctl.sync.adapter import AdapterReceiver, rank_of
from mtpctl.sync.checksums import checksum
from mtpctl.sync.protocol import PlanMismatch, SectionPlan, TargetDirty, VersionConflict


class HeldWeights:
    """Versions of a module's parameters and buffers (some weights are buffers). `current` is live except within `using`."""

    def __init__(self, module: torch.nn.Module, version: int, *, keep_previous: bool) -> None:
        self.parameters: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self.current = version
        self.previous: int | None = None
        self.spare = [torch.empty_like(p.data) for p in self.parameters] if keep_previous else None
        self.incoming: int | None = None
        self.touched = False
        # By place in `parameters`: base weights of the current version; of the incoming one (without one, the same); and the merged
        # weights, while `showing_base` has the base weights in their place.
        self._base: dict[int, Tensor] = {}
        self._incoming_base: dict[int, Tensor] = {}
        self._merged: dict[int, Tensor] = {}

    @property
    def versions(self) -> list[int]:
        """Versions that can answer, newest first."""
        return [self.current] if self.previous is None else [self.current, self.previous]

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Have this version live while the block runs. Raises VersionConflict where it is not held."""
        if version not in self.versions:
            raise VersionConflict(f"weight version {version} is not held; there are {self.versions}")
        if version != self.current:
            self._exchange_sets()
        try:
            yield
        finally:
            if version != self.current:
                self._exchange_sets()

    @torch.no_grad()
    def begin(self, version: int) -> None:
        """Start an update to `version`, or another section of it. Raises VersionConflict where the version does not grow."""
        if version <= self.current or (self.incoming is not None and version != self.incoming):
            raise VersionConflict(f"weight version {version} does not follow {self.incoming or self.current}")
        if self.incoming is None and self.spare is not None:
            # Tensors that the update does not bring keep their current values.
            self.previous = None
            for spare, parameter in zip(self.spare, self.parameters, strict=True):
                spare.copy_(parameter.data)
        self.incoming = version

    def destination(self, parameter: Tensor) -> Tensor:
        """The tensor to which the incoming value of a live parameter is to be written."""
        self.touched = True
        return self._incoming_tensor(self._places[id(parameter)])

    def _incoming_tensor(self, place: int) -> Tensor:
        """The incoming version of a parameter, also while `showing_base`."""
        if self.spare is not None:
            return self.spare[place]
        return self._merged.get(place, self.parameters[place].data)

    def forget_base(self) -> None:
        """Drop the copies: the incoming version has brought all weights anew, with no adapter merged so far."""
        self._incoming_base = {}

    def keep_base(self, parameters: Iterable[Tensor]) -> None:
        """Copy these live parameters, before an adapter is merged into them, unless an adapter before it changed them already."""
        for parameter in parameters:
            place = self._places[id(parameter)]
            if place not in self._incoming_base:
                self._incoming_base[place] = self._incoming_tensor(place).clone()

    def has_base(self, parameter: Tensor) -> bool:
        """Whether base weights of this live parameter are kept."""
        return self._places[id(parameter)] in self._incoming_base

    @contextmanager
    def showing_base(self) -> Iterator[None]:
        """Have the base weights live while the block runs. `destination` goes on to name the merged weights."""
        self._merged = {place: self.parameters[place].data for place in self._incoming_base}
        try:
            for place, tensor in self._incoming_base.items():
                self.parameters[place].data = tensor
            yield
        finally:
            for place, tensor in self._merged.items():
                self.parameters[place].data = tensor
            self._merged = {}

    @contextmanager
    def showing_incoming(self) -> Iterator[None]:
        """Have the incoming version live while the block runs, for what works on the module itself."""
        if self.spare is None:
            yield  # it is live already
            return
        self._exchange_sets()
        try:
            yield
        finally:
            self._exchange_sets()

    def commit(self) -> None:
        """Make the incoming version, which is complete, the current one."""
        assert self.incoming is not None
        if self.spare is not None:
            self._exchange_sets()
            self.previous = self.current
        self.current, self.incoming, self.touched = self.incoming, None, False
        self._base = dict(self._incoming_base)

    def abort(self) -> None:
        """Give up the incoming version. Raises TargetDirty where it has been written over the current one in part."""
        incoming, mixed = self.incoming, self.touched and self.spare is None
        self.incoming, self.touched = None, False
        self._incoming_base = dict(self._base)
        if mixed:
            raise TargetDirty(f"parts of version {incoming} lie over version {self.current}")

    def _exchange_sets(self) -> None:
        assert self.spare is not None
        for i, parameter in enumerate(self.parameters):
            self.spare[i], parameter.data = parameter.data, self.spare[i]


# An adapter that a log-prob replica receives. It scores with merged weights: W + (alpha / rank) B A.
#
# The adapter alone is sent. Merging would lose the base weights W, so `HeldWeights` keeps them. The product is added in fp32 and rounded
# once, as in the trainer's own export.


class MergedAdapter(AdapterReceiver):
    """Receives section `adapter` on `device`, for a model whose weights have these `shapes`, by Hugging Face names.

    Raises PlanMismatch where the section is no adapter, or one for other weights.
    """

    def __init__(self, plan: SectionPlan, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__(plan, device)
        wrong = []
        for name, layer in self.layers.items():
            if name not in shapes:
                wrong.append(f"{name} is not a tensor of the served model's trunk")
            elif tuple(shapes[name]) != layer.shape:
                wrong.append(f"the adapter of {name} makes {layer.shape}, the served model has {tuple(shapes[name])}")
        if wrong:
            raise PlanMismatch(f"the adapter does not fit the log-prob replica: {'; '.join(wrong[:8])}")
        alpha = plan.config.get("lora_alpha")
        if not isinstance(alpha, int | float):
            raise PlanMismatch("the adapter does not fit the log-prob replica: its config names no lora_alpha")
        self._scale = alpha / rank_of(plan)

    @torch.no_grad()
    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight `[rows, columns]` with the adapter merged in, in its own dtype; unchanged where the adapter leaves its layer out."""
        layer = self.layers.get(name)
        if layer is None:
            return weight
        a, b = self.tensors[layer.a].float(), self.tensors[layer.b].float()
        return torch.addmm(weight.float(), b, a, alpha=self._scale).to(weight.dtype)

    def checksums(self) -> dict[str, str]:
        """Checksums of the adapter's tensors as they were received."""
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}
