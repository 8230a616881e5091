"""Mixtures of experts: the layer, and its routed experts as grouped products.

Shape legend: T tokens, E experts, R rows, each a token at one of its experts, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from mtpctl.kernels.gated import gated_product
from mtpctl.kernels.grouped import Stack
from mtpctl.kernels.order import expert_order
from mtpctl.model.dispatch import Exchange, Order, shares_of_rows
from mtpctl.model.layers import GatedMlp
from mtpctl.model.lora import GroupedLayer
from mtpctl.model.recompute import recomputed


class SharedExperts(SharedExpertMLP, GatedMlp):
    """Experts that every token visits; their products are recomputed as in `GatedMlp`."""


class Experts(SequentialMLP):
    """This rank's routed experts. Parameters and checkpoints are upstream's, one linear layer an expert; they run as grouped products.

    Rows come sorted by expert, the last expert's first: so do the weights lie in the gradient buffers, which hold parameters backwards.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        for name in ("linear_fc1", "linear_fc2"):
            _lay_out([getattr(expert, name).weight for expert in reversed(self.local_experts)])
        self._layers: dict[str, GroupedLayer] = {}  # made at the first pass, when adapters are attached

    def run(self, rows: Tensor, ends: Tensor, shares: Tensor) -> Tensor:
        """rows [R, H], shares [R] of a row in its token's sum, ends [E] int32: where the rows of the last expert, the one before it, …
        end. → [R, H]."""
        both = self._linear("linear_fc1", rows, ends)
        product = gated_product(both, shares)
        with recomputed(product, partial(gated_product, both.detach(), shares.detach())):
            return self._linear("linear_fc2", product, ends)

    def stacks(self) -> list[Stack]:
        """The weights whose gradients go into their buffers past autograd; none before the first pass."""
        return [layer.weights for layer in self._layers.values() if layer.weights.buffered]

    def _linear(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        layer = self._layers.get(name)
        if layer is None:
            layer = self._layers[name] = GroupedLayer([getattr(expert, name) for expert in reversed(self.local_experts)])
        return layer(rows, ends)


def _lay_out(weights: list[torch.nn.Parameter]) -> None:
    """Move the weights into one tensor, one behind the other."""
    whole = torch.stack([weight.detach() for weight in weights])
    for weight, place in zip(weights, whole.unbind(), strict=True):
        weight.data = place


class MixtureOfExperts(MoELayer):
    """Upstream's router, shared experts and parameters; the tokens' way to the routed experts and back is `mtpctl.model.dispatch`.

    Where tp splits each expert, ranks gather their tokens, and sum up what their parts of the experts gave.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, H] → the same, and no bias. padding_mask [t]: set where a token only fills up the row."""
        shared = self.shared_experts_compute(hidden_states)
        shares, routes = self.route(hidden_states, padding_mask)
        tokens, split = hidden_states.flatten(0, -2), self.experts.tp_group
        if split.size() > 1:
            # Each rank's part of an expert gives a part of a token's and of a share's gradient.
            tokens, shares = (gather_from_sequence_parallel_region(x, group=split) for x in (tokens, shares))
            routes = gather_from_sequence_parallel_region(routes.to(torch.uint8), group=split).bool()
        out = self._routed(tokens, shares, routes)
        if split.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out.to(shares.dtype), group=split).to(hidden_states.dtype)
        out = out.view_as(hidden_states)
        return (out if shared is None else out + shared), None

    def _routed(self, tokens: Tensor, shares: Tensor, routes: Tensor) -> Tensor:
        """tokens [T, H], shares and routes [T, E] → the sum of what each token's experts on all ranks give [T, H]."""
        sorted_rows = expert_order(routes, self.config.moe_router_topk, self.ep_group.size())
        order, of_rows = Order(sorted_rows.row_of, sorted_rows.token_of), shares_of_rows(shares, sorted_rows)
        if self.ep_group.size() == 1:
            return order.sum(self._run(tokens, of_rows, order, sorted_rows.counts))
        exchange = Exchange.plan(sorted_rows.counts, self.ep_group)
        received, of_received = exchange.forth(order.gather(tokens)), exchange.forth(of_rows)
        found = self._run(received, of_received[exchange.order.token_of], exchange.order, exchange.counts)
        return order.sum(exchange.back(exchange.order.sum(found)))

    def _run(self, tokens: Tensor, of_rows: Tensor, order: Order, counts: Tensor) -> Tensor:
        rows = order.gather(tokens)
        with recomputed(rows, partial(tokens.detach().index_select, 0, order.token_of)):
            return self.experts.run(rows, counts.cumsum(0, dtype=torch.int32), of_rows)
