"""The receiving end of a weight update inside an engine's worker.

An `EngineTarget` sends `UpdateStep`s, small dicts, with the engine's call for weight updates. The transport delivers the weights. Live
parameters are written in place, so CUDA graphs and tied layers use the new weights.

Engines load LoRA adapters from a folder. The tensors of an adapter are therefore collected from the buckets, and then written in PEFT's
format to a folder in shared memory.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Required, TypedDict

import torch
from safetensors.torch import save_file
from torch import nn

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import PREFIX, SHARED_MEMORY
from mtpctl.plan.buckets import ADAPTER_PREFIX, Bucket, Entry
from mtpctl.sync.checksums import PartialSums, partial_sums
from mtpctl.sync.delta import BlobAssembler, apply, decode
from mtpctl.sync.parameters import LiveSection, Renamer, Shard, TensorMismatch, TpRank, entry_view, find_shard, resolve
from mtpctl.sync.protocol import Delta, Manifest, PlanMismatch, Section, SectionPlan, SyncError, VersionConflict, buckets_from, layout
from mtpctl.sync.transports.base import BucketReader, ReaderCache

SCRATCH_BYTES = 64 << 20
"""Maximum size of the scratch memory for discarded buckets, in bytes."""

type RankSums = dict[str, list[dict[str, int]]]
"""One rank's `PartialSums`s of each tensor as dicts, by wire name."""


