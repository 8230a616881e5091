"""An adapter that a log-prob replica receives. It scores with merged weights: W + (alpha / rank) B A.

The adapter alone is sent. Merging would lose the base weights W, so `HeldWeights` keeps them. The product is added in fp32 and rounded
once, as in the trainer's own export.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mtpctl.sync.adapter import AdapterReceiver, rank_of
from mtpctl.sync.checksums import checksum
from mtpctl.sync.protocol import PlanMismatch, SectionPlan


class MergedAdapter(AdapterReceiver):
    """Receives section `adapter` on `device`, for a model whose weights have these `shapes`, by Hugging Face names.

    Raises PlanMismatch where the section is no adapter, or one for other weights.
    """

    def __init__(self, plan: SectionPlan, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__(plan, device)
        wrong = []
        for name, layer in self.layers.items():
            if name not in shapes:
                wrong.append(f"{name} is not a tensor of the served model's trunk")
            elif tuple(shapes[name]) != layer.shape:
                wrong.append(f"the adapter of {name} makes {layer.shape}, the served model has {tuple(shapes[name])}")
        if wrong:
            raise PlanMismatch(f"the adapter does not fit the log-prob replica: {'; '.join(wrong[:8])}")
        alpha = plan.config.get("lora_alpha")
        if not isinstance(alpha, int | float):
            raise PlanMismatch("the adapter does not fit the log-prob replica: its config names no lora_alpha")
        self._scale = alpha / rank_of(plan)

    @torch.no_grad()
    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight `[rows, columns]` with the adapter merged in, in its own dtype; unchanged where the adapter leaves its layer out."""
        layer = self.layers.get(name)
        if layer is None:
            return weight
        a, b = self.tensors[layer.a].float(), self.tensors[layer.b].float()
        return torch.addmm(weight.float(), b, a, alpha=self._scale).to(weight.dtype)

    def checksums(self) -> dict[str, str]:
        """Checksums of the adapter's tensors as they were received."""
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}
