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

HOT = 1.5
"""An expert-parallel rank that receives more than this times its even share of the rows runs its experts in parts, at most an even share at
a time. Of each part it keeps what went in and came out, and computes the rest again in the backward pass."""


class SharedExperts(SharedExpertMLP, GatedMlp):
    """Experts that every token visits, and the gate of their output where the model has one; products are recomputed as in `GatedMlp`."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]  # as upstream has it
        return self.finished(hidden_states, self.begun(hidden_states))

    def begun(self, hidden_states: Tensor) -> Tensor:
        """The first half of a pass: gate and up-projection."""
        gate_up, _bias = self.linear_fc1(hidden_states)
        return gate_up

    def finished(self, hidden_states: Tensor, gate_up: Tensor) -> Tensor:
        """The second half."""
        out, _bias = self.down(gate_up)
        return out * F.linear(hidden_states, self.gate_weight).sigmoid() if self.use_shared_expert_gate else out


class _SharedPass:
    """A pass of the shared experts in halves, which run when they are asked for. Without such experts nothing runs, and `out` is None."""

    def __init__(self, experts: SharedExperts | None, hidden: Tensor) -> None:
        self._experts, self._hidden = experts, hidden
        self._gate_up: Tensor | None = None
        self.out: Tensor | None = None

    def run(self) -> None:
        """Both halves."""
        self.begin()
        self.finish()

    def begin(self) -> None:
        """The first half, unless it has run."""
        if self._experts is not None and self._gate_up is None and self.out is None:
            self._gate_up = self._experts.begun(self._hidden)

    def finish(self) -> None:
        """The second half, unless it has run."""
        if self._experts is not None and self._gate_up is not None:
            self.out, self._gate_up = self._experts.finished(self._hidden, self._gate_up), None


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
    those, they run before, since their own collectives are not to meet the exchange. Where tp splits each routed expert, ranks gather
    their tokens, and sum up what their parts of the experts gave.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, H] → the same, and no bias. padding_mask [t]: set where a token only fills up the row."""
        tokens, split = hidden_states.flatten(0, -2), self.experts.tp_group
        shared = _SharedPass(self.shared_experts if self.use_shared_expert else None, hidden_states)
        if self.ep_group.size() == 1 or self.tp_group.size() > 1:
            shared.run()
        shares, routes = self.route(hidden_states, padding_mask)
        if split.size() > 1:
            # Each rank's part of an expert gives a part of a token's and of a share's gradient.
            tokens, shares = (gather_from_sequence_parallel_region(x, group=split) for x in (tokens, shares))
            routes = gather_from_sequence_parallel_region(routes.to(torch.uint8), group=split).bool()
        out = self._routed(tokens, shares, routes, shared)
        if split.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out.to(shares.dtype), group=split).to(hidden_states.dtype)
        out = out.view_as(hidden_states)
        return (out if shared.out is None else out + shared.out), None

    def _routed(self, tokens: Tensor, shares: Tensor, routes: Tensor, shared: _SharedPass) -> Tensor:
        """tokens [T, H], shares and routes [T, E] → the sum of what each token's experts on all ranks give [T, H]."""
        sorted_rows = expert_order(routes, self.config.moe_router_topk, self.ep_group.size())
        order, of_rows = Order(sorted_rows.row_of, sorted_rows.token_of), shares_of_rows(shares, sorted_rows)
        if self.ep_group.size() == 1:
            return order.sum(self._run(tokens, of_rows, order, sorted_rows.counts))
        exchange = Exchange.plan(sorted_rows.counts, self.ep_group)
        coming, of_coming = exchange.forth(order.gather(tokens)), exchange.forth(of_rows)
        shared.begin()
        returning = exchange.back(self._run_received(coming.arrived(), of_coming.arrived(), exchange))
        shared.finish()
        return order.sum(returning.arrived())

    def _run_received(self, received: Tensor, of_received: Tensor, exchange: Exchange) -> Tensor:
        """The outputs of this rank's experts for the rows [R, H] that came, and their shares [R], in the order in which they came."""
        places, even = exchange.order.token_of, exchange.even
        if len(received) <= HOT * even:
            found = self._run(received, of_received[places], exchange.order, exchange.counts)
        else:
            ends = exchange.counts.cumsum(0, dtype=torch.int32)
            parts = zip(range(0, len(received), even), places.long().split(even), strict=True)
            found = torch.cat([self._run_part(received, of_received, part, ends - start) for start, part in parts])
        return exchange.order.sum(found)

    def _run_part(self, received: Tensor, of_received: Tensor, places: Tensor, ends: Tensor) -> Tensor:
        """The outputs for the rows at `places`; ends [E] may lie before the first of these and behind the last."""

        def run(received: Tensor, of_received: Tensor) -> Tensor:
            rows, shares = distinct_rows(received, places), distinct_rows(of_received, places)
            return self.experts.run(rows, ends.clamp(0, len(places)), shares)

        # Another kind of checkpoint would keep what the hooks of `recomputed` keep.
        found: Tensor = checkpoint(run, received, of_received, use_reentrant=True, preserve_rng_state=False)
        return found

    def _run(self, tokens: Tensor, of_rows: Tensor, order: Order, counts: Tensor) -> Tensor:
        rows = order.gather(tokens)
        with recomputed(rows, partial(tokens.detach().index_select, 0, order.token_of)):
            return self.experts.run(rows, counts.cumsum(0, dtype=torch.int32), of_rows)