class BucketReceiver(ABC):
    """Receives the buckets of one section in the plan's order."""

    def __init__(self, plan: SectionPlan) -> None:
        self.plan = plan
        self.received = 0
        self.blobs = BlobAssembler()

    @torch.no_grad()
    def receive(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Process a bucket's bytes `data [nbytes]` (uint8), which are valid until this returns. Raises SyncError if it is out of order."""
        if self.complete or bucket.index != self.plan.wire_buckets[self.received].index:
            raise SyncError(f"expected bucket {self.received} of {len(self.plan.wire_buckets)}, received bucket {bucket.index}")
        self._consume(bucket, data)
        self.received += 1

    @property
    def complete(self) -> bool:
        return self.received == len(self.plan.wire_buckets)

    def check_complete(self) -> None:
        """Raise SyncError unless every bucket was received."""
        if not self.complete:
            raise SyncError(f"only {self.received} of {len(self.plan.wire_buckets)} buckets were received")

    @abstractmethod
    def _consume(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Copy the needed parts of the bucket."""

    @abstractmethod
    def sums(self) -> dict[str, list[PartialSums]]:
        """This rank's contribution to the checksum of every tensor of the section."""


class SectionReceiver(BucketReceiver):
    """Writes a section, or its changed elements, into a live model."""

    def __init__(self, plan: SectionPlan, live_section: LiveSection) -> None:
        super().__init__(plan)
        self.live_section = live_section

    @property
    def shards(self) -> dict[str, Shard]:
        return self.live_section.shards

    def _consume(self, bucket: Bucket, data: torch.Tensor) -> None:
        if self.plan.delta is None:
            self.live_section.write(bucket, data)
            return
        for name, blob in self.blobs.read(bucket, data):
            shard, change = self.shards[name], self.plan.delta.changes[name]
            positions, values = decode(change, blob.to(shard.live.device), shard.dtype or shard.live.dtype)
            if positions is None:
                shard.write(values, 0, change.numel)
            else:
                shard.write_at(positions, values)

    def sums(self) -> dict[str, list[PartialSums]]:
        return {name: shard.sums() for name, shard in self.shards.items()}


class DiscardReceiver(BucketReceiver):
    """Receives a section and drops it. Each bucket is copied into scratch memory, which takes about as long as a real update."""

    def __init__(self, plan: SectionPlan, device: torch.device | str) -> None:
        super().__init__(plan)
        self._memory = torch.empty(min(SCRATCH_BYTES, plan.largest), dtype=torch.uint8, device=device)

    def _consume(self, bucket: Bucket, data: torch.Tensor) -> None:
        for piece in data[: bucket.nbytes].split(SCRATCH_BYTES):
            self._memory[: len(piece)].copy_(piece)

    def sums(self) -> dict[str, list[PartialSums]]:
        return {}


def pieces(bucket: Bucket, data: torch.Tensor) -> Iterator[tuple[Entry, torch.Tensor]]:
    """The entries of a bucket with views of their flattened elements."""
    for entry in bucket.entries:
        yield entry, entry_view(entry, data)


class UpdateStep(TypedDict, total=False):
    """One step of an update.

    Actions: `begin` a section; `buckets`: receive `count` buckets, starting at index `first`; `abort`; `finish`; `sums` for the checksums.
    `begin` has the version, the transport and its address, the plan's hash as `plan_name`, and its JSON if the workers do not have it.
    `delta` is the JSON of a `Delta`, empty for a complete section. `config` is the config of an adapter. With `discard`, the section is
    received and dropped.
    """

    action: Required[Literal["begin", "buckets", "abort", "finish", "sums"]]
    section: str
    version: int
    transport: str
    address: str
    plan_name: str
    plan: str
    delta: str
    config: dict[str, object]
    discard: bool
    first: int
    count: int


def begin_step(manifest: Manifest, section: Section, *, version: int, discard: bool, known: set[str]) -> UpdateStep:
    """Build the step that begins a section. `known`: names of the plans that the workers have; this plan's name is added."""
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
        delta="" if plan.delta is None else plan.delta.to_json(),
        config=plan.config,
        discard=discard,
    )
    known.add(name)
    return step


class Inbox:
    """A worker's transport readers, which all of its models share, and the plans that it has received."""

    def __init__(self, device: torch.device) -> None:
        self.reader_cache = ReaderCache(device)
        self.plans: dict[str, SectionPlan] = {}

    def plan_of(self, step: UpdateStep) -> SectionPlan:
        """The section plan of a `begin` step."""
        if step["plan"]:
            self.plans[step["plan_name"]] = SectionPlan(buckets_from(json.loads(step["plan"])))
        plan = self.plans[step["plan_name"]]
        return replace(plan, delta=Delta.from_dict(json.loads(step["delta"]))) if step["delta"] else plan


@dataclass(slots=True)
class ActiveSection:
    """The section that is being received."""

    section: str
    receiver: BucketReceiver
    reader: BucketReader


class StepReceiver:
    """Executes the steps of updates on one model, or on several models, one after another."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.received: dict[str, BucketReceiver] = {}
        """The last receiver of each section."""
        self._active: ActiveSection | None = None
        self._live_sections: dict[tuple[str, str], LiveSection] = {}

    def begin(self, step: UpdateStep, match: Callable[[SectionPlan], dict[str, Shard]]) -> None:
        """Begin a section. `match` finds its shards, and is called once for each plan. Raises PlanMismatch."""

        def new_receiver(plan: SectionPlan) -> BucketReceiver:
            key = (step["section"], step["plan_name"])
            if key not in self._live_sections:
                self._live_sections[key] = LiveSection(match(plan))
            return SectionReceiver(plan, self._live_sections[key])

        self.begin_with(step, new_receiver)

    def begin_with(self, step: UpdateStep, new_receiver: Callable[[SectionPlan], BucketReceiver]) -> None:
        """Begin a section with the receiver that `new_receiver` creates from its plan, unless the section is discarded."""
        # Join the group before any check, so that a receiver that refuses the plan can report it to the group.
        reader = self.inbox.reader_cache.open(step["transport"], step["address"])
        plan = self.inbox.plan_of(step)
        receiver = DiscardReceiver(plan, self.inbox.reader_cache.device) if step["discard"] else new_receiver(plan)
        self._active = ActiveSection(step["section"], receiver, reader)
        reader.begin(step["version"], step["section"])

    def receive(self, step: UpdateStep) -> None:
        """Receive the buckets of a step. Raises SyncError if they do not arrive, or are out of order."""
        active = self._active
        if active is None or active.section != step["section"]:
            current = "no section" if active is None else f"section {active.section}"
            raise SyncError(f"received buckets of section {step['section']} while {current} is being updated")
        buckets = active.receiver.plan.wire_buckets[step["first"] : step["first"] + step["count"]]
        for bucket, data in active.reader.stream(step["section"], buckets):
            active.receiver.receive(bucket, data)

    def finish(self) -> BucketReceiver | None:
        """End the section. Returns its receiver, None if none has begun. Raises SyncError if buckets are missing."""
        active = self._active
        if active is None:
            return None
        active.receiver.check_complete()
        self._active = None
        if not isinstance(active.receiver, DiscardReceiver):
            self.received[active.section] = active.receiver
        self.inbox.reader_cache.end_section()
        return active.receiver

    def fail(self, reason: str) -> None:
        """Cancel the section and report it to the transfer's group, which would otherwise wait for this receiver."""
        self._active = None
        self.inbox.reader_cache.fail(reason)

    def sums(self, sections: Collection[str] = ()) -> RankSums:
        """This rank's part of the checksums of the received tensors, read from the live parameters; by default of all sections."""
        sums: RankSums = {}
        for section, receiver in self.received.items():
            if section in (sections or self.received):
                sums |= {name: [asdict(part) for part in parts] for name, parts in receiver.sums().items()}
        return sums


def gpu_memory(*, reset: bool = False) -> dict[str, int]:
    """Bytes on this process's GPU; zeros without a GPU.

    `allocated` by tensors, with its `peak` since the last `reset`; `reserved` by torch's allocator, with its `peak_reserved`; `used` by
    all processes on the GPU, including CUDA and NCCL.
    """
    if not torch.cuda.is_available():
        return dict.fromkeys(("allocated", "peak", "reserved", "peak_reserved", "used"), 0)
    if reset:
        torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "used": total - free,
    }


def copy_rate(nbytes: int) -> float:
    """Measure the rate at which host memory is copied, in GB/s. Returns the best of five runs."""
    source, destination = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    best_s = float("inf")
    for _ in range(5):
        started_at = time.perf_counter()
        destination.copy_(source)
        best_s = min(best_s, time.perf_counter() - started_at)
    return nbytes / best_s / 1e9


