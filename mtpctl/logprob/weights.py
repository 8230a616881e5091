"""The weights of one rank, by version: the current ones, on option those before, and an update on its way in.

With `keep_previous` a second set of tensors exists. It holds the version before, and an update is written into it while the
current version goes on answering; when the update is whole, the sets change places. Without it an update goes straight into
the live tensors, and one that breaks off leaves them mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mtpctl.sync import TargetDirty, VersionConflict


class HeldWeights:
    """Versions of a module's parameters. `current` is live except within `using`."""

    def __init__(self, module: torch.nn.Module, version: int, *, keep_previous: bool) -> None:
        self.parameters = list(module.parameters())
        self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self.current = version
        self.previous: int | None = None
        self.spare = [torch.empty_like(p.data) for p in self.parameters] if keep_previous else None
        self.incoming: int | None = None
        self.touched = False

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
        if self.spare is None:
            return parameter.data
        return self.spare[self._places[id(parameter)]]

    def commit(self) -> None:
        """The incoming version is whole: it becomes the current one."""
        assert self.incoming is not None
        if self.spare is not None:
            self._change_places()
            self.previous = self.current
        self.current, self.incoming, self.touched = self.incoming, None, False

    def abort(self) -> None:
        """Give up the incoming version. Raises TargetDirty where it has been written over the current one in part."""
        incoming, mixed = self.incoming, self.touched and self.spare is None
        self.incoming, self.touched = None, False
        if mixed:
            raise TargetDirty(f"parts of version {incoming} lie over version {self.current}")

    def _change_places(self) -> None:
        assert self.spare is not None
        for i, parameter in enumerate(self.parameters):
            self.spare[i], parameter.data = parameter.data, self.spare[i]
