"""The weights of one log-prob rank by version: current, optionally previous, and incoming; and merged LoRA adapters.

With `keep_previous` there is a second set of tensors for the previous version. An update is written into this set while the current version
continues to serve. When the update is complete, the sets are swapped. Without `keep_previous`, an update is written directly into the live
tensors, and an aborted update leaves a mix of two versions.

An adapter is merged into the live weights, and the next adapter must be merged into the same base weights. So from the first adapter on,
this rank keeps a copy of the base weights of every parameter that an adapter changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from mtpctl.sync.checksums import checksum
from mtpctl.sync.protocol import PlanMismatch, SectionPlan, TargetDirty, VersionConflict
from mtpctl.sync.receiver import AdapterReceiver, rank_of


class VersionedWeights:
    """Versions of a module's parameters and buffers (some weights are buffers).

    `current` is live, except within `using`, `showing_base` and `showing_incoming`.
    """

    def __init__(self, module: torch.nn.Module, version: int, *, keep_previous: bool) -> None:
        self.parameters: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.current = version
        self.previous: int | None = None
        self.spare = [torch.empty_like(p.data) for p in self.parameters] if keep_previous else None
        self.incoming: int | None = None
        self.touched = False
        # Keys are indices in `parameters`.
        self._base: dict[int, Tensor] = {}  # base weights of the current version
        self._incoming_base: dict[int, Tensor] = {}  # of the incoming version; those of the current version if there is no update
        self._merged: dict[int, Tensor] = {}  # merged weights, while `showing_base` has replaced them

    @property
    def versions(self) -> list[int]:
        """Available versions, newest first."""
        return [self.current] if self.previous is None else [self.current, self.previous]

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Make this version live while the block runs. Raises VersionConflict if it is not available."""
        if version not in self.versions:
            raise VersionConflict(f"weight version {version} is not available; there are {self.versions}")
        if version != self.current:
            self._exchange_sets()
        try:
            yield
        finally:
            if version != self.current:
                self._exchange_sets()

    @torch.no_grad()
    def begin(self, version: int) -> None:
        """Start an update to `version`, or another section of it.

        Raises VersionConflict if `version` is not newer than the current one, or another version is incoming.
        """
        if version <= self.current or (self.incoming is not None and version != self.incoming):
            raise VersionConflict(f"weight version {version} does not follow {self.incoming or self.current}")
        if self.incoming is None and self.spare is not None:
            # Tensors that are not in the update keep their current values.
            self.previous = None
            for spare, parameter in zip(self.spare, self.parameters, strict=True):
                spare.copy_(parameter.data)
        self.incoming = version

    def destination(self, parameter: Tensor) -> Tensor:
        """Return the tensor to which to write the incoming value of a live parameter, and record that it is written to."""
        self.touched = True
        return self._incoming_tensor(self._indices[id(parameter)])

    def _incoming_tensor(self, index: int) -> Tensor:
        """The incoming version of a parameter, also while `showing_base`."""
        if self.spare is not None:
            return self.spare[index]
        return self._merged.get(index, self.parameters[index].data)

    def forget_base(self) -> None:
        """Drop the copies of base weights, because the incoming version contains all weights, without an adapter."""
        self._incoming_base = {}

    def keep_base(self, parameters: Iterable[Tensor]) -> None:
        """Copy the incoming values of these live parameters as base weights, before an adapter is merged into them.

        Parameters that an earlier adapter has changed have a copy already.
        """
        for parameter in parameters:
            index = self._indices[id(parameter)]
            if index not in self._incoming_base:
                self._incoming_base[index] = self._incoming_tensor(index).clone()

    def has_base(self, parameter: Tensor) -> bool:
        """Whether there is a copy of the base weights of this live parameter."""
        return self._indices[id(parameter)] in self._incoming_base

    @contextmanager
    def showing_base(self) -> Iterator[None]:
        """Make the base weights live while the block runs. `destination` still returns the merged weights."""
        self._merged = {index: self.parameters[index].data for index in self._incoming_base}
        try:
            for index, tensor in self._incoming_base.items():
                self.parameters[index].data = tensor
            yield
        finally:
            for index, tensor in self._merged.items():
                self.parameters[index].data = tensor
            self._merged = {}

    @contextmanager
    def showing_incoming(self) -> Iterator[None]:
        """Make the incoming version live while the block runs, for operations on the module itself."""
        if self.spare is None:
            yield  # it is live already
            return
        self._exchange_sets()
        try:
            yield
        finally:
            self._exchange_sets()

    def commit(self) -> None:
        """Make the complete incoming version the current one."""
        assert self.incoming is not None
        if self.spare is not None:
            self._exchange_sets()
            self.previous = self.current
        self.current, self.incoming, self.touched = self.incoming, None, False
        self._base = dict(self._incoming_base)

    def abort(self) -> None:
        """Discard the incoming version. Raises TargetDirty if it has partly overwritten the current one."""
        incoming, mixed = self.incoming, self.touched and self.spare is None
        self.incoming, self.touched = None, False
        self._incoming_base = dict(self._base)
        if mixed:
            raise TargetDirty(f"parts of version {incoming} have overwritten version {self.current}")

    def _exchange_sets(self) -> None:
        assert self.spare is not None
        for i, parameter in enumerate(self.parameters):
            self.spare[i], parameter.data = parameter.data, self.spare[i]


class MergedAdapter(AdapterReceiver):
    """Receives section `adapter` on `device`, and merges it: W + (alpha / rank) B A, computed in fp32 and rounded once, as in the trainer.

    `shapes`: shapes of the model's weights by Hugging Face names. Raises PlanMismatch if the section does not fit them.
    """

    def __init__(
        self, plan: SectionPlan, shapes: Mapping[str, tuple[int, ...]], device: torch.device, *, previous: MergedAdapter | None = None
    ) -> None:
        super().__init__(plan, device, previous=previous)
        errors = []
        for name, layer in self.layers.items():
            if name not in shapes:
                errors.append(f"{name} is not a tensor of the served model's trunk")
            elif tuple(shapes[name]) != layer.shape:
                errors.append(f"the adapter of {name} has shape {layer.shape}, expected {tuple(shapes[name])}")
        if errors:
            raise PlanMismatch(f"the adapter does not fit the log-prob replica: {'; '.join(errors[:8])}")
        alpha = plan.config.get("lora_alpha")
        if not isinstance(alpha, int | float):
            raise PlanMismatch("the adapter does not fit the log-prob replica: its config has no lora_alpha")
        self._scale = alpha / rank_of(plan)

    @torch.no_grad()
    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight `[rows, columns]` with the adapter merged, in its dtype; unchanged if the adapter does not contain its layer."""
        layer = self.layers.get(name)
        if layer is None:
            return weight
        a, b = self.tensors[layer.a].float(), self.tensors[layer.b].float()
        return torch.addmm(weight.float(), b, a, alpha=self._scale).to(weight.dtype)

    def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}
