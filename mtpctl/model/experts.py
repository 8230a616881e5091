"""Mixture of experts: token dispatch, the MoE layer, its shared experts, and its routed experts as grouped matrix products.

Dispatch copies tokens to the rows of their experts, exchanges tokens over expert-parallel ranks, and sums the outputs:

    tokens [T, H] ──gather──► copies, one per rank ──exchange──► tokens of this rank's experts ──gather──► rows, sorted by expert
    tokens [T, H] ◄──sum───── partial outputs ◄──── exchange ─── sums over this rank's experts ◄──sum───── outputs of the experts

Only expert parallelism has the exchange and the outer gather and sum. A token is sent once to each rank that has one of its experts, not
once per expert. The exchange needs the number of copies and rows per rank on the host, which is the only synchronization of host and
device. Other computation overlaps with the exchange.

Shape legend: T tokens, k experts per token, E experts in total, R rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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

from mtpctl.kernels.exact_experts import grouped_linear as exact_product
from mtpctl.kernels.grouped import WeightStack, library_product
from mtpctl.kernels.rows import ExpertOrder, count_destinations, distinct_rows, expert_order, row_sums
from mtpctl.model.layers import Mlp, activation_of, is_bitwise, recompute_in_backward
from mtpctl.model.lora import GroupedLayer

UNROUTED = -1.0
"""Prob of an expert that a token does not use, in messages between ranks. Probs are not negative."""
IMBALANCE_LIMIT = 2.0
"""An expert-parallel rank that gets more than this multiple of the mean number of rows runs its experts in chunks, to bound memory."""


def gather_rows(tokens: Tensor, order: ExpertOrder) -> Tensor:
    """tokens [T, H] → rows [R, H]. A token's gradient is the sum of its rows' gradients."""
    return _Gather.apply(tokens, order.token_of, order.row_of)


def sum_rows(rows: Tensor, order: ExpertOrder) -> Tensor:
    """rows [R, H] → tokens [T, H]: the sum of each token's rows, accumulated in fp32."""
    return _Sum.apply(rows, order.token_of, order.row_of)


