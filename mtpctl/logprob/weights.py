"""The weights of one rank, by version: the current ones, on option those before, and an update on its way in.

With `keep_previous` a second set of tensors exists. It holds the version before, and an update is written into it while the
current version goes on answering; when the update is whole, the sets change places. Without it an update goes straight into
the live tensors, and one that breaks off leaves them mixed.

An adapter is merged into what is live, and the next one must not lie over it. So of parameters that an adapter changes, what is
beneath is kept from the first one on, as this rank holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mtpctl.sync.protocol import TargetDirty, VersionConflict


class HeldWeights:
    """Versions of a module's parameters, and of the buffers that some weights are. `current` is live except within `using`."""

    def __init__(self, module: torch.nn.Module, version: int, *, keep_previous: bool) -> None:
        self.parameters: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self.current = version
        self.previous: int | None = None
        self.spare = [torch.empty_like(p.data) for p in self.parameters] if keep_previous else None
        self.incoming: int | None = None
        self.touched = False
        # By place; of the current version, of the one on its way in (else the same), and what is live when these are shown instead.
        self._beneath: dict[int, Tensor] = {}
        self._beneath_incoming: dict[int, Tensor] = {}
        self._aside: dict[int, Tensor] = {}

    @property
    def versions(self) -> list[int]:
        """Versions that can answer, newest first."""
        return [self.current] if self.previous is None else [self.current, self.previous]

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """These weights live while the block runs. Raises VersionConflict where they are not held."""
        if version not in self.versions:
            raise VersionConflict(f"weight version {version} is not held; there are {self.versions}")
        if version != self.current:
            self._change_places()
        try:
            yield
        finally:
            if version != self.current:
                self._change_places()

    @torch.no_grad()
    def begin(self, version: int) -> None:
        """An update to `version` starts, or goes on with another section. Raises VersionConflict where it does not grow."""
        if version <= self.current or (self.incoming is not None and version != self.incoming):
            raise VersionConflict(f"weight version {version} does not follow {self.incoming or self.current}")
        if self.incoming is None and self.spare is not None:
            # What the update leaves out stays as it is now.
            self.previous = None
            for spare, parameter in zip(self.spare, self.parameters, strict=True):
                spare.copy_(parameter.data)
        self.incoming = version

    def destination(self, parameter: Tensor) -> Tensor:
        """Where the incoming value of a live parameter is written."""
        self.touched = True
        return self._arriving(self._places[id(parameter)])

    def _arriving(self, place: int) -> Tensor:
        """Where the incoming version lies, whatever is shown."""
        if self.spare is not None:
            return self.spare[place]
        return self._aside.get(place, self.parameters[place].data)

    def forget_beneath(self) -> None:
        """The incoming version has brought all weights anew, without an adapter so far."""
        self._beneath_incoming = {}

    def keep_beneath(self, parameters: Iterable[Tensor]) -> None:
        """An adapter is about to change these live parameters in the incoming version: copy those that none has changed before."""
        for parameter in parameters:
            place = self._places[id(parameter)]
            if place not in self._beneath_incoming:
                self._beneath_incoming[place] = self._arriving(place).clone()

    def adapted(self, parameter: Tensor) -> bool:
        """Whether something is kept beneath this live parameter."""
        return self._places[id(parameter)] in self._beneath_incoming

    @contextmanager
    def showing_beneath(self) -> Iterator[None]:
        """What is kept beneath adapters is live while the block runs. What it writes goes where it would without."""
        self._aside = {place: self.parameters[place].data for place in self._beneath_incoming}
        try:
            for place, tensor in self._beneath_incoming.items():
                self.parameters[place].data = tensor
            yield
        finally:
            for place, tensor in self._aside.items():
                self.parameters[place].data = tensor
            self._aside = {}

    @contextmanager
    def showing_incoming(self) -> Iterator[None]:
        """The incoming version is live while the block runs: for what works on the module itself."""
        if self.spare is None:
            yield  # it is
            return
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    def commit(self) -> None:
        """The incoming version is whole: it becomes the current one."""
        assert self.incoming is not None
        if self.spare is not None:
            self._change_places()
            self.previous = self.current
        self.current, self.incoming, self.touched = self.incoming, None, False
        self._beneath = dict(self._beneath_incoming)

    def abort(self) -> None:
        """Give up the incoming version. Raises TargetDirty where it has been written over the current one in part."""
        incoming, mixed = self.incoming, self.touched and self.spare is None
        self.incoming, self.touched = None, False
        self._beneath_incoming = dict(self._beneath)
        if mixed:
            raise TargetDirty(f"parts of version {incoming} lie over version {self.current}")

    def _change_places(self) -> None:
        assert self.spare is not None
        for i, parameter in enumerate(self.parameters):
            self.spare[i], parameter.data = parameter.data, self.spare[i]
