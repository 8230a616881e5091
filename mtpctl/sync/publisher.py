"""The sender of transport `shm`: it writes a version into the store of this host, where receivers read it when they like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import torch

from mtpctl.sync.manifest import Manifest
from mtpctl.sync.packing import Export, Packer, PackingOptions, spec_of
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.shm import NAME as SHM
from mtpctl.sync.transports.shm import Writer


class Publisher(Packer):
    """Publishes into a `VersionStore` on this host."""

    def __init__(self, store: VersionStore, **options: Unpack[PackingOptions]) -> None:
        super().__init__(**options)
        self.store = store

    def publish(self, export: Export, version: int, *, checksums: bool = False) -> Manifest:
        """Pack and publish one version. Until it returns, receivers see the version before.

        Unless `plan` or `plan_from` was called, the first export is held whole to plan from it; later ones stream. With `checksums`,
        one is taken of each tensor for receivers to compare with.

        Raises VersionConflict unless `version` grows, PlanMismatch where the export differs from the plan, and
        EnvironmentMissing where the store is full; a failed version leaves nothing behind.
        """
        tensors = self.cast(export)
        if not self.plans:
            held = list(tensors)
            self.plan((spec_of(name, tensor) for name, tensor in held), _tied(held))
            tensors = iter(held)
        folder = self.store.prepare(version)
        try:
            sums = self.pack(version, tensors, Writer(folder), checksums=checksums)
            address = str(Path(folder).absolute())
            manifest = Manifest(version, SHM, address, self.section_plans(sums), str(self.store.root.absolute()))
            self.store.commit(manifest)
        except BaseException:
            self.store.discard(version)
            raise
        return manifest


def _tied(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Names of tensors that are another one's very memory, each with that other name."""
    owners: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors:
        owner = owners.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if owner != name and tensor.numel():
            tied[name] = owner
    return tied
