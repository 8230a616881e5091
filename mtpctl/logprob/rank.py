"""One rank of a log-prob replica, in its own process: a forward-only engine with one or two weight versions.

All ranks of a replica are called together, with the same arguments and in the same order. The server uses rank 0's answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.cluster.bundles import ActorLocation, get_current_location
from mtpctl.cluster.process import freeze_heap, gc_paused_for_imports, redirect_output
from mtpctl.logprob.protocol import Bounds, Scored, ScoreRequest
from mtpctl.plan.buckets import Bucket, Entry
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.routes import RouteShape
from mtpctl.sync.protocol import Delta, JsonObject, Manifest, PlanMismatch, Section, SectionPlan, SyncError, VersionConflict, WeightsDiffer

if TYPE_CHECKING:
    from torch import Tensor

    from mtpctl.convert.bridge import WeightStream
    from mtpctl.logprob.weights import MergedAdapter
    from mtpctl.trainer.engine import MegatronEngine

MIN_SCORED = 32
"""Minimum number of scored tokens per pass. A matmul with very few rows uses another kernel and rounds differently, so the result of a
short request would depend on its batch. A smaller batch is padded with an additional sequence."""


@dataclass(frozen=True)
class ReplicaConfig:
    """Configuration of a replica: the model folder, optionally a checkpoint of the model, and the version of these weights.

    `lora`: config of the checkpoint's adapter, which is applied as in training. `random_seed`: initialize random weights instead of loading
    those of the folder.
    """

    model: str
    parallel: ParallelConfig
    precision: str
    mtp: MtpConfig
    kernels: KernelsConfig
    tokens_per_batch: int
    keep_previous: bool = False
    threads: int = 0
    checkpoint: str | None = None
    lora: LoraConfig | None = None
    version: int = 0
    random_seed: int | None = None
    numerics: Numerics = "default"


class ScoreRank:
    """One rank: scores with a `MegatronEngine`, and receives updates of its weights."""

    def __init__(self, config: ReplicaConfig, rank: int) -> None:
        redirect_output()
        self.config, self.rank = config, rank
        self._stream: WeightStream | None = None
        self._is_open = False
        # The adapter merged into the current version, and the one being received.
        self._adapter: MergedAdapter | None = None
        self._incoming_adapter: MergedAdapter | None = None
        self._finished: set[str] = set()

    def location(self) -> ActorLocation:
        return get_current_location()

    def address(self) -> str:
        """Create the ranks' rendezvous store and return its address; an empty string on ranks other than 0."""
        from mtpctl.cluster.rendezvous import address_of, host_store

        if self.rank:
            return ""
        self.meeting = host_store()
        return address_of(self.meeting)

    def build(self, master: str) -> Bounds:
        """Load the model. `master`: rank 0's `address`."""
        with gc_paused_for_imports():
            import torch

            from mtpctl.convert.hf_folder import HfFolder
            from mtpctl.model.parallel import Rank
            from mtpctl.trainer.config import EngineConfig
            from mtpctl.trainer.engine import MegatronEngine

        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        settings = EngineConfig(
            parallel=config.parallel,
            precision=config.precision,
            # MTP layers are loaded, not trained. A checkpoint with an adapter has them only if they were trained.
            mtp=config.mtp if config.mtp.mode == "off" or config.lora else config.mtp.model_copy(update={"mode": "load"}),
            kernels=config.kernels,
            tokens_per_microbatch=config.tokens_per_batch,
            train=False,
            lora=config.lora,
            random_seed=config.random_seed,
            numerics=config.numerics,
        )
        folder = HfFolder.open(config.model, weights=config.random_seed is None)
        engine = MegatronEngine(folder, settings, Rank(self.rank, config.parallel.world_size, master))
        if config.checkpoint is not None:
            engine.restore(Path(config.checkpoint))
        bounds = self.adopt(engine)
        freeze_heap()
        return bounds

    def adopt(self, engine: MegatronEngine) -> Bounds:
        """Serve a loaded engine, whose weights have the configured version."""
        from mtpctl.convert.bridge import StreamMap
        from mtpctl.families import tensors
        from mtpctl.families.tensors import section_of, tensor_shapes
        from mtpctl.logprob.weights import VersionedWeights
        from mtpctl.sync.transports.base import ReaderCache

        shape = engine.folder.shape
        self.engine = engine
        self.tensors = tensor_shapes(shape)
        self._section_of = lambda name: section_of(name, shape)
        # MTP layers of some families have copies of embedding and head, which are sent with their section.
        aliases = self.copies = tensors.aliases(shape)
        self.adaptable = {n: size for n, size in self.tensors.items() if n not in aliases and self._section_of(n) == "target"}
        self.map = StreamMap(engine.bridge, [engine.module], [*self.tensors, *aliases])
        self._reader_cache = ReaderCache(engine.device)
        self.weights = VersionedWeights(engine.module, self.config.version, keep_previous=self.config.keep_previous)
        return Bounds(shape.max_positions, shape.vocab, engine.depths, RouteShape.of(shape))

    def score(self, requests: list[ScoreRequest], version: int) -> list[Scored] | None:
        """Score `requests` with weight version `version`. Raises VersionConflict if the version is not available."""
        from mtpctl.trainer.batch import Sequence
        from mtpctl.trainer.config import ScoreOptions

        sequences, options = [], []
        for request in requests:
            response = len(request.token_ids) - request.prompt_length
            mask = request.mask or [1] * response
            sequences.append(Sequence(request.token_ids, request.prompt_length, mask, routes=request.routes, name=request.name))
            options.append(ScoreOptions(request.temperature, request.topk, request.mtp))
        if (padding := MIN_SCORED - sum(s.num_trained for s in sequences)) > 0:
            sequences.append(Sequence([0] * (padding + 1), 1, [1] * padding))
            options.append(ScoreOptions(mtp=any(option.mtp for option in options)))
        with self.weights.using(version):
            scores = self.engine.score(sequences, options=options, record_routes=any(request.record for request in requests))
        if self.rank:
            return None
        return [
            Scored(version, s.logprobs, s.entropy, s.topk_ids, s.topk_logprobs, s.drafts, s.routes if request.record else None)
            for s, request in zip(scores, requests, strict=False)
        ]

    def ping(self) -> list[int]:
        """Available versions, newest first."""
        return self.weights.versions

    # ------------------------------------------------------------------------------------------------------- weights

    def begin_update(self, manifest: JsonObject, version: int, section: Section) -> None:
        """Check a section of the manifest against the model, and open it. Raises PlanMismatch or VersionConflict before any change."""
        from mtpctl.convert.bridge import WeightStream
        from mtpctl.logprob.weights import MergedAdapter
        from mtpctl.sync.delta import BlobAssembler
        from mtpctl.sync.remote import prefetch

        self._manifest = Manifest.from_dict(manifest)
        if self._manifest.transport == "storage":
            # All sections at once, which also deletes earlier versions. Without digests, because this host does not know its position in
            # the chain of relays.
            prefetch([replace(self._manifest, digests={})])
        plan = self._manifest.sections[section]
        entries = plan.tensors()
        reader = self._reader_cache.open(self._manifest.transport, self._manifest.address)
        try:
            if self._manifest.base is not None and self._manifest.base != self.weights.current:
                raise VersionConflict(
                    f"weight version {version} contains only the changes since version {self._manifest.base}, but this replica has version "
                    f"{self.weights.current}"
                )
            if section == "adapter":
                if self.config.checkpoint is not None:
                    raise PlanMismatch(
                        "an adapter applies to the weights of the model's folder, but this log-prob replica serves a checkpoint"
                    )
                self._incoming_adapter = MergedAdapter(plan, self.adaptable, self.engine.device, previous=self._adapter)
            else:
                self._check_section(entries, section)
            self.weights.begin(version)
        except SyncError as error:
            self._reader_cache.fail(str(error))
            raise
        self._section, self._plan = section, plan
        self._stream = None if section == "adapter" else WeightStream(self.map, self._names(plan), self.weights.destination)
        self._assembler = BlobAssembler()
        self._blobs: dict[str, Tensor] = {}
        self._partial: dict[str, Tensor] = {}
        self._received = 0
        self._is_open = True
        reader.begin(version, section)
        self._reader = reader

    def _names(self, plan: SectionPlan) -> set[str]:
        """Names of the tensors to load for a section. For a delta, these are all tensors of the parameters with a changed tensor."""
        from mtpctl.convert.mappings import hf_names

        entries = [entry for entry in plan.tensors().values() if plan.delta is None or entry.name in plan.delta.changes]
        sent_names = {name for entry in entries for name in (entry.name, *entry.aliases)}
        if plan.delta is None:
            return sent_names
        return {name for task in self.map.tasks if sent_names & set(hf_names(task)) for name in hf_names(task)}

    def _check_section(self, entries: dict[str, Entry], section: Section) -> None:
        from mtpctl.convert.mappings import hf_names

        dtypes = {name: str(task.param_weight.dtype).removeprefix("torch.") for task in self.map.tasks for name in hf_names(task)}
        unknown = [name for name, e in entries.items() if not self.map.known & {name, *e.aliases, self.copies.get(name, name)}]
        errors = [f"{name} is not a tensor of the served model" for name in unknown]
        for name, entry in entries.items():
            if name in self.tensors and tuple(self.tensors[name]) != entry.shape:
                errors.append(f"{name} has shape {entry.shape}, the served model {tuple(self.tensors[name])}")
            # Compare with the dtype of the tensor's own parameter: a MoE router has its bias in fp32 even in a bf16 model.
            dtype = next((dtypes[alias] for alias in (name, *entry.aliases) if alias in dtypes), entry.dtype)
            if entry.dtype != dtype:
                errors.append(f"{name} is {entry.dtype}, the served model {dtype}")
        planned_names = {name for name, e in entries.items() for name in (name, *e.aliases)}
        errors += [f"{name} is missing" for name in self.map.known - planned_names if self._section_of(name) == section]
        if errors:
            raise PlanMismatch(f"the weights do not fit the log-prob replica: {'; '.join(errors[:8])}")

    def receive(self, *indices: int) -> None:
        """Write buckets of the open section. Raises SyncError for a bucket that is out of order or does not arrive."""
        expected = list(range(self._received, self._received + len(indices)))
        if not self._is_open or list(indices) != expected:
            expectation = f"instead of bucket {self._received}" if self._is_open else "but no section is open"
            raise SyncError(f"bucket {indices[0]} arrived, {expectation}")
        try:
            for bucket, data in self._reader.stream(self._section, [self._plan.wire_buckets[index] for index in indices]):
                if self._stream is None:
                    assert self._incoming_adapter is not None
                    self._incoming_adapter.receive(bucket, data)
                    self._received += 1
                else:
                    # Conversion runs on the model's device, one bucket at a time.
                    self._load_bucket(self._stream, bucket, data.to(self.engine.device))
        except BaseException as error:
            self._reader_cache.fail(str(error))
            raise

    def _load_bucket(self, stream: WeightStream, bucket: Bucket, data: Tensor) -> None:
        from mtpctl.sync.receiver import pieces

        self._received += 1
        if self._plan.delta is not None:
            self._blobs.update((name, blob.clone()) for name, blob in self._assembler.read(bucket, data))
            return
        for entry, piece in pieces(bucket, data):
            tensor = piece
            if not entry.is_whole:
                full = self._partial.setdefault(entry.name, piece.new_empty(entry.shape))
                full.view(-1)[entry.part_start : entry.part_stop].copy_(piece)
                if not entry.is_last:
                    continue
                tensor = self._partial.pop(entry.name)
            for name in (entry.name, *entry.aliases):
                stream.add(name, tensor.view(entry.shape))
        stream.copy_pending()

    def finish_update(self) -> None:
        """Close the section. The last section of the manifest makes the version current. Raises SyncError if buckets are missing."""
        if not self._is_open or self._received < len(self._plan.wire_buckets):
            raise SyncError("the section ended before all of its buckets arrived")
        if self._stream is not None:
            if self._plan.delta is not None:
                self._apply_delta(self._stream, self._plan, self._plan.delta)
            self._finish_stream(self._stream)
        self._stream, self._is_open = None, False
        self._reader_cache.end_section()
        self._finished.add(self._section)
        if self._finished == set(self._manifest.sections):
            has_target = "target" in self._finished
            if has_target:
                self.weights.forget_base()
            if self._incoming_adapter is not None:
                self._merge_adapter(self._incoming_adapter)
            if has_target or self._incoming_adapter is not None:
                self._adapter, self._incoming_adapter = self._incoming_adapter, None
            self._finished = set()
            self.weights.commit()

    def _apply_delta(self, stream: WeightStream, plan: SectionPlan, delta: Delta) -> None:
        """Write tensors with the received changes applied to their current values, which this replica exports.

        Raises SyncError if it does not export a changed tensor.
        """
        from mtpctl.sync.delta import apply

        entries, names = plan.tensors(), self._names(plan)
        for name, weight in self.engine.export((self._section,)):
            if name not in entries:
                continue
            if name in delta.changes:
                weight = weight.detach().contiguous().clone()
                apply(delta.changes[name], self._blobs.pop(name), weight)
            # The order must be the same on all ranks, because loading is collective.
            for alias in (name, *entries[name].aliases):
                if alias in names:
                    stream.add(alias, weight)
        if self._blobs:
            raise SyncError(f"this log-prob replica has no tensors {', '.join(sorted(self._blobs)[:8])}, which have changed")

    def _finish_stream(self, stream: WeightStream) -> None:
        try:
            # `finish` also updates the module's copies of the embedding on other pipeline stages, so the incoming weights must be live.
            with self.weights.showing_incoming():
                stream.finish()
        except ValueError as error:
            raise SyncError(str(error)) from error

    def _merge_adapter(self, adapter: MergedAdapter) -> None:
        """Write base weights plus adapter, after all other sections of the version."""
        from mtpctl.convert.bridge import WeightStream
        from mtpctl.convert.mappings import hf_names

        tasks = self.map.tasks
        self.weights.keep_base(task.param_weight for task in tasks if not adapter.layers.keys().isdisjoint(hf_names(task)))
        # Includes weights that an earlier adapter has changed but this one does not.
        names = {name for task in tasks if self.weights.has_base(task.param_weight) for name in hf_names(task)}
        stream = WeightStream(self.map, names, self.weights.destination)
        with self.weights.showing_base():
            for name, weight in self.engine.export(("target",), merged=False):
                if name in names:
                    stream.add(name, adapter.merged(name, weight))
        self._finish_stream(stream)

    def abort_update(self) -> list[int]:
        """Abort the update with all of its sections. Returns the available versions, newest first.

        Raises TargetDirty if the weights are a mix of two versions.
        """
        self._stream, self._incoming_adapter, self._is_open = None, None, False
        self._reader_cache.fail("a log-prob replica aborted the update")
        self._finished = set()
        self.weights.abort()
        return self.weights.versions

    def checksums(self) -> dict[str, str]:
        """Checksum of every exported tensor, by its Hugging Face name.

        A layer with a merged adapter has checksums of its base weight and of the adapter's tensors. Raises WeightsDiffer if the live weight
        is not the merge of both.
        """
        from mtpctl.sync.checksums import checksum

        sums = {name: checksum(tensor) for name, tensor in self.engine.export()}
        if self._adapter is None:
            return sums
        differing = []
        with self.weights.showing_base():
            for name, weight in self.engine.export(("target",), merged=False):
                if name in self._adapter.layers:
                    if checksum(self._adapter.merged(name, weight)) != sums[name]:
                        differing.append(name)
                    sums[name] = checksum(weight)
        if differing:
            raise WeightsDiffer(f"the adapter is not merged into these weights of the log-prob replica: {', '.join(differing[:8])}")
        return sums | self._adapter.checksums()
