"""Weights into a live vLLM engine, as a transfer engine of vLLM's own weight-update sessions.

vLLM calls this inside each worker between `start_weight_update` (or `start_draft_weight_update`) and
`finish_weight_update`. The updates that it is handed say what to do: `begin` names a section of a manifest, `bucket` one
bucket of it. The bytes come through the manifest's transport, never through vLLM's control channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import ABORTED_BY_SENDER, PlanMismatch, SyncError
from mtpctl.sync.receiver import SectionReceiver, match
from mtpctl.sync.transports import BucketReader, open_reader


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class Step(WeightTransferUpdateInfo):
    """`begin` with a manifest's dict and a section, `bucket` with an index, or `abort`."""

    action: str
    section: str
    manifest: dict[str, Any] = field(default_factory=dict)
    index: int = 0


class ManifestTransferEngine(WeightTransferEngine[NoInit, Step]):
    """Receives the sections of a manifest into the model that vLLM has selected for the session."""

    init_info_cls = NoInit
    update_info_cls = Step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receivers: dict[str, SectionReceiver] = {}
        self._reader: BucketReader | None = None

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing yet: the first update of a session is `begin`."""

    def receive_weights(self, update_info: Step) -> None:
        """One step. Raises PlanMismatch in `begin`, SyncError in `bucket`, and in `abort` always: vLLM ends a failed session."""
        if update_info.action == "begin":
            self._begin(Manifest.from_dict(update_info.manifest), update_info.section)
            return
        if update_info.action == "abort":
            self._receivers = {name: receiver for name, receiver in self._receivers.items() if receiver.complete}
            raise SyncError(ABORTED_BY_SENDER)
        receiver = self._receivers[update_info.section]
        if self._reader is None:
            raise SyncError("a bucket came before its section was begun")
        bucket = receiver.plan.buckets[update_info.index]
        receiver.receive(bucket, self._reader.read(update_info.section, bucket))

    def _begin(self, manifest: Manifest, section: str) -> None:
        if self.vllm_config.quant_config is not None or self.parallel_config.tensor_parallel_size > 1:
            raise PlanMismatch("weights can be updated in place only where each parameter is the whole, unquantised tensor")
        plan = manifest.sections[section]
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        rename = mapper.get_rename_mapper().map_name if mapper is not None else None
        elsewhere = self._default_model if self.model is not self._default_model else None
        places = match(self.model, plan, rename=rename, elsewhere=elsewhere)
        self._receivers[section] = SectionReceiver(plan, places)
        self._reader = open_reader(manifest.transport, manifest.address)

    def finish_weight_update(self) -> None:
        """Close the session's buffers. Raises SyncError where buckets are missing."""
        for receiver in self._receivers.values():
            receiver.finish()
        self.shutdown()

    def checksums(self) -> dict[str, str]:
        """Checksum of every tensor taken in so far, read from the live parameters."""
        return {name: value for receiver in self._receivers.values() for name, value in receiver.checksums().items()}

    def shutdown(self) -> None:
        """Release the transport's buffers."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class WorkerExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    weight_transfer_engine: ManifestTransferEngine

    def mtpctl_checksums(self) -> dict[str, str]:
        """See `ManifestTransferEngine.checksums`."""
        return self.weight_transfer_engine.checksums()
