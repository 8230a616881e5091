"""A trainer rank's part in a weight version: all ranks export, rank 0 plans, packs and sends."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from mtpctl.recipe.schema import Recipe
from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import Section
from mtpctl.sync.transports.base import Sent


class WeightSource:
    """The weights of an engine, on their way out. Ranks are called together, with the same arguments; rank 0 answers.

    A version is either published in one step (`publish`), or pushed in three: `announce`, `send`, `keep`.
    """

    def __init__(self, recipe: Recipe, engine: Any, rank: int) -> None:
        self.recipe, self.engine, self.rank = recipe, engine, rank
        self.packing: Any = None
        self._learned = False
        self._moving: tuple[Section, ...] = ()

    def publish(self, version: int, store: str, checksums: bool, sections: tuple[Section, ...]) -> Manifest | None:
        """Export these sections into the version store of this host, from which receivers draw."""
        self._begin(sections, store)
        if not self._learned:
            self._exported(self._learn)
        self._learned = True
        return self._exported(lambda export: self.packing.publish(export, version, checksums=checksums))

    def announce(self, version: int, store: str, members: list[str], checksums: bool, sections: tuple[Section, ...]) -> Manifest | None:
        """Say what a pushed version of these sections will be, to receivers of these names."""
        self._begin(sections, store)
        sums: dict[str, dict[str, str]] = {}
        if checksums or not self._learned:
            sums = self._exported(lambda export: self._learn(export, checksums=checksums))
        self._learned = True
        return self.packing.announce(version, members, sums) if self.rank == 0 else None

    def send(self) -> Sent | None:
        """Send what was announced, while the receivers take it in."""
        return self._exported(lambda export: self.packing.send(export))

    def keep(self) -> None:
        """Copy what was sent for the version store; a thread writes it there while training goes on."""
        self._exported(lambda export: self.packing.keep(export))

    def _begin(self, sections: tuple[Section, ...], store: str) -> None:
        self._moving = sections
        if self.rank == 0:
            if self.packing is None:
                self.packing = self._made(store)
            self.packing.moving = sections

    def _made(self, store: str) -> Any:
        """What packs and sends, by the recipe's transport. The first version has every section."""
        from mtpctl.families.tensors import section_of
        from mtpctl.plan.wire import ADAPTER_PREFIX
        from mtpctl.sync.publisher import Publisher
        from mtpctl.sync.sender import Sender
        from mtpctl.sync.store import VersionStore

        shape, sync = self.engine.folder.shape, self.recipe.sync
        options: dict[str, Any] = {
            "bucket_bytes": sync.bucket_bytes,
            "sections": self._moving,
            "section_of": lambda name: "adapter" if name.startswith(ADAPTER_PREFIX) else section_of(name, shape),
        }
        if sync.transport == "shm":
            return Publisher(VersionStore(store), **options)
        return Sender(VersionStore(store), sync.transport, self.engine.device, deadline_s=sync.deadline_s, **options)

    def _exported(self, use: Callable[[Iterator[Any]], Any]) -> Any:
        """What rank 0 makes of an export that every rank takes part in, to its end, whatever becomes of it on rank 0."""
        export = itertools.chain.from_iterable(map(self._section, self._moving))
        try:
            return use(export) if self.rank == 0 else None
        finally:
            collections.deque(export, maxlen=0)

    def _section(self, section: Section) -> Iterator[Any]:
        """One section's tensors. Where the adapter travels by itself, the target is what lies beneath it."""
        if section == "adapter":
            tensors: Iterator[Any] = self.engine.export_adapter()
            return tensors
        return self.engine.export(sections=(section,), merged="adapter" not in self.recipe.sync.sections)

    def _learn(self, export: Iterator[Any], *, checksums: bool = False) -> dict[str, dict[str, str]]:
        """Plan, unless it is planned already. What PEFT has to be told of an adapter is known then."""
        from mtpctl.convert.adapters import peft_config
        from mtpctl.families.tensors import aliases

        folder, lora = self.engine.folder, self.recipe.train.lora
        sums: dict[str, dict[str, str]] = self.packing.learn(export, aliases(folder.shape), checksums=checksums)
        if lora is not None and "adapter" in self._moving:
            names = [entry.name for bucket in self.packing.plans["adapter"] for entry in bucket.entries]
            self.packing.config["adapter"] = peft_config(names, lora, str(folder.path))
        return sums
