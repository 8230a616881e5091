"""Drafters of several MTP layers run each layer at its depth (vLLM 0.32.0).

The second model runner, which cards have, drafts each token of a step with the layer of that depth, `spec_step_idx`. Two drafters do not
follow it:

- `MiMoMTP` asserts that the depth is the first, though its layers are there for the others.
- `DeepSeekMTP` is compiled once, at the first depth it is called for, and without guards: the compiled code would run that depth's layer
  for all of them. It would show as acceptance of later drafts far below what the trainer expects.

Here MiMo's runs the layer that it is asked for, and DeepSeek's runs later depths without the compiled code; in decoding steps they are
part of the drafter's CUDA graph as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.mimo_mtp import MiMoMTP
    from vllm.sequence import IntermediateTensors

_DONE = "mtpctl_depths"


def install() -> bool:
    """Patch both drafters; returns whether it was done now. May be called again.

    Raises UpstreamMoved for another release, and where a drafter follows the depth by itself, or is called in another way.
    """
    require_pinned(__name__)
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    if hasattr(MiMoMTP, _DONE):
        return False
    if _takes_later_depths(MiMoMTP.forward):
        raise UpstreamMoved(f"{__name__}: MiMoMTP takes later depths by itself; remove this part of the patch")
    compiled: Callable[..., Any] | None = vars(DeepSeekMTP).get("__call__")
    if compiled is None:
        raise UpstreamMoved(f"{__name__}: DeepSeekMTP is no longer compiled as a whole; remove this part of the patch")

    def forward(
        self: MiMoMTP,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, hidden_states, inputs_embeds, spec_step_idx)  # type: ignore[no-any-return]

    @wraps(compiled)
    def call(self: DeepSeekMTP, *args: Any, **kwargs: Any) -> Any:
        run = self.forward if kwargs.get("spec_step_idx") else compiled.__get__(self)
        return run(*args, **kwargs)

    assign(MiMoMTP, forward=forward)
    assign(DeepSeekMTP, __call__=call)
    setattr(MiMoMTP, _DONE, True)
    return True


def _takes_later_depths(forward: Callable[..., Any]) -> bool:
    """Whether the drafter's `forward` runs for the second depth, with a model that returns nothing."""
    drafter = SimpleNamespace(model=lambda *_: None)
    try:
        forward(drafter, None, None, None, spec_step_idx=1)
    except AssertionError:
        return False
    return True
