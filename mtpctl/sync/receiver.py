"""The receiver's end inside an engine: writes wire tensors into the parameters of a live model, in place.

Parameters keep their memory, so whatever holds on to them (CUDA graphs, tied layers) sees the new weights. Everything
that can be wrong about a plan is found by `match` before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from mtpctl.plan import Bucket, Entry
from mtpctl.sync.checksums import checksum
from mtpctl.sync.manifest import SectionPlan
from mtpctl.sync.names import Renamer, Slot, resolve
from mtpctl.sync.protocol import PlanMismatch, SyncError


@dataclass(frozen=True, slots=True)
class Place:
    """Rows `[start, stop)` of a live parameter."""

    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def view(self) -> torch.Tensor:
        """The live memory itself."""
        return self.parameter.data[self.start : self.stop] if self.parameter.ndim else self.parameter.data


def match(model: nn.Module, plan: SectionPlan, *, rename: Renamer | None = None, elsewhere: nn.Module | None = None) -> dict[str, Place]:
    """The place of every tensor of `plan` in `model`.

    Parameters that `elsewhere` holds too (a drafter's embedding and head are its target's) need not be in the plan.
    Raises PlanMismatch with everything that is wrong: names that resolve to nothing, shapes, dtypes, parameters that
    nothing fills.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    shared = {id(parameter) for parameter in elsewhere.parameters()} if elsewhere is not None else set()
    places: dict[str, Place] = {}
    filled: dict[int, set[int | None]] = {id(parameter): set() for parameter in live.values()}
    wrong: list[str] = []
    for name, entry in plan.tensors().items():
        slot = next(filter(None, (resolve(alias, live, rename) for alias in (name, *entry.aliases))), None)
        if slot is None:
            wrong.append(f"{name} resolves to nothing")
            continue
        place = _place(model, live[slot.parameter], slot)
        filled[id(place.parameter)].add(slot.part)
        dtype = str(place.parameter.dtype).removeprefix("torch.")
        if tuple(place.view.shape) != entry.shape:
            wrong.append(f"{name} has shape {entry.shape}, its place in {slot.parameter} {tuple(place.view.shape)}")
        elif dtype != entry.dtype:
            wrong.append(f"{name} is {entry.dtype}, {slot.parameter} is {dtype}")
        places[name] = place
    for name, parameter in live.items():
        parts = filled[id(parameter)]
        if None not in parts and parts != set(range(len(_part_rows(model, name)))) and id(parameter) not in shared:
            wrong.append(f"{name} is filled {'in part' if parts else 'by nothing'}")
    if wrong:
        raise PlanMismatch("the weights do not fit the live model: " + "; ".join(wrong))
    return places


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])


def _part_rows(model: nn.Module, parameter: str) -> list[int]:
    """Rows of each packed part of a parameter; one part where it packs nothing."""
    return list(getattr(_owner(model, parameter), "output_sizes", ())) or [0]


def _place(model: nn.Module, parameter: torch.Tensor, slot: Slot) -> Place:
    """The rows that `slot` means. An embedding's rows beyond the vocabulary are padding and take nothing in."""
    if slot.part is None:
        rows = parameter.shape[0] if parameter.ndim else 0
        return Place(parameter, 0, getattr(_owner(model, slot.parameter), "org_vocab_size", rows))
    ends = list(accumulate(_part_rows(model, slot.parameter), initial=0))
    return Place(parameter, ends[slot.part], ends[slot.part + 1])


class SectionReceiver:
    """Takes in the buckets of one section, after `match` has found every place."""

    def __init__(self, plan: SectionPlan, places: dict[str, Place]) -> None:
        self.plan = plan
        self.places = places
        self.taken = 0

    @torch.no_grad()
    def receive(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Copy a bucket's bytes `data [nbytes]` (uint8) to their places; parts of a split tensor straight to theirs.

        Raises SyncError for a bucket out of order.
        """
        if self.complete or bucket.index != self.plan.buckets[self.taken].index:
            raise SyncError(f"bucket {bucket.index} came where bucket {self.taken} of {len(self.plan.buckets)} was due")
        for entry, piece in pieces(bucket, data):
            self.places[entry.name].view.reshape(-1)[entry.part_start : entry.part_stop].copy_(piece)
        self.taken += 1

    @property
    def complete(self) -> bool:
        """Whether every bucket came."""
        return self.taken == len(self.plan.buckets)

    def finish(self) -> None:
        """Raise SyncError unless every bucket came."""
        if not self.complete:
            raise SyncError(f"only {self.taken} of {len(self.plan.buckets)} buckets came")

    def checksums(self) -> dict[str, str]:
        """Checksum of every tensor of the section, read from the live parameters."""
        return {name: checksum(place.view) for name, place in self.places.items()}


def pieces(bucket: Bucket, data: torch.Tensor) -> Iterator[tuple[Entry, torch.Tensor]]:
    """The entries of a bucket with their elements, flat and without a copy."""
    for entry in bucket.entries:
        yield entry, data[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype))