def gather_row_probs(probs: Tensor, order: ExpertOrder) -> Tensor:
    """The prob [R] of each row from probs [T, E]."""
    return distinct_rows(probs.flatten(), order.pair_of)


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-all of tokens between expert-parallel ranks.

    order: this rank's tokens by destination; its columns are ranks. sent, received: number of tokens per rank. rows: number of (token,
    expert) pairs of this rank's experts. even_share: mean number of rows per rank, rounded up.
    """

    group: dist.ProcessGroup
    order: ExpertOrder
    sent: list[int]
    received: list[int]
    rows: int
    even_share: int

    @classmethod
    def plan(cls, routes: Tensor, k: int, group: dist.ProcessGroup) -> Exchange:
        """Gather the counts of all ranks. routes [T, E]: mask of the k experts of each of this rank's tokens."""
        ranks, rank = group.size(), group.rank()
        destinations = count_destinations(routes, ranks)
        all_counts = destinations.counts.new_empty(ranks * 2, ranks)
        dist.all_gather_into_tensor(all_counts, destinations.counts, group=group)
        # On CUDA, launched while the counts are gathered.
        order = destinations.order(min(k, ranks))
        tokens_to, rows_to = all_counts.view(ranks, 2, ranks).transpose(0, 1).tolist()  # [source][destination]
        sent, received = tokens_to[rank], [row[rank] for row in tokens_to]
        copies = sum(sent)
        order = replace(order, token_of=order.token_of[:copies], pair_of=order.pair_of[:copies])
        return cls(group, order, sent, received, sum(row[rank] for row in rows_to), -(-sum(map(sum, rows_to)) // ranks))

    def dispatch(self, copies: Tensor) -> AsyncAllToAll:
        """Send this rank's copies, sorted by destination, and receive those of the other ranks, sorted by source."""
        return AsyncAllToAll(copies, self.sent, self.received, self.group)

    def combine(self, outputs: Tensor) -> AsyncAllToAll:
        """The reverse: send outputs for received copies, and receive those of this rank's copies."""
        return AsyncAllToAll(outputs, self.received, self.sent, self.group)


class AsyncAllToAll:
    """A differentiable all-to-all that starts when constructed; `wait` returns the received rows.

    Computation between construction and `wait` overlaps with the communication. In the backward pass it overlaps as well, because autograd
    runs operations in reverse order.
    """

    def __init__(self, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        # The graph refers to the transfer, not to this object, which refers to the graph. After an exception before `wait`, such a cycle
        # would keep the activations of the pass until Python's next full collection.
        self._transfer = _Transfer(sent, received, group)
        self._sent_rows: Tensor | None = _Start.apply(rows, self._transfer)

    def wait(self) -> Tensor:
        """Return the received rows. May be called once."""
        rows: Tensor = _Wait.apply(self._sent_rows, self._transfer)
        self._sent_rows = None
        return rows


class _Transfer:
    """The communication of an `AsyncAllToAll`, in the forward and in the backward pass."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self._sent, self._received, self._group = sent, received, group
        self._in_flight: tuple[Tensor, dist.Work] | None = None

    def start(self, rows: Tensor, *, backward: bool = False) -> None:
        """Start sending rows, or gradients in the opposite direction."""
        sent, received = (self._received, self._sent) if backward else (self._sent, self._received)
        out = rows.new_empty(sum(received), *rows.shape[1:])
        self._in_flight = out, dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self._group, async_op=True)

    def finish(self) -> Tensor:
        """Wait for the received rows or gradients."""
        assert self._in_flight is not None, "wait() may be called once"
        (out, work), self._in_flight = self._in_flight, None
        work.wait()
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.start(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.finish(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent_rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer, ctx.shape = transfer, sent_rows.shape
        return transfer.finish()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(grads[0], backward=True)
        # The gradient is in flight; `_Start.backward` waits for it, and does not read this placeholder, which has the right shape.
        return grads[0].new_empty(()).expand(ctx.shape), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(row_of)
        return tokens.index_select(0, token_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_of,) = ctx.saved_tensors
        return row_sums(grads[0].contiguous(), row_of), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(token_of)
        return row_sums(rows, row_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_of,) = ctx.saved_tensors
        return grads[0].index_select(0, token_of), None, None


class SharedExperts(SharedExpertMLP, Mlp):
    """Experts that process every token, and their output gate if the model has one. Recomputes products like `Mlp`."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]  # upstream's signature
        return self.activate_and_down(hidden_states, self.up(hidden_states))

    def up(self, hidden_states: Tensor) -> Tensor:
        """First half of the forward pass: up-projection, with the gate if the experts have one."""
        inner, _bias = self.linear_fc1(hidden_states)
        return inner

    def activate_and_down(self, hidden_states: Tensor, inner: Tensor) -> Tensor:
        """Second half: activation, down-projection and output gate."""
        out, _bias = self.down(inner)
        return out * F.linear(hidden_states, self.gate_weight).sigmoid() if self.use_shared_expert_gate else out


class Experts(SequentialMLP):
    """This rank's routed experts. Parameters and checkpoints are upstream's (linear layers per expert), but they run as grouped products.

    Rows are sorted from the last expert to the first, because Megatron's gradient buffers store parameters in reverse order.
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
            # One tensor for all weights, so that grouped products read them in place.
            weights = [getattr(expert, name).weight for expert in reversed(self.local_experts)]
            stacked = torch.stack([weight.detach() for weight in weights])
            for weight, view in zip(weights, stacked.unbind(), strict=True):
                weight.data = view
        self._layers: dict[str, GroupedLayer] = {}  # created in the first pass, when adapters are attached

    def run(self, rows: Tensor, ends: Tensor, probs: Tensor) -> Tensor:
        """Outputs [R, H] of rows [R, H], which are sorted from the rank's last expert to its first.

        ends [E] int32: end of each expert's rows, in that order. probs [R]: each row's routing weight.
        """
        inner, activation = self._linear("linear_fc1", rows, ends), activation_of(self.config)
        product = activation(inner, probs)
        with recompute_in_backward(product, partial(activation, inner.detach(), probs.detach())):
            return self._linear("linear_fc2", product, ends)

    def run_in_chunks(self, rows: Tensor, ends: Tensor, probs: Tensor, max_rows: int) -> Tensor:
        """`run` on at most `max_rows` rows at a time. Saves only rows and probs; the backward pass recomputes the rest."""
        if torch.is_grad_enabled() and not (rows.requires_grad or probs.requires_grad) and any(p.requires_grad for p in self.parameters()):
            # A reentrant checkpoint computes no gradients if no input requires one, but the parameters do.
            rows = rows.detach().requires_grad_()
        # Non-reentrant checkpoints use saved-tensor hooks; the nested hooks of `recompute_in_backward` would take precedence and keep their
        # tensors.
        run = partial(checkpoint, self.run, use_reentrant=True, preserve_rng_state=False) if torch.is_grad_enabled() else self.run
        chunks = zip(range(0, len(rows), max_rows), rows.split(max_rows), probs.split(max_rows), strict=True)
        return torch.cat([run(chunk, (ends - start).clamp(0, len(chunk)), chunk_probs) for start, chunk, chunk_probs in chunks])

    def weight_stacks(self) -> list[WeightStack]:
        """Weights whose gradients are added to their buffers outside autograd. Empty before the first forward pass."""
        return [layer.weights for layer in self._layers.values() if layer.weights.has_grad_buffers]

    def _linear(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        layer = self._layers.get(name)
        if layer is None:
            linears = [getattr(expert, name) for expert in reversed(self.local_experts)]
            layer = self._layers[name] = GroupedLayer(linears, exact_product if is_bitwise(self.config) else library_product)
        return layer(rows, ends)


class MixtureOfExperts(MoELayer):
    """Upstream's router and parameters, with the token dispatch of this module.

    The shared experts overlap with the exchange of tokens: their first half runs during the dispatch, the second during the combine. If tp
    splits the shared experts, they run before the exchange, so that their collectives do not run concurrently with it. If tp splits each
    routed expert, ranks gather their tokens and sum their partial outputs.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, H] → the same shape, and no bias. padding_mask [t]: set for padding tokens."""
        tokens, expert_tp = hidden_states.flatten(0, -2), self.experts.tp_group
        uses_exchange = self.ep_group.size() > 1
        overlapped_states = hidden_states if self.use_shared_expert and uses_exchange and self.tp_group.size() == 1 else None
        shared_out = self.shared_experts(hidden_states) if self.use_shared_expert and overlapped_states is None else None
        probs, routes = self.route(hidden_states, padding_mask)
        if expert_tp.size() > 1:
            # Each rank's part of an expert contributes to the gradients of all tokens and probs.
            tokens, probs = (gather_from_sequence_parallel_region(x, group=expert_tp) for x in (tokens, probs))
            routes = gather_from_sequence_parallel_region(routes.to(torch.uint8), group=expert_tp).bool()
        if uses_exchange:
            out, overlapped_out = self._exchange(tokens, probs, routes, overlapped_states)
            shared_out = shared_out if overlapped_out is None else overlapped_out
        else:
            order = expert_order(routes, self.config.moe_router_topk, 1)
            out = sum_rows(self._run(tokens, gather_row_probs(probs, order), order), order)
        if expert_tp.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out.to(probs.dtype), group=expert_tp).to(hidden_states.dtype)
        out = out.view_as(hidden_states)
        return (out if shared_out is None else out + shared_out), None

    def _exchange(self, tokens: Tensor, probs: Tensor, routes: Tensor, overlapped_states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run this rank's tokens [T, H] through the experts of all ranks and, meanwhile, `overlapped_states` through the shared experts.

        probs, routes [T, E]: prob of each expert, and whether the token uses it.
        """
        k, local_experts = self.config.moe_router_topk, routes.shape[1] // self.ep_group.size()
        exchange = Exchange.plan(routes, k, self.ep_group)
        probs_by_rank = torch.where(routes, probs, UNROUTED).view(-1, local_experts)
        probs_in_flight = exchange.dispatch(distinct_rows(probs_by_rank, exchange.order.pair_of))
        tokens_in_flight = exchange.dispatch(gather_rows(tokens, exchange.order))
        inner = None if overlapped_states is None else self.shared_experts.up(overlapped_states)
        local_probs = probs_in_flight.wait()
        order = expert_order(local_probs != UNROUTED, min(k, local_experts), 1, exchange.rows)
        row_probs, received_tokens = gather_row_probs(local_probs, order), tokens_in_flight.wait()
        if exchange.rows <= IMBALANCE_LIMIT * exchange.even_share:
            out = self._run(received_tokens, row_probs, order)
        else:
            ends, rows = order.ends, gather_rows(received_tokens, order)
            del received_tokens
            out = self.experts.run_in_chunks(rows, ends, row_probs, exchange.even_share)
        outputs_in_flight = exchange.combine(sum_rows(out, order))
        shared_out = None if inner is None else self.shared_experts.activate_and_down(overlapped_states, inner)
        return sum_rows(outputs_in_flight.wait(), exchange.order), shared_out

    def _run(self, tokens: Tensor, row_probs: Tensor, order: ExpertOrder) -> Tensor:
        """Outputs [R, H] of the rows of tokens [T, H]. row_probs [R]: prob of each row."""
        rows = gather_rows(tokens, order)
        with recompute_in_backward(rows, partial(tokens.detach().index_select, 0, order.token_of)):
            return self.experts.run(rows, order.ends, row_probs)
