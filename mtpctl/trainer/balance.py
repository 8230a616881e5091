"""How an update's tokens spread over the experts: metrics, and the routers' biases that follow them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mtpctl.model.router import Router


class Balance:
    """The routers of this rank's part of a model. All ranks call every method together."""

    def __init__(self, model: torch.nn.Module, bias_update: float) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.bias_update, self.tokens = bias_update, 0

    def begin(self, tokens: int) -> None:
        """An update begins on so many tokens, those of all ranks together."""
        self.tokens = tokens
        Router.begin(self.routers, tokens)

    @torch.no_grad()
    def finish(self, *, applied: bool) -> dict[str, float]:
        """Metrics of the update, none for a model without experts. Biases move where the optimizer's step was applied."""
        loads = self._loads()
        if applied and self.bias_update:
            for router, load in zip(self.routers, loads, strict=True):
                # An expert with more than the mean becomes less likely, one with less becomes likelier (DeepSeek-V3, arXiv 2412.19437,
                # section 2.1.2). A router that this update did not ask has no load at all, and keeps its bias.
                router.expert_bias += self.bias_update * (load.mean() - load).sign().float()
        return self._metrics(loads) | self._agreement()

    def _agreement(self) -> dict[str, float]:
        """`moe/replay_agreement`: how many of the experts that were replayed this rank's routers, and all others, would have chosen too.

        Empty where nothing was replayed.
        """
        counts = torch.zeros(2, dtype=torch.long, device=torch.cuda.current_device())
        for router in self.routers:
            counts += router.replayed
        if dist.get_world_size() > 1:
            dist.all_reduce(counts)
        agreed, replayed = counts.tolist()
        return {"moe/replay_agreement": agreed / replayed} if replayed else {}

    def _loads(self) -> Tensor:
        """Rows of each router's experts [routers, E], over all ranks that share the routers."""
        if not self.routers:
            return torch.zeros(0, 1, dtype=torch.double, device=torch.cuda.current_device())
        loads = torch.stack([router.load for router in self.routers])
        if dist.get_world_size() > 1:
            dist.all_reduce(loads, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        return loads.double()

    def _metrics(self, loads: Tensor) -> dict[str, float]:
        rows = loads.sum(1)
        relative = loads / loads.mean(1, keepdim=True).clamp(min=1)
        wanted = torch.tensor([router.topk * router.passes * self.tokens for router in self.routers], device=loads.device)
        asked = rows > 0  # MTP layers that do not train are not asked
        # torch warns of the deviation of nothing, which a stage without routers asks for.
        deviation = relative.std(1, correction=0) if self.routers else rows
        parts = [relative.amax(1), deviation, asked.double(), asked * wanted.double(), rows]
        sums = torch.stack(parts).sum(1)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        largest, spread, layers, due, given = sums.tolist()
        if not layers:
            return {}
        return {"moe/load_max": largest / layers, "moe/load_cv": spread / layers, "moe/dropped": 1 - given / due}
