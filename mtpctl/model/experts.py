"""Mixtures of experts: the layer, and its routed experts as grouped products.

Shape legend: T tokens, E experts, R rows, each a token at one of its experts, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtpctl.kernels.grouped import Stack
from mtpctl.kernels.order import expert_order
from mtpctl.kernels.rows import distinct_rows
from mtpctl.kernels.swiglu import swiglu
from mtpctl.model.dispatch import Exchange, Order, shares_of_rows
from mtpctl.model.layers import GatedMlp
from mtpctl.model.lora import GroupedLayer
from mtpctl.model.recompute import recomputed

HOT = 2.0
"""Times its even share of the rows beyond which an expert-parallel rank runs its experts in parts."""


class SharedExperts(SharedExpertMLP, GatedMlp):
    """Experts that every token visits, and the gate of their output where the model has one; products are recomputed as in `GatedMlp`."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]  # as upstream has it
        return self.gated_down(hidden_states, self.up(hidden_states))

    def up(self, hidden_states: Tensor) -> Tensor:
        """The first half of a pass: gate and up-projection."""
        gate_up, _bias = self.linear_fc1(hidden_states)
        return gate_up

    def gated_down(self, hidden_states: Tensor, gate_up: Tensor) -> Tensor:
        """The second half: the product, the layer that brings it back to the hidden size, and the gate of the output."""
        out, _bias = self.down(gate_up)
        return out * F.linear(hidden_states, self.gate_weight).sigmoid() if self.use_shared_expert_gate else out


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
        """The experts' outputs [R, H] of rows [R, H], which are sorted from the last expert of the rank to its first.

        shares [R]: the share of each row in its token's sum. ends [E] int32: where the rows of each expert end, in that order.
        """
        gate_up = self._linear("linear_fc1", rows, ends)
        product = swiglu(gate_up, shares)
        with recomputed(product, partial(swiglu, gate_up.detach(), shares.detach())):
            return self._linear("linear_fc2", product, ends)

    def run_in_parts(self, rows: Tensor, ends: Tensor, shares: Tensor, most: int) -> Tensor:
        """`run` on at most `most` rows at a time. Of each part only rows and shares are kept; the backward pass computes the rest again."""
        if torch.is_grad_enabled() and not (rows.requires_grad or shares.requires_grad) and any(p.requires_grad for p in self.parameters()):
            # Adapters of the experts train on an input that takes no gradient: without one a checkpoint would give them none.
            rows = rows.detach().requires_grad_()
        # The other kind of checkpoint works by hooks on saved tensors. Those of `recomputed` lie inside and would keep theirs.
        run = partial(checkpoint, self.run, use_reentrant=True, preserve_rng_state=False) if torch.is_grad_enabled() else self.run
        parts = zip(range(0, len(rows), most), rows.split(most), shares.split(most), strict=True)
        return torch.cat([run(part, (ends - start).clamp(0, len(part)), of_part) for start, part, of_part in parts])

    def stacks(self) -> list[Stack]:
        """The weights whose gradients are added to their buffers past autograd. None are known before the first forward pass."""
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
    """Upstream's router and parameters; the tokens' way to the routed experts and back is `mtpctl.model.dispatch`.

    While rows travel between ranks the shared experts run: their first half on the way there, the second on the way back. Where tp splits
    the shared experts they run before, so that their collectives and the exchange never run at the same time. Where tp splits each routed
    expert, ranks gather their tokens, and sum up what their parts of the experts gave.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, H] → the same, and no bias. padding_mask [t]: set where a token only fills up the row."""
        tokens, split = hidden_states.flatten(0, -2), self.experts.tp_group
        travels = self.ep_group.size() > 1
        beside = hidden_states if self.use_shared_expert and travels and self.tp_group.size() == 1 else None
        shared = self.shared_experts(hidden_states) if self.use_shared_expert and beside is None else None
        shares, routes = self.route(hidden_states, padding_mask)
        if split.size() > 1:
            # Each rank's part of an expert gives a part of a token's and of a share's gradient.
            tokens, shares = (gather_from_sequence_parallel_region(x, group=split) for x in (tokens, shares))
            routes = gather_from_sequence_parallel_region(routes.to(torch.uint8), group=split).bool()
        sorted_rows = expert_order(routes, self.config.moe_router_topk, self.ep_group.size())
        order, of_rows = Order(sorted_rows.row_of, sorted_rows.token_of), shares_of_rows(shares, sorted_rows)
        if travels:
            out, halves = self._exchanged(tokens, of_rows, order, sorted_rows.counts, beside)
            shared = shared if halves is None else halves
        else:
            out = order.sum(self._run(tokens, of_rows, order, sorted_rows.counts))
        if split.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out.to(shares.dtype), group=split).to(hidden_states.dtype)
        out = out.view_as(hidden_states)
        return (out if shared is None else out + shared), None

    def _exchanged(
        self, tokens: Tensor, of_rows: Tensor, order: Order, counts: Tensor, beside: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of what the experts of all ranks give each of this rank's tokens [T, H], with the shares of_rows [R] of their rows.

        counts [E]: the rows of each expert. beside: states for which the shared experts run meanwhile; what they give comes second.
        """
        exchange = Exchange.plan(counts, self.ep_group)
        coming, coming_shares = exchange.forth(order.gather(tokens)), exchange.forth(of_rows)
        gate_up = None if beside is None else self.shared_experts.up(beside)
        received, of_received = coming.arrived(), distinct_rows(coming_shares.arrived(), exchange.order.token_of.long())
        if len(received) <= HOT * exchange.even_share:
            found = self._run(received, of_received, exchange.order, exchange.counts)
        else:
            ends = exchange.counts.cumsum(0, dtype=torch.int32)
            received = exchange.order.gather(received)  # frees what came
            found = self.experts.run_in_parts(received, ends, of_received, exchange.even_share)
        returning = exchange.back(exchange.order.sum(found))
        shared = None if gate_up is None else self.shared_experts.gated_down(beside, gate_up)
        return order.sum(returning.arrived()), shared

    def _run(self, tokens: Tensor, of_rows: Tensor, order: Order, counts: Tensor) -> Tensor:
        rows = order.gather(tokens)
        with recomputed(rows, partial(tokens.detach().index_select, 0, order.token_of)):
            return self.experts.run(rows, counts.cumsum(0, dtype=torch.int32), of_rows)
