"""An adapter on its way into a replica, which scores with merged weights: W + (alpha / rank) B A.

W is read again from the model's folder at every update, layer by layer, so that a replica needs no second copy of its weights;
what comes over the wire is the adapter alone. The product is added in fp32 and rounded once, as the trainer's own export does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from mtpctl.sync import PlanMismatch, SectionPlan, checksum
from mtpctl.sync.adapter import AdapterReceiver


class AdapterOverBase(AdapterReceiver):
    """Takes in the buckets of section `adapter` for a model of `dtype` whose weights are `base`, by their Hugging Face names.

    Raises PlanMismatch where the section is no adapter, or one for other weights.
    """

    def __init__(self, plan: SectionPlan, base: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(plan)
        self._base, self._dtype = base, dtype
        wrong = []
        for name, layer in self.layers.items():
            if name not in base:
                wrong.append(f"{name} is not a tensor of the served model")
            elif tuple(base[name].shape) != layer.shape:
                wrong.append(f"the adapter of {name} makes {layer.shape}, the served model has {tuple(base[name].shape)}")
        if wrong:
            raise PlanMismatch(f"the adapter does not fit the log-prob replica: {'; '.join(wrong[:8])}")
        self._scale = plan.config["lora_alpha"] / plan.config["r"]

    @torch.no_grad()
    def merged(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights `[rows, columns]` of the layers as the adapter makes them, on `device`, by their Hugging Face names."""
        for name, layer in self.layers.items():
            weight = self._base[name].to(device).to(self._dtype)
            a, b = (self.tensors[each].to(device).float() for each in (layer.a, layer.b))
            yield name, torch.addmm(weight.float(), b, a, alpha=self._scale).to(self._dtype)

    def checksums(self) -> dict[str, str]:
        """Of the adapter's tensors as they came, and of the weights that it was merged into."""
        own = {name: checksum(tensor) for name, tensor in self.tensors.items()}
        return own | {name: checksum(self._base[name].to(self._dtype)) for name in self.layers}
