"""An adapter on its way into a replica, which scores with merged weights: W + (alpha / rank) B A.

What comes over the wire is the adapter alone; W, which merging would lose, is kept by `HeldWeights`. The product is added in fp32 and
rounded once, as the trainer's own export does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mtpctl.sync.adapter import AdapterReceiver, rank_of
from mtpctl.sync.checksums import checksum
from mtpctl.sync.manifest import SectionPlan
from mtpctl.sync.protocol import PlanMismatch


class MergedAdapter(AdapterReceiver):
    """Takes in the buckets of section `adapter`, on `device`, for a model whose weights have these `shapes` by their Hugging Face names.

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
    def over(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The weight `[rows, columns]` of this name as the adapter makes it, in its dtype; itself where the adapter has no such layer."""
        layer = self.layers.get(name)
        if layer is None:
            return weight
        a, b = self.tensors[layer.a].float(), self.tensors[layer.b].float()
        return torch.addmm(weight.float(), b, a, alpha=self._scale).to(weight.dtype)

    def checksums(self) -> dict[str, str]:
        """Of the adapter's tensors as they came."""
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}