_MATRIX = re.compile(rf"^{re.escape(ADAPTER_PREFIX)}(?P<layer>.+)\.lora_(?P<which>[AB])\.weight$")


@dataclass(frozen=True, slots=True)
class Layer:
    """Wire names of A `[rank, columns]` and B `[rows, rank]` of one layer, and the shape of the adapted weight."""

    a: str
    b: str
    shape: tuple[int, int]


def rank_of(plan: SectionPlan) -> int:
    """The rank in an adapter's config, 0 if there is none."""
    rank = plan.config.get("r")
    return rank if isinstance(rank, int) else 0


def layers_of(plan: SectionPlan) -> dict[str, Layer]:
    """The layers of an adapter by the Hugging Face names of their weights.

    Raises PlanMismatch with the reasons if the plan is not a LoRA adapter of its config's rank.
    """
    rank = rank_of(plan)
    pairs: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    errors: list[str] = []
    for name, entry in plan.tensors().items():
        if match := _MATRIX.match(name):
            pairs.setdefault(match["layer"], {})[match["which"]] = (name, entry.shape)
        else:
            errors.append(name)
    layers = {}
    for layer, pair in pairs.items():
        if len(pair) < 2:
            errors.append(f"{layer} has lora_{'A' if 'A' in pair else 'B'} alone")
            continue
        (a, a_shape), (b, b_shape) = pair["A"], pair["B"]
        if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[0] != b_shape[1] or (rank and a_shape[0] != rank):
            errors.append(f"{layer} has A {a_shape} and B {b_shape}, which are not of rank {rank}")
            continue
        layers[f"{layer}.weight"] = Layer(a, b, (b_shape[0], a_shape[1]))
    if not rank:
        errors.append("its config has no rank r")
    if errors:
        raise PlanMismatch(f"this is not a LoRA adapter: {'; '.join(errors[:8])}")
    return layers


def check_fits(plan: SectionPlan, model: nn.Module, *, rename: Renamer | None, tp: TpRank, max_rank: int | None) -> None:
    """Check an adapter against a live model that supports adapters of up to rank `max_rank` (None: no adapters).

    Raises PlanMismatch that lists the layers that are missing in the model, take no adapter, or have another shape.
    """
    if max_rank is None:
        raise PlanMismatch("this engine was started without adapters (enable_lora, max_lora_rank)")
    rank = rank_of(plan)
    if rank > max_rank:
        raise PlanMismatch(f"the adapter has rank {rank}, this engine was started with max_lora_rank {max_rank}")
    live = dict(model.named_parameters(remove_duplicate=False))
    errors = []
    for name, layer in layers_of(plan).items():
        slot = resolve(name, live, rename)
        if slot is None:
            errors.append(f"{name} resolves to nothing")
        elif ".base_layer." not in slot.parameter:
            errors.append(f"{name} is part of {slot.parameter}, which does not support adapters")
        else:
            try:
                find_shard(model, live[slot.parameter], slot, layer.shape, tp)
            except TensorMismatch as error:
                errors.append(f"the adapter of {name} {error}")
    if errors:
        raise PlanMismatch("the adapter does not fit the live model: " + "; ".join(errors[:8]))


class AdapterReceiver(BucketReceiver):
    """Receives section `adapter`, and stores its tensors on `device`. A delta changes a copy of the `previous` adapter's tensors.

    Raises PlanMismatch if the plan is not an adapter, and VersionConflict if a delta has no previous adapter.
    """

    def __init__(self, plan: SectionPlan, device: torch.device | str = "cpu", *, previous: AdapterReceiver | None = None) -> None:
        self.layers = layers_of(plan)
        super().__init__(plan)
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        if plan.delta is not None:
            if previous is None:
                raise VersionConflict("the changes of an adapter arrived before the adapter")
            self.tensors = {name: tensor.clone() for name, tensor in previous.tensors.items()}

    def _consume(self, bucket: Bucket, data: torch.Tensor) -> None:
        if self.plan.delta is not None:
            for name, blob in self.blobs.read(bucket, data):
                apply(self.plan.delta.changes[name], blob, self.tensors[name])
            return
        for entry, piece in pieces(bucket, data):
            tensor = self.tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=piece.dtype, device=self.device))
            tensor.view(-1)[entry.part_start : entry.part_stop].copy_(piece)

    def sums(self) -> dict[str, list[PartialSums]]:
        return {name: [partial_sums(t.reshape(1, -1), t.numel(), t.numel(), 0)] for name, t in self.tensors.items()}

    def write(self, folder: Path) -> None:
        """Write the adapter in PEFT's format. `folder` never has an incomplete adapter, but while it is replaced, it is missing."""
        root = folder.parent
        root.mkdir(parents=True, exist_ok=True)
        leftovers.mark(root)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        save_file(self.tensors, temporary / "adapter_model.safetensors")
        (temporary / "adapter_config.json").write_text(json.dumps(self.plan.config))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)


def adapter_root(store: str, name: str) -> Path:
    """The folder for the adapters of an engine: in `store`, or without a store in shared memory or the temporary folder."""
    if store:
        return Path(store) / "adapters" / name
    return (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"{PREFIX}adapter-{name}"
