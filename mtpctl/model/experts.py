"""Mixtures of experts: the routed experts as one grouped product, and the way of tokens to them and back.

    [T, H] ──router──► k experts a token ──gather──► rows sorted by expert ──Experts──► [T k, H] ──sum of a token's k rows──► [T, H]

Where all experts are on this rank, tokens are gathered and summed here, and the host waits for nothing. With experts or their weights
split over ranks, upstream's dispatcher carries the tokens.

Shape legend: T tokens of this rank, E experts on it, k experts a token, R rows (T k, without expert parallelism), H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.grouped import grouped_linear
from mtpctl.model.layers import GatedMlp
from mtpctl.model.lora import adapted_grouped
from mtpctl.model.recompute import gated_product, recomputed


class SharedExperts(SharedExpertMLP, GatedMlp):
    """Experts that every token visits; their products are recomputed as in `GatedMlp`."""


class Experts(SequentialMLP):
    """This rank's routed experts. Parameters and checkpoints are upstream's, one linear layer an expert; they run as grouped products.

    Rows come sorted by expert, the last expert's first: so do the weights lie in the gradient buffers, which hold parameters backwards.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: MLPSubmodules, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        for name in ("linear_fc1", "linear_fc2"):
            _lay_out([getattr(expert, name) for expert in reversed(self.local_experts)])

    def forward(self, rows: Tensor, counts: Tensor, shares: Tensor) -> tuple[Tensor, None]:
        """rows [R, H], counts [E] in the experts' order, shares [R] of a row in its token's sum → [R, H]."""
        return self.run(rows, counts.flip(0).cumsum(0).to(rows.device, torch.int32), shares), None

    def run(self, rows: Tensor, ends: Tensor, shares: Tensor) -> Tensor:
        """rows [R, H], ends [E] int32: where the rows of the last expert, the one before it, … end."""
        both = self._linear("linear_fc1", rows, ends)
        product = gated_product(both, shares)
        with recomputed(product, partial(gated_product, both.detach(), shares.detach())):
            return self._linear("linear_fc2", product, ends)

    def _linear(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        linears = [getattr(expert, name) for expert in reversed(self.local_experts)]
        out = grouped_linear(rows, ends, [linear.weight for linear in linears])
        return adapted_grouped(out, rows, ends, linears)


def _lay_out(linears: list[torch.nn.Module]) -> None:
    """Move the layers' weights into one tensor, one behind the other."""
    whole = torch.stack([linear.weight.detach() for linear in linears])
    for linear, weight in zip(linears, whole.unbind(), strict=True):
        linear.weight.data = weight


class MixtureOfExperts(MoELayer):
    """Upstream's router, shared experts and parameters, with the tokens' way to routed experts and back made here where no rank shares it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._whole = self.ep_group.size() == 1 and self.experts.tp_group.size() == 1
        # Chunks of tokens that come from other ranks are sorted by expert, the last one first.
        dispatcher = self.token_dispatcher
        for name, inverse in (("sort_input_by_local_experts", False), ("restore_output_by_local_experts", True)):
            chunks = getattr(dispatcher, name)
            places = torch.arange(len(chunks), device=chunks.device)
            order = places.reshape(-1, self.num_local_experts).T.flip(0).ravel()
            setattr(dispatcher, name, order.argsort() if inverse else order)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if not self._whole:
            found: tuple[Tensor, Tensor | None] = super().forward(hidden_states, intermediate_tensors, padding_mask)
            return found
        shared = self.shared_experts_compute(hidden_states)
        shares, routes = self.route(hidden_states, padding_mask)
        tokens = hidden_states.flatten(0, -2)
        experts, row_of, token_of, ends = _sorted_by_expert(routes, self.config.moe_router_topk)
        rows = _Gather.apply(tokens, token_of, row_of)
        with recomputed(rows, partial(tokens.detach().index_select, 0, token_of)):
            found = self.experts.run(rows, ends, _shares_of_rows(shares, experts, row_of))
        out = _Sum.apply(found, token_of, row_of).view_as(hidden_states)
        return (out if shared is None else out + shared), None


def _sorted_by_expert(routes: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each token goes: routes [T, E] bool with k experts a token.

    Returns each token's experts [T, k], their rows [T, k], each row's token [R], and where the rows of the last expert, the one before
    it, … end [E] int32.
    """
    count, total = routes.shape
    experts = routes.to(torch.int8).topk(k, dim=1).indices.sort(dim=1).values
    # Of the tokens that visit an expert, how many come up to each token; and behind how many rows of later experts theirs begin.
    nth = routes.to(torch.int32).cumsum(0, dtype=torch.int32)
    ends = nth[-1].flip(0).cumsum(0, dtype=torch.int32) if count else torch.zeros(total, dtype=torch.int32, device=routes.device)
    begins = (ends.flip(0) - nth[-1]) if count else ends
    row_of = (nth + begins - 1).gather(1, experts).long()
    numbers = torch.arange(count, device=routes.device)[:, None].expand(-1, k)
    token_of = torch.empty(count * k, dtype=torch.long, device=routes.device).scatter_(0, row_of.flatten(), numbers.flatten())
    return experts, row_of, token_of, ends


def _shares_of_rows(shares: Tensor, experts: Tensor, row_of: Tensor) -> Tensor:
    """shares [T, E] → [R]: each row's share in the sum of its token."""
    chosen = shares.gather(1, experts).flatten()
    return torch.empty_like(chosen).scatter(0, row_of.flatten(), chosen)


def _summed(rows: Tensor, row_of: Tensor) -> Tensor:
    """rows [R, H], row_of [T, k] → [T, H], added up in fp32."""
    return F.embedding_bag(row_of, rows, mode="sum")


class _Gather(torch.autograd.Function):
    """tokens [T, H] → rows [R, H]: each row is a copy of its token, whose gradient is the sum of its rows'."""

    @staticmethod
    def forward(ctx: AutogradContext, tokens: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(row_of)
        return tokens.index_select(0, token_of)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_of,) = ctx.saved_tensors
        return _summed(grads[0].contiguous(), row_of), None, None


class _Sum(torch.autograd.Function):
    """rows [R, H] → tokens [T, H]: the sum of each token's rows."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(token_of)
        return _summed(rows, row_of)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_of,) = ctx.saved_tensors
        return grads[0].index_select(0, token_of), None, None
