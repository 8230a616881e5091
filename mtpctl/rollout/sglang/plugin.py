"""mtpctl's plugin for SGLang 0.5.21 (entry point `sglang.srt.plugins`), called in each process before an engine is created.

MiMo's MTP layer reads the hidden state before the final norm, as vLLM passes it. SGLang passes the state after the norm, which has another
scale per channel, so fewer drafts are accepted. SGLang supports the pre-norm state for other models; the plugin enables it for MiMo.
"""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING

from mtpctl.compat.transformers import register_mimo
from mtpctl.errors import EnvironmentMissing, UpstreamMoved

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.mimo import MiMoForCausalLM

PINNED = "0.5.21"
GROUP = "sglang.srt.plugins"


def check_plugin() -> None:
    """Raise EnvironmentMissing if SGLang's processes would not find this plugin."""
    if not any(entry.value == f"{__name__}:register" for entry in entry_points(group=GROUP)):
        raise EnvironmentMissing(
            "rollout.python: mtpctl is not installed in SGLang's environment; create it with scripts/sglang_environment.sh"
        )


def register() -> None:
    """Register MiMo's config, and pass MiMo's drafter the state that it was trained on. May be called again.

    Raises UpstreamMoved for another release, and if SGLang no longer supports the pre-norm state.
    """
    if (release := version("sglang")) != PINNED:
        raise UpstreamMoved(f"{__name__} was written for SGLang {PINNED}, found {release}: look whether it is needed, then move its guard")
    register_mimo()
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.models.mimo import MiMoForCausalLM

    if getattr(MiMoForCausalLM.forward, "_mtpctl", False):
        return
    if "hidden_states_before_norm" not in inspect.signature(LogitsProcessor.forward).parameters:
        raise UpstreamMoved(f"{__name__}: LogitsProcessor no longer takes hidden_states_before_norm; find the new way to the drafter")
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
        before: list[torch.Tensor] = []
        # The norm first adds the residual, and returns the sum as its second output.
        hook = self.model.norm.register_forward_hook(lambda module, args, output: before.append(output[1]))
        try:
            hidden = self.model(input_ids, positions, forward_batch, input_embeds)
        finally:
            hook.remove()
        if not before and forward_batch.capture_hidden_mode.need_capture():
            raise UpstreamMoved(
                f"{__name__}: the final norm was not called, so drafts would start from its output; disable_prefill_cuda_graph"
            )
        return self.logits_processor(
            input_ids, hidden, self.lm_head, forward_batch, hidden_states_before_norm=before[0] if before else None
        )

    forward._mtpctl = True  # type: ignore[attr-defined]
    MiMoForCausalLM.forward = forward
