"""The receiver's end inside an engine: writes wire tensors into the parameters of a live model, in place.

Parameters keep their memory, so whatever refers to them (CUDA graphs, tied layers) sees the new weights. Everything that can be wrong
about a plan is found by `match` before the first byte is written.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal, Required, TypedDict, cast

import torch
from torch import nn

from mtpctl.plan.buckets import Bucket, Entry
from mtpctl.sync.checksums import Part
from mtpctl.sync.parameters import ExpertsLayer, Misfit, Place, Ranks, Renamer, Slot, find_place, local_expert, part_sizes, resolve
from mtpctl.sync.protocol import Manifest, PlanMismatch, Section, SectionPlan, SyncError, buckets_from, layout
from mtpctl.sync.transports.base import BucketReader, Readers

Portion = tuple[int | None, int | None]
"""One expert, or None, and one packed part, or None for all."""

PlainWeight = Callable[[nn.Module, str], torch.Tensor]
"""Memory of a layer's parameter, by its name there, in the layout of loading. Raises Misfit where there is none."""


def held_weight(layer: nn.Module, leaf: str) -> torch.Tensor:
    """The parameter as it lies in the layer. Raises Misfit for one without elements."""
    found: torch.Tensor = getattr(layer, leaf).data
    if not found.numel():
        raise Misfit("belongs to a layer that holds its weight packed alone")
    return found


def match(
    model: nn.Module,
    plan: SectionPlan,
    *,
    rename: Renamer | None = None,
    elsewhere: nn.Module | None = None,
    ranks: Ranks | None = None,
    dtype: torch.dtype | None = None,
    plain_weight: PlainWeight = held_weight,
    derived: Collection[str] = (),
) -> dict[str, Place]:
    """The place of every tensor of `plan` in `model`.

    rename: the model's own rule from wire names to its parameters'. elsewhere: a module whose parameters need not be in the plan (a
    drafter's embedding and head are its target's). ranks: this rank's number, for layers that do not say it. dtype: the model's; a
    tensor may have it where its parameter has a wider one (the decays of a gated delta net are float32 under bfloat16), else both
    have the same. plain_weight: finds a parameter that the engine keeps in a layout of its kernel's own. derived: names, inside a
    layer, of parameters that the engine makes from others, so that no update brings them.

    Raises PlanMismatch with everything that is wrong: names that resolve to nothing, shapes, dtypes, parameters that nothing fills.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    shared = {id(parameter) for parameter in elsewhere.parameters()} if elsewhere is not None else set()
    places: dict[str, Place] = {}
    filled: dict[int, set[Portion]] = defaultdict(set)
    wrong: list[str] = []
    for name, entry in plan.tensors().items():
        slot = next(filter(None, (resolve(alias, live, rename) for alias in (name, *entry.aliases))), None)
        if slot is None:
            wrong.append(f"{name} resolves to nothing")
            continue
        filled[id(live[slot.parameter])] |= {(slot.expert, part) for part in slot.parts or (None,)}
        try:
            places[name] = _place(model, slot, entry, ranks or Ranks(), dtype, plain_weight)
        except Misfit as error:
            wrong.append(f"{name} {error}")
    for name, parameter in live.items():
        if id(parameter) in shared or name.rpartition(".")[2] in derived:
            continue
        here, wanted = filled[id(parameter)], _wanted(model, name, parameter)
        if (None, None) not in here and not wanted <= here:
            wrong.append(f"{name} is filled {'in part' if here else 'by nothing'}")
    if wrong:
        raise PlanMismatch("the weights do not fit the live model: " + "; ".join(wrong))
    return places


def _place(model: nn.Module, slot: Slot, entry: Entry, ranks: Ranks, own: torch.dtype | None, plain_weight: PlainWeight) -> Place:
    path, _, leaf = slot.parameter.rpartition(".")
    live = plain_weight(model.get_submodule(path), leaf)
    place = find_place(model, live, slot, entry.shape, ranks)
    wire = getattr(torch, entry.dtype)
    if wire != live.dtype and not (wire == own and torch.promote_types(wire, live.dtype) == live.dtype):
        raise Misfit(f"comes as {entry.dtype}, but the engine holds {slot.parameter} as {str(live.dtype).removeprefix('torch.')}")
    place = replace(place, dtype=wire)
    if not place.live.is_contiguous():
        raise Misfit(f"belongs to {slot.parameter}, which does not lie in memory row by row")
    return place


def _wanted(model: nn.Module, name: str, parameter: torch.Tensor) -> set[Portion]:
    """Everything that has to come for a parameter to be filled, unless it comes whole."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf.startswith(("w13_", "w2_")):
        layer = cast(ExpertsLayer, owner)
        experts = [expert for expert in range(layer.global_num_experts) if local_expert(layer, expert) is not None]
        return {(expert, part) for expert in experts for part in ((0, 1) if leaf.startswith("w13_") else (0,))}
    return {(None, part) for part in range(len(part_sizes(owner, name)))}


