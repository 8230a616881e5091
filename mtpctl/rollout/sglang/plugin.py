"""The code of mtpctl in SGLang's processes (SGLang 0.5.21): a plugin, and the receiver of weight updates.

SGLang calls the plugin (entry point `sglang.srt.plugins`) in each process before it creates an engine. MiMo's MTP layer reads the hidden
state before the final norm, as vLLM passes it. SGLang passes the state after the norm, which has another scale per channel, so fewer
drafts are accepted. SGLang supports the pre-norm state for other models; the plugin enables it for MiMo.

The receiver is SGLang's custom weight loader. Target and drafter are separate models with one receiver each, which share one inbox.
"""

from __future__ import annotations

import inspect
import json
import os
from functools import cache
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from mtpctl.compat.transformers import register_mimo
from mtpctl.errors import PrerequisiteMissing, UpstreamMoved
from mtpctl.sync.parameters import Shard, TpRank, match_shards
from mtpctl.sync.protocol import ABORTED_BY_SENDER, PlanMismatch, SectionPlan, SyncError
from mtpctl.sync.receiver import Inbox, RankSums, StepReceiver, UpdateStep

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.mimo import MiMoForCausalLM

PINNED = "0.5.21"
PLUGIN_GROUP = "sglang.srt.plugins"


def check_plugin() -> None:
    """Raise PrerequisiteMissing if SGLang's processes would not find this plugin."""
    if not any(entry.value == f"{__name__}:register" for entry in entry_points(group=PLUGIN_GROUP)):
        raise PrerequisiteMissing(
            "rollout.python: mtpctl is not installed in SGLang's environment; create it with scripts/sglang_environment.sh"
        )


def register() -> None:
    """Register MiMo's config, and pass MiMo's drafter the state that it was trained on. May be called again.

    Raises UpstreamMoved for another release, and if SGLang no longer supports the pre-norm state.
    """
    if (release := version("sglang")) != PINNED:
        raise UpstreamMoved(
            f"{__name__} was written for SGLang {PINNED}, found {release}: check whether the patch is still needed, then set plugin.PINNED"
        )
    register_mimo()
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.models.mimo import MiMoForCausalLM

    if getattr(MiMoForCausalLM.forward, "_mtpctl", False):
        return
    if "hidden_states_before_norm" not in inspect.signature(LogitsProcessor.forward).parameters:
        raise UpstreamMoved(
            f"{__name__}: LogitsProcessor no longer takes hidden_states_before_norm; find how drafters get the state before the norm"
        )
    upstream = MiMoForCausalLM.forward

    def forward(
        self: MiMoForCausalLM,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
    ) -> LogitsProcessorOutput:
        if get_embedding:
            return upstream(self, input_ids, positions, forward_batch, input_embeds, get_embedding)
        states_before_norm: list[torch.Tensor] = []
        # The norm first adds the residual, and returns the sum as its second output.
        hook = self.model.norm.register_forward_hook(lambda module, args, output: states_before_norm.append(output[1]))
        try:
            hidden_states = self.model(input_ids, positions, forward_batch, input_embeds)
        finally:
            hook.remove()
        if not states_before_norm and forward_batch.capture_hidden_mode.need_capture():
            raise UpstreamMoved(
                f"{__name__}: the hook on the final norm did not run, so drafts would start from the state after the norm; "
                "set disable_prefill_cuda_graph: true in rollout.engine_args"
            )
        return self.logits_processor(
            input_ids,
            hidden_states,
            self.lm_head,
            forward_batch,
            hidden_states_before_norm=states_before_norm[0] if states_before_norm else None,
        )

    forward._mtpctl = True  # type: ignore[attr-defined]
    MiMoForCausalLM.forward = forward


# ------------------------------------------------------------------------------------------------------ weight updates


_RECEIVERS: dict[int, ModelReceiver] = {}
"""Receivers by the `id` of their model. Models exist as long as the process, so ids are not reused."""

_inbox = cache(Inbox)
"""The inbox of this process for a device."""


class AnsweredStep(UpdateStep):
    """A step, and the folder to which each process writes the result of each of its models."""

    answers: str


def apply_step(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Apply one step of an update of `model`. Its result, also an error, is written to the folder `answers` of the step."""
    step: AnsweredStep = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    receiver = _RECEIVERS.setdefault(id(model), ModelReceiver(model))
    answer: dict[str, object]
    try:
        answer = {"result": receiver.apply(step)}
    except Exception as error:
        receiver.steps.fail(str(error))
        answer = {"error": str(error), "misfit": isinstance(error, PlanMismatch)}
    Path(step["answers"], f"{os.getpid()}-{id(model)}").write_text(json.dumps(answer))


class ModelReceiver:
    """Receives sections of manifests into one live model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.steps = StepReceiver(_inbox(next(model.parameters()).device))

    def apply(self, step: UpdateStep) -> RankSums | None:
        """Apply one step. Returns the checksums for `sums`.

        Raises PlanMismatch in `begin`, and SyncError in `buckets` and `finish`. `abort` always raises SyncError, so that `apply_step`
        cancels the update.
        """
        match step["action"]:
            case "begin":
                self.steps.begin(step, self._match)
            case "buckets":
                self.steps.receive(step)
            case "finish":
                if self.steps.finish() is None:
                    raise SyncError("there is no update to finish")
            case "sums":
                return self.steps.sums()
            case _:
                raise SyncError(ABORTED_BY_SENDER)
        return None

    def _match(self, plan: SectionPlan) -> dict[str, Shard]:
        from sglang.srt.runtime_context import get_parallel

        rename = getattr(self._model, "map_model_name_to_mtp_param_name", None)
        tp = TpRank(get_parallel().tp_rank, get_parallel().tp_size)
        shared_with = _shared_modules(cast(_Drafter, self._model)) if rename is not None else None
        return match_shards(self._model, plan, rename=rename, shared_with=shared_with, tp=tp)


class _Drafter(Protocol):
    """A drafter of SGLang."""

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]: ...


def _shared_modules(drafter: _Drafter) -> nn.Module:
    """Embedding and head that a drafter shares with its target."""
    modules = nn.Module()
    modules.embed, modules.head = drafter.get_embed_and_head()
    return modules
