"""Mixture of experts: token dispatch, the MoE layer, its shared experts, and its routed experts as grouped matrix products.

Dispatch copies tokens to the rows of their experts, exchanges tokens over expert-parallel ranks, and sums the outputs:

    tokens [T, H] ──gather──► copies, one per rank ──exchange──► tokens of this rank's experts ──gather──► rows, sorted by expert
    tokens [T, H] ◄──sum───── partial outputs ◄──── exchange ─── sums over this rank's experts ◄──sum───── outputs of the experts

Only expert parallelism has the exchange and the outer gather and sum. A token is sent once to each rank that has one of its experts, not
once per expert, together with its probs (`mtpctl.kernels.messages`). The exchange needs the number of copies and rows per rank on the host,
which is the only synchronization of host and device. The shared experts overlap with the exchange.

Shape legend: T tokens, k experts per token, E experts in total, R rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

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
from mtpctl.kernels.messages import UNROUTED, MessageLayout
from mtpctl.kernels.rows import ExpertOrder, count_destinations, distinct_rows, expert_order, row_sums
from mtpctl.model.layers import Mlp, activation_of, is_bitwise, recompute_in_backward
from mtpctl.model.lora import GroupedLayer

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
class ExchangePlan:
    """Plan of the all-to-all of tokens between expert-parallel ranks.

    order: this rank's tokens by destination; its columns are ranks. sent, received: number of tokens per rank. num_rows: number of
    (token, expert) pairs of this rank's experts. even_share: mean number of rows per rank, rounded up.
    """

    group: dist.ProcessGroup
    order: ExpertOrder
    sent: list[int]
    received: list[int]
    num_rows: int
    even_share: int

    @classmethod
    def gather(cls, routes: Tensor, k: int, group: dist.ProcessGroup) -> ExchangePlan:
        """Gather the counts of all ranks. routes [T, E]: mask of the k experts of each of this rank's tokens."""
        ranks, rank = group.size(), group.rank()
        destinations = count_destinations(routes, ranks)
        all_counts = destinations.counts.new_empty(ranks * 2, ranks)
        dist.all_gather_single(all_counts, destinations.counts, group=group)
        # Enqueued before the host waits for the counts.
        order = destinations.order(min(k, ranks))
        counts = all_counts.tolist()
        tokens_to, rows_to = counts[::2], counts[1::2]  # [source][destination]
        sent, received = tokens_to[rank], [row[rank] for row in tokens_to]
        copies = sum(sent)
        order = replace(order, token_of=order.token_of[:copies], pair_of=order.pair_of[:copies])
        return cls(group, order, sent, received, sum(row[rank] for row in rows_to), -(-sum(map(sum, rows_to)) // ranks))


class Codec(Protocol):
    """Encodes inputs into rows to send, decodes received rows into outputs, and does the same with gradients in the opposite direction.

    Autograd functions call the methods, so they run without a graph.
    """

    def encode(self, *inputs: Tensor) -> Tensor: ...
    def decode(self, rows: Tensor) -> Tensor | tuple[Tensor, ...]: ...
    def encode_grads(self, *grads: Tensor) -> Tensor: ...
    def decode_grads(self, rows: Tensor) -> tuple[Tensor | None, ...]: ...


class Dispatch:
    """Encodes states [T, 1, H], probs [T, E], routes [T, E] of this rank's tokens; decodes rows [R, H] and probs [R] of its experts.

    k: maximum number of this rank's experts per token. order: the order of the rows, set by `decode`.
    """

    order: ExpertOrder

    def __init__(self, exchange: ExchangePlan, layout: MessageLayout, k: int) -> None:
        self._exchange, self._layout, self._k = exchange, layout, k
        self._message: Tensor | None = None

    def encode(self, *inputs: Tensor) -> Tensor:
        states, probs, routes = inputs
        self._shape = states.shape
        return self._layout.pack(states.flatten(0, -2), probs, routes, self._exchange.order)

    def decode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self._message = rows
        self.order = expert_order(self._layout.split(rows)[1], self._k, 1, self._exchange.num_rows, unrouted=UNROUTED)
        return self._layout.unpack(rows, self.order)

    def encode_grads(self, *grads: Tensor) -> Tensor:
        rows_grad, probs_grad = grads
        return self._layout.pack_grads(rows_grad, probs_grad, self.order)

    def decode_grads(self, rows: Tensor) -> tuple[Tensor, Tensor, None]:
        states_grad, probs_grad = self._layout.unpack_grads(rows, self._exchange.order, self._exchange.group.size())
        return states_grad.view(self._shape), probs_grad, None

    def take_message(self) -> Callable[[], Tensor]:
        """Release the received message. Returns a function that holds it and gathers the rows again."""
        message, self._message = self._message, None
        assert message is not None, "call once, after decode()"
        return lambda: self._layout.unpack(message, self.order)[0]


class Combine:
    """Encodes outputs [R, H] of this rank's experts; decodes those of this rank's tokens, in `shape` [T, 1, H].

    row_order: the order of the rows by expert. copy_order: the order of the tokens' copies by rank.
    """

    def __init__(self, row_order: ExpertOrder, copy_order: ExpertOrder, shape: torch.Size) -> None:
        self._row_order, self._copy_order, self._shape = row_order, copy_order, shape

    def encode(self, *inputs: Tensor) -> Tensor:
        return row_sums(inputs[0], self._row_order.row_of)

    def decode(self, rows: Tensor) -> Tensor:
        return row_sums(rows, self._copy_order.row_of).view(self._shape)

    def encode_grads(self, *grads: Tensor) -> Tensor:
        return grads[0].flatten(0, -2).index_select(0, self._copy_order.token_of)

    def decode_grads(self, rows: Tensor) -> tuple[Tensor]:
        return (rows.index_select(0, self._row_order.token_of),)


class AllToAll:
    """A differentiable all-to-all that starts when constructed; `wait` returns the outputs of the codec.

    is_async: computation between construction and `wait` overlaps with the communication. In the backward pass it overlaps as well, because
    autograd runs operations in reverse order. Otherwise communication runs on the current stream, which takes the host less time.
    """

    def __init__(
        self, codec: Codec, inputs: Sequence[Tensor], sent: list[int], received: list[int], group: dist.ProcessGroup, *, is_async: bool
    ) -> None:
        # The graph refers to the transfer, not to this object, which refers to the graph. After an exception before `wait`, such a cycle
        # would keep the activations of the pass until Python's next full collection.
        self._transfer = _Transfer(codec, sent, received, group, is_async)
        self._started: Tensor | None = _Start.apply(self._transfer, *inputs)

    def wait(self) -> Any:
        """Return the codec's outputs. May be called once."""
        outputs = _Wait.apply(self._transfer, self._started)
        self._started = None
        return outputs


class _Transfer:
    """The communication of an `AllToAll`, in the forward and in the backward pass."""

    def __init__(self, codec: Codec, sent: list[int], received: list[int], group: dist.ProcessGroup, is_async: bool) -> None:
        self.codec, self._sent, self._received, self._group, self._is_async = codec, sent, received, group, is_async
        self._in_flight: tuple[Tensor, dist.Work | None] | None = None

    def start(self, rows: Tensor, *, backward: bool = False) -> None:
        """Start sending rows, or gradients in the opposite direction."""
        sent, received = (self._received, self._sent) if backward else (self._sent, self._received)
        out = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self._group, async_op=self._is_async)
        self._in_flight = out, work

    def finish(self) -> Tensor:
        """Wait for the received rows or gradients."""
        assert self._in_flight is not None, "wait() may be called once"
        (out, work), self._in_flight = self._in_flight, None
        if work is not None:
            work.wait()
        return out


class _Start(torch.autograd.Function):
    """Returns a scalar without content, which connects `_Wait` to the inputs in the graph."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *inputs: Tensor) -> Tensor:
        ctx.transfer = transfer
        transfer.start(transfer.codec.encode(*inputs))
        return inputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.transfer.codec.decode_grads(ctx.transfer.finish())


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, started: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.transfer = transfer
        return transfer.codec.decode(transfer.finish())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        # The gradient is in flight; `_Start.backward` waits for it, and does not read its own gradient.
        ctx.transfer.start(ctx.transfer.codec.encode_grads(*grads), backward=True)
        return None, grads[0].new_empty(())


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
    """Experts that process every token, and their output gate if the model has one. Recomputes the activation's output like `Mlp`."""

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
    """Upstream's MoE layer and parameters, with the token dispatch of this module.

    The shared experts overlap with the exchange of tokens: their first half runs during the dispatch, the second during the combine. If tp
    splits the shared experts, they run before the exchange, so that their collectives do not run concurrently with it. If tp splits each
    routed expert, ranks gather their tokens and sum their partial outputs.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, H] → the same shape, and no bias. padding_mask [t]: set for padding tokens."""
        states, expert_tp = hidden_states, self.experts.tp_group
        uses_exchange = self.ep_group.size() > 1
        overlapped_states = hidden_states if self.use_shared_expert and uses_exchange and self.tp_group.size() == 1 else None
        shared_out = self.shared_experts(hidden_states) if self.use_shared_expert and overlapped_states is None else None
        probs, routes = self.route(hidden_states, padding_mask)
        if expert_tp.size() > 1:
            # Each rank's part of an expert contributes to the gradients of all tokens and probs.
            states, probs = (gather_from_sequence_parallel_region(x, group=expert_tp) for x in (states, probs))
            routes = gather_from_sequence_parallel_region(routes.to(torch.uint8), group=expert_tp).bool()
        if uses_exchange:
            out, overlapped_out = self._exchange(states, probs, routes, overlapped_states)
            shared_out = shared_out if overlapped_out is None else overlapped_out
        else:
            order = expert_order(routes, self.config.moe_router_topk, 1)
            out = sum_rows(self._run(states.flatten(0, -2), gather_row_probs(probs, order), order), order).view_as(states)
        if expert_tp.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out.to(probs.dtype), group=expert_tp).to(hidden_states.dtype)
        return (out if shared_out is None else out + shared_out), None

    def _exchange(self, states: Tensor, probs: Tensor, routes: Tensor, overlapped_states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run `states` [T, 1, H] through the experts of all ranks and, meanwhile, `overlapped_states` through the shared experts.

        probs, routes [T, E]: prob of each expert, and whether the token uses it.
        """
        k, group, local_experts = self.config.moe_router_topk, self.ep_group, routes.shape[1] // self.ep_group.size()
        exchange = ExchangePlan.gather(routes, k, group)
        sent, received, is_async = exchange.sent, exchange.received, overlapped_states is not None
        layout = MessageLayout(states.shape[-1], states.dtype, local_experts, probs.dtype)
        dispatch = Dispatch(exchange, layout, min(k, local_experts))
        tokens_in_flight = AllToAll(dispatch, (states, probs, routes), sent, received, group, is_async=is_async)
        inner = None if overlapped_states is None else self.shared_experts.up(overlapped_states)
        rows, row_probs = tokens_in_flight.wait()
        order, gather = dispatch.order, dispatch.take_message()
        if exchange.num_rows <= IMBALANCE_LIMIT * exchange.even_share:
            with recompute_in_backward(rows, gather):
                out = self.experts.run(rows, order.ends, row_probs)
        else:
            del gather  # releases the message
            out = self.experts.run_in_chunks(rows, order.ends, row_probs, exchange.even_share)
        del rows
        outputs_in_flight = AllToAll(Combine(order, exchange.order, states.shape), (out,), received, sent, group, is_async=is_async)
        shared_out = None if inner is None else self.shared_experts.activate_and_down(overlapped_states, inner)
        return outputs_in_flight.wait(), shared_out

    def _run(self, tokens: Tensor, row_probs: Tensor, order: ExpertOrder) -> Tensor:
        """Outputs [R, H] of the rows of tokens [T, H]. row_probs [R]: prob of each row."""
        rows = gather_rows(tokens, order)
        with recompute_in_backward(rows, partial(tokens.detach().index_select, 0, order.token_of)):
            return self.experts.run(rows, order.ends, row_probs)
