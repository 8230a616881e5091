"""Weights into a live vLLM engine, as a transfer engine of vLLM's own weight-update sessions.

vLLM calls this inside each worker between `start_weight_update` (or `start_draft_weight_update`) and
`finish_weight_update`. The updates that it is handed say what to do: `begin` announces a section, `buckets` has some of its
buckets taken in. The bytes come through the transport, never through vLLM's control channel, and so does the plan of a section
only once: later versions name it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from mtpctl.rollout.vllm.client import adapter_request
from mtpctl.rollout.vllm.patches import derived, names, packed
from mtpctl.rollout.vllm.patches.draft_times import TIMES
from mtpctl.sync.adapter import AdapterReceiver, check_fits
from mtpctl.sync.engine_target import ADAPTER, ADAPTER_ID, HELD
from mtpctl.sync.manifest import SectionPlan, buckets_from
from mtpctl.sync.memory import card_memory
from mtpctl.sync.places import Place, Ranks
from mtpctl.sync.protocol import ABORTED_BY_SENDER, PlanMismatch, SyncError
from mtpctl.sync.receiver import Scratch, SectionReceiver, match
from mtpctl.sync.transports.base import Readers


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class Step(WeightTransferUpdateInfo):
    """`begin` of a section, `buckets` from `first` on, `count` of them, or `abort`.

    `begin` comes with the version, transport and address, the plan's short name and, the first time, its JSON; `config` is an
    adapter's; of a section to `discard` everything passes by.
    """

    action: str
    section: str
    version: int = 0
    transport: str = ""
    address: str = ""
    plan_name: str = ""
    plan: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    discard: bool = False
    first: int = 0
    count: int = 0


class ManifestTransferEngine(WeightTransferEngine[NoInit, Step]):
    """Receives the sections of a manifest into the model that vLLM has selected for the session."""

    init_info_cls = NoInit
    update_info_cls = Step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receivers: dict[str, SectionReceiver | AdapterReceiver] = {}
        self._section = ""
        self._plans: dict[str, SectionPlan] = {}
        self._places: dict[tuple[str, str], dict[str, Place]] = {}
        self._readers = Readers(self.device)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing yet: the first update of a session is `begin`."""

    def receive_weights(self, update_info: Step) -> None:
        """One step. Raises PlanMismatch in `begin`, SyncError in `buckets`, and in `abort` always: vLLM ends a failed session."""
        try:
            if update_info.action == "begin":
                self._begin(update_info)
            elif update_info.action == "buckets":
                self._receive(update_info)
            else:
                raise SyncError(ABORTED_BY_SENDER)
        except BaseException as error:
            # The others of a group wait for this receiver unless it says that it gives up.
            self._readers.fail(str(error))
            self._receivers = {name: receiver for name, receiver in self._receivers.items() if receiver.complete}
            raise

    def _begin(self, step: Step) -> None:
        # Met before anything is checked: a receiver that finds fault can then say so to all.
        reader = self._readers.open(step.transport, step.address)
        if step.plan:
            self._plans[step.plan_name] = SectionPlan(buckets_from(json.loads(step.plan)))
        plan = self._plans[step.plan_name]
        if step.discard:
            self._current: SectionReceiver | AdapterReceiver | Scratch = Scratch(plan, self.device)
        elif step.section == "adapter":
            self._current = self._receivers[step.section] = self._adapter(SectionPlan(plan.buckets, config=step.config))
        else:
            self._current = self._receivers[step.section] = SectionReceiver(plan, self._places_of(step, plan))
        self._section = step.section
        reader.begin(step.version, step.section)
        self._reader = reader

    def _places_of(self, step: Step, plan: SectionPlan) -> dict[str, Place]:
        key = (step.section, step.plan_name)
        if key not in self._places:
            self._places[key] = self._match(plan)
        return self._places[key]

    def _adapter(self, plan: SectionPlan) -> AdapterReceiver:
        receiver, lora = AdapterReceiver(plan), self.vllm_config.lora_config
        room = None if lora is None else int(lora.max_lora_rank)
        check_fits(plan, self.model, rename=names.renamer(self.model), ranks=_ranks(), room=room)
        return receiver

    def _match(self, plan: SectionPlan) -> dict[str, Place]:
        if self.vllm_config.quant_config is not None:
            raise PlanMismatch("weights of a quantised engine cannot be updated in place")
        if self.parallel_config.pipeline_parallel_size > 1:
            raise PlanMismatch("weights of an engine with pipeline stages cannot be updated in place")
        elsewhere = self._default_model if self.model is not self._default_model else None
        own = self.model_config.dtype if isinstance(self.model_config.dtype, torch.dtype) else None
        return match(
            self.model,
            plan,
            rename=names.renamer(self.model),
            elsewhere=elsewhere,
            ranks=_ranks(),
            dtype=own,
            plain_weight=packed.plain_weight,
            derived=derived.DERIVED,
        )

    def _receive(self, step: Step) -> None:
        receiver = self._current
        if step.section != self._section:
            raise SyncError(f"buckets of section {step.section} came while section {self._section} is under way")
        buckets = receiver.plan.buckets[step.first : step.first + step.count]
        for bucket, data in self._reader.stream(step.section, buckets):
            receiver.receive(bucket, data)

    def finish_weight_update(self) -> None:
        """Close the session's section. Raises SyncError where buckets are missing."""
        self._current.finish()
        if isinstance(self._current, SectionReceiver) and self._current.places:
            packed.repack(self.model)
            derived.refresh(self.model, self.model_config.dtype)
        self._readers.settle()

    def write_adapter(self, folder: str) -> None:
        """Write the adapter taken in last to a folder, on the first rank: the others read it too."""
        receiver = self._receivers["adapter"]
        assert isinstance(receiver, AdapterReceiver)
        if get_tensor_model_parallel_rank() == 0:
            receiver.write(Path(folder))

    def drop_adapters(self, kept: str) -> None:
        """Remove the folders beside this one, on the first rank."""
        if get_tensor_model_parallel_rank() == 0:
            for folder in Path(kept).parent.iterdir():
                if folder != Path(kept) and folder.is_dir():
                    shutil.rmtree(folder)

    def sums(self) -> dict[str, list[dict[str, int]]]:
        """This rank's part of the checksum of every tensor taken in so far, read from the live parameters."""
        found: dict[str, list[dict[str, int]]] = {}
        for receiver in self._receivers.values():
            found |= {name: [asdict(part) for part in parts] for name, parts in receiver.sums().items()}
        return found

    def shutdown(self) -> None:
        """Release the transport's buffers and connections."""
        self._readers.close()


