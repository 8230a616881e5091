"""A trainer rank's part in a weight sync: all ranks export, because exporting is collective; rank 0 plans, packs and sends."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Protocol

from mtpctl.recipe.numerics import sent_in_fp8
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.sync import PUSH_TRANSPORTS, StorageConfig
from mtpctl.sync.protocol import Manifest, Section
from mtpctl.sync.transports.base import TransferStats

if TYPE_CHECKING:
    import torch

    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.sync.packing import Checksums
    from mtpctl.sync.sender import Publisher, Sender

type Tensors = Iterator[tuple[str, torch.Tensor]]


class ExportingEngine(Protocol):
    """The part of `MegatronEngine`'s interface that exports weights."""

    @property
    def folder(self) -> HfFolder: ...

    @property
    def device(self) -> torch.device: ...

    def export(self, sections: Collection[str], *, merged: bool) -> Tensors: ...

    def export_adapter(self) -> Tensors: ...


class WeightExporter:
    """Sends the weights of `engine`. A `WeightUpdate` calls each method on all ranks and uses the result of rank 0."""

    engine: ExportingEngine

    def __init__(self, recipe: Recipe, rank: int, engine: ExportingEngine | None = None) -> None:
        self.recipe, self.rank = recipe, rank
        if engine is not None:
            self.engine = engine
        # The sender of the version being sent, and all senders by store. A run may have a second store, for unquantized versions.
        self._sender: Publisher | Sender | None = None
        self._senders: dict[str, Publisher | Sender] = {}
        self._planned_stores: set[str] = set()
        self._sections: tuple[Section, ...] = ()

    def plan_weights(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest | None:
        """Return the manifest of `version`: its sections and buckets, and how receivers get them.

        Matrices are quantized as the recipe configures, except for a store of unquantized versions (`is_unquantized`).

        With the transports `shm` and `storage`, the buckets have been stored or uploaded when this returns. With `ipc` and `nccl`, nothing
        has been sent yet, and `members` names the receivers.
        """
        self._sections = sections
        if self.rank == 0:
            if store not in self._senders:
                self._senders[store] = self._new_sender(store)
            self._sender = self._senders[store]
            self._sender.next_sections = sections
        if self.recipe.sync.transport not in PUSH_TRANSPORTS:
            if store not in self._planned_stores:
                self._on_rank_0(lambda export: self._plan_from(export))
            self._planned_stores.add(store)
            return self._on_rank_0(lambda export: self._publisher.publish(export, version, checksums=checksums))
        sums: Checksums | None = None
        if checksums or store not in self._planned_stores or self.recipe.sync.delta:
            sums = self._on_rank_0(lambda export: self._plan_from(export, checksums=checksums))
        self._planned_stores.add(store)
        return self._pusher.announce(version, members, sums) if self.rank == 0 else None

    def transfer_weights(self) -> TransferStats | None:
        """Send the planned buckets. Receivers must receive concurrently."""
        return self._on_rank_0(lambda export: self._pusher.send(export))

    def persist_weights(self) -> None:
        """Copy the sent buckets; a thread writes the copies to the version store while training continues."""
        self._on_rank_0(lambda export: self._pusher.persist(export))

    @property
    def _publisher(self) -> Publisher:
        from mtpctl.sync.sender import Publisher

        assert isinstance(self._sender, Publisher)
        return self._sender

    @property
    def _pusher(self) -> Sender:
        from mtpctl.sync.sender import Sender

        assert isinstance(self._sender, Sender), "plan_weights comes first"
        return self._sender

    def _new_sender(self, store: str) -> Publisher | Sender:
        """Create the sender for the recipe's transport. The first version must have all sections."""
        from mtpctl.cluster.object_store import ObjectStore
        from mtpctl.families.tensors import section_of
        from mtpctl.plan.buckets import ADAPTER_PREFIX
        from mtpctl.sync.packing import PackingOptions
        from mtpctl.sync.remote import URL_FIELD
        from mtpctl.sync.sender import Publisher, Sender
        from mtpctl.sync.store import VersionStore, is_unquantized

        shape, sync = self.engine.folder.shape, self.recipe.sync
        options: PackingOptions = {
            "bucket_bytes": sync.bucket_bytes,
            "sections": self._sections,
            "section_of": lambda name: "adapter" if name.startswith(ADAPTER_PREFIX) else section_of(name, shape),
            "quantized": frozenset() if is_unquantized(store) else sent_in_fp8(self.recipe, shape),
        }
        if sync.transport not in PUSH_TRANSPORTS:
            url = self.recipe.sync_url
            versions = VersionStore(store, None if url is None else ObjectStore(url, URL_FIELD))
            pinned, relay = self.engine.device.type == "cuda", isinstance(sync, StorageConfig) and sync.relay
            return Publisher(versions, delta=sync.delta, pinned=pinned, digests=relay, **options)
        device = self.engine.device
        return Sender(VersionStore(store), sync.transport, device, deadline_s=sync.deadline_s, delta=sync.delta, **options)

    def _on_rank_0[T](self, consume: Callable[[Tensors], T]) -> T | None:
        """Call `consume` with an export on rank 0. Every rank iterates the export to its end, even if rank 0 fails."""
        export = itertools.chain.from_iterable(map(self._export_section, self._sections))
        try:
            return consume(export) if self.rank == 0 else None
        finally:
            collections.deque(export, maxlen=0)

    def _export_section(self, section: Section) -> Tensors:
        """The tensors of one section. If the adapter is sent separately, the target section has the base weights."""
        if section == "adapter":
            return self.engine.export_adapter()
        return self.engine.export(sections=(section,), merged="adapter" not in self.recipe.sync.sections)

    def _plan_from(self, export: Tensors, *, checksums: bool = False) -> Checksums:
        """Plan the buckets if they are not planned yet, and set the adapter's config. Returns checksums if requested."""
        from mtpctl.convert.adapters import peft_config
        from mtpctl.families.tensors import aliases

        assert self._sender is not None
        folder, lora = self.engine.folder, self.recipe.train.lora
        sums = self._sender.plan_from(export, aliases(folder.shape), checksums=checksums)
        if lora is not None and "adapter" in self._sections:
            names = [entry.name for bucket in self._sender.plans["adapter"] for entry in bucket.entries]
            self._sender.config["adapter"] = peft_config(names, lora, str(folder.path))
        return sums
