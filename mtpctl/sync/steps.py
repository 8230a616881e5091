"""The steps in which an `EngineTarget` has an engine's workers receive an update, and what a worker does with them.

A step is a small dict that goes through the engine's own call for weight updates. The bytes come through the transport, and the plan
of a section comes once: later versions name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, Required, TypedDict

import torch

from mtpctl.sync.manifest import Manifest, Section, SectionPlan, buckets_from, layout
from mtpctl.sync.places import Place
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.receiver import BucketReceiver, Scratch, SectionReceiver
from mtpctl.sync.transports.base import BucketReader, Readers

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