def _ranks() -> Ranks:
    return Ranks(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())


class WorkerExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    weight_transfer_engine: ManifestTransferEngine
    vllm_config: Any
    model_runner: Any

    def mtpctl_sums(self) -> dict[str, list[dict[str, int]]]:
        """See `ManifestTransferEngine.sums`."""
        return self.weight_transfer_engine.sums()

    def mtpctl_write_adapter(self, folder: str) -> None:
        """See `ManifestTransferEngine.write_adapter`."""
        self.weight_transfer_engine.write_adapter(folder)

    def mtpctl_drop_adapters(self, kept: str) -> None:
        """See `ManifestTransferEngine.drop_adapters`."""
        self.weight_transfer_engine.drop_adapters(kept)

    def mtpctl_hold_adapter(self) -> None:
        """Load an adapter of zeros, see `EngineTarget.hold_adapter`."""
        adapters = self.model_runner.lora_manager
        adapters.add_dummy_lora(adapter_request(ADAPTER, ADAPTER_ID, str(HELD)), adapters.get_dummy_lora_warmup_rank(1))

    def mtpctl_drafts(self) -> bool:
        """Whether this engine has a drafter whose weights can be updated."""
        return self.vllm_config.speculative_config is not None

    def mtpctl_draft_s(self) -> dict[int, float]:
        """See `DraftTimes.take`."""
        return TIMES.take()

    def mtpctl_memory(self, reset: str = "") -> dict[str, int]:
        """See `card_memory`."""
        return card_memory(reset=bool(reset))