class BucketReceiver(ABC):
    """Receives the buckets of one section, in the plan's order."""

    def __init__(self, plan: SectionPlan) -> None:
        self.plan = plan
        self.taken = 0

    @torch.no_grad()
    def receive(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Use a bucket's bytes `data [nbytes]` (uint8), which are there until this returns. Raises SyncError for one out of order."""
        if self.complete or bucket.index != self.plan.buckets[self.taken].index:
            raise SyncError(f"bucket {bucket.index} came where bucket {self.taken} of {len(self.plan.buckets)} was due")
        self._use(bucket, data)
        self.taken += 1

    @property
    def complete(self) -> bool:
        """Whether every bucket came."""
        return self.taken == len(self.plan.buckets)

    def check_complete(self) -> None:
        """Raise SyncError unless every bucket came."""
        if not self.complete:
            raise SyncError(f"only {self.taken} of {len(self.plan.buckets)} buckets came")

    @abstractmethod
    def _use(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Copy what is needed of the bucket that was due."""

    @abstractmethod
    def sums(self) -> dict[str, list[Part]]:
        """What this rank adds to the checksum of every tensor of the section, as it lies here now."""


class SectionReceiver(BucketReceiver):
    """Writes a section into a live model, after `match` has found every place; parts of a split tensor go straight to theirs."""

    def __init__(self, plan: SectionPlan, places: dict[str, Place]) -> None:
        super().__init__(plan)
        self.places = places

    def _use(self, bucket: Bucket, data: torch.Tensor) -> None:
        for entry, piece in pieces(bucket, data):
            self.places[entry.name].write(piece, entry.part_start, entry.part_stop)

    def sums(self) -> dict[str, list[Part]]:
        return {name: place.sums() for name, place in self.places.items()}


SCRATCH = 64 << 20
"""Bytes."""


class Scratch(BucketReceiver):
    """Drops a section that this engine has no use for: each piece is copied over the one before, at the pace of a copy."""

    def __init__(self, plan: SectionPlan, device: torch.device | str) -> None:
        super().__init__(plan)
        self._memory = torch.empty(min(SCRATCH, plan.largest), dtype=torch.uint8, device=device)

    def _use(self, bucket: Bucket, data: torch.Tensor) -> None:
        for piece in data[: bucket.nbytes].split(SCRATCH):
            self._memory[: len(piece)].copy_(piece)

    def sums(self) -> dict[str, list[Part]]:
        return {}


def pieces(bucket: Bucket, data: torch.Tensor) -> Iterator[tuple[Entry, torch.Tensor]]:
    """The entries of a bucket with their elements, flat and without a copy."""
    for entry in bucket.entries:
        yield entry, data[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype))


type RankSums = dict[str, list[dict[str, int]]]
"""What one rank holds of each tensor: the fields of its `Part`s, by wire name."""


class UpdateStep(TypedDict, total=False):
    """`begin` of a section; `buckets` from `first` on, `count` of them; `abort`, `finish`, or `sums` for the checksums.

    `begin` comes with the version, the transport and its address, the plan's short name and, the first time, its JSON. `config` is an
    adapter's. A section to `discard` is received and dropped.
    """

    action: Required[Literal["begin", "buckets", "abort", "finish", "sums"]]
    section: str
    version: int
    transport: str
    address: str
    plan_name: str
    plan: str
    config: dict[str, object]
    discard: bool
    first: int
    count: int


def begin_step(manifest: Manifest, section: Section, *, version: int, discard: bool, known: set[str]) -> UpdateStep:
    """The step that begins a section. `known`: names of plans that the workers have; this one is added."""
    plan = manifest.sections[section]
    text, name = layout(plan.buckets)
    step = UpdateStep(
        action="begin",
        section=section,
        version=version,
        transport=manifest.transport,
        address=manifest.address,
        plan_name=name,
        plan="" if name in known else text,
        config=plan.config,
        discard=discard,
    )
    known.add(name)
    return step


class Inbox:
    """A process's end of the transfers, which it joins once for all of its models, and the plans that it was told."""

    def __init__(self, device: torch.device) -> None:
        self.readers = Readers(device)
        self.plans: dict[str, SectionPlan] = {}

    def plan_of(self, step: UpdateStep) -> SectionPlan:
        """The section plan that a `begin` names."""
        if step["plan"]:
            self.plans[step["plan_name"]] = SectionPlan(buckets_from(json.loads(step["plan"])))
        return self.plans[step["plan_name"]]


@dataclass(slots=True)
class Receiving:
    """The section that is being received."""

    section: str
    receiver: BucketReceiver
    reader: BucketReader


class StepReceiver:
    """Carries out the steps of updates on one model, or on those that an engine selects in turn."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.received: dict[str, BucketReceiver] = {}
        """Of each section, what received it last."""
        self._under_way: Receiving | None = None
        self._places: dict[tuple[str, str], dict[str, Place]] = {}

    def begin(self, step: UpdateStep, match: Callable[[SectionPlan], dict[str, Place]]) -> None:
        """Begin a section whose tensors go where `match` finds their places, which is asked once for a plan. Raises PlanMismatch."""

        def new_receiver(plan: SectionPlan) -> BucketReceiver:
            key = (step["section"], step["plan_name"])
            if key not in self._places:
                self._places[key] = match(plan)
            return SectionReceiver(plan, self._places[key])

        self.begin_with(step, new_receiver)

    def begin_with(self, step: UpdateStep, new_receiver: Callable[[SectionPlan], BucketReceiver]) -> None:
        """Begin a section that the receiver made of its plan takes, unless it is to be discarded."""
        # The group is joined before anything is checked: a receiver that finds fault can then say so to all.
        reader = self.inbox.readers.open(step["transport"], step["address"])
        plan = self.inbox.plan_of(step)
        receiver = Scratch(plan, self.inbox.readers.device) if step["discard"] else new_receiver(plan)
        self._under_way = Receiving(step["section"], receiver, reader)
        reader.begin(step["version"], step["section"])

    def receive(self, step: UpdateStep) -> None:
        """Receive the buckets that a step names. Raises SyncError where they do not come, or not in the plan's order."""
        now = self._under_way
        if now is None or now.section != step["section"]:
            found = "no section" if now is None else f"section {now.section}"
            raise SyncError(f"buckets of section {step['section']} came while {found} is under way")
        buckets = now.receiver.plan.buckets[step["first"] : step["first"] + step["count"]]
        for bucket, data in now.reader.stream(step["section"], buckets):
            now.receiver.receive(bucket, data)

    def finish(self) -> BucketReceiver | None:
        """End the section. Returns what received it, None where none was begun. Raises SyncError where buckets are missing."""
        now = self._under_way
        if now is None:
            return None
        now.receiver.check_complete()
        self._under_way = None
        if not isinstance(now.receiver, Scratch):
            self.received[now.section] = now.receiver
        self.inbox.readers.settle()
        return now.receiver

    def fail(self, why: str) -> None:
        """Give up the section, and tell the others of its transfer: they wait for this receiver unless it says so."""
        self._under_way = None
        self.inbox.readers.fail(why)

    def sums(self) -> RankSums:
        """This rank's part of the checksum of every tensor received so far, read from the live parameters."""
        found: RankSums = {}
        for receiver in self.received.values():
            found |= {name: [asdict(part) for part in parts] for name, parts in receiver.sums().items()}
        return found
