"""MoE routers: router losses, expert loads, and routing replay.

Upstream divides router losses by the tokens of a microbatch. Here every loss is divided by the tokens of the whole update. Routers
therefore get that number, and attach the losses themselves.

With replay, tokens go to the experts that an earlier pass selected. Their probs are still computed from this router's own logits, so the
router gets a gradient (arXiv 2510.11370, section 3). Upstream's replay keeps all routers of the process in one list, assigns routes by
the position in this list, and queues them for recomputation in the backward pass. Here a layer passes its routes to its router in each
pass, so recomputation and pipelines need no special handling. MTP layers do not replay routes.

Shape legend: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mtpctl.kernels import exact_grad
from mtpctl.kernels.exact_experts import top_experts
from mtpctl.kernels.routing import ReplayedRoutes, RoutingRule, route, router_logits
from mtpctl.model.layers import is_bitwise
from mtpctl.model.packing import Packing


class ExpertChoice:
    """The experts of one pass, [T, k]: the pass sets `router_experts`, the router's selection, and `used_experts`, which may be replayed.

    Implements the method of upstream's `RouterReplay` that `topk_routing_with_score_function` calls. recorded: whether the caller reads
    `used_experts` after the pass. softmax_bias [E]: added to the softmax of the scores to select experts, which upstream does not support.
    """

    def __init__(self, replay: ReplayedRoutes | None, *, recorded: bool = True) -> None:
        self.replay, self.recorded = replay, recorded
        self.softmax_bias: Tensor | None = None
        self.router_experts = self.used_experts = torch.empty(0)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """scores [T, E] → scores and indices of the chosen experts, both [T, k]."""
        ranked = scores if self.softmax_bias is None else scores.softmax(-1, dtype=torch.float32) + self.softmax_bias
        values, self.router_experts = default_compute_topk(ranked, topk, num_groups=num_groups, group_topk=group_topk)
        if self.softmax_bias is not None:
            values = scores.gather(1, self.router_experts)
        self.used_experts = self.router_experts
        if self.replay is None:
            return values, self.router_experts
        self.used_experts = torch.where(self.replay.replayed[:, None], self.replay.experts.long(), self.router_experts)
        return scores.gather(1, self.used_experts), self.used_experts

    def count_agreement(self) -> tuple[Tensor, Tensor]:
        """Number of replayed experts that the router would also have chosen, and of all replayed experts."""
        assert self.replay is not None
        same = (self.used_experts[:, :, None] == self.router_experts[:, None, :]).any(-1)
        replayed = self.replay.replayed
        return (same & replayed[:, None]).sum(), replayed.sum() * self.replay.experts.shape[1]


class Router(TopKRouter):
    """Router with upstream's weights and expert selection. Call `begin` before the passes of an update; `load` is complete after them.

    load [E]: tokens of each expert. replay_counts [2]: number of replayed experts that the router would also have chosen, and of all
    replayed experts.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config, pg_collection, is_mtp_layer)
        # Upstream would update the bias before it is known whether the optimizer steps; `mtpctl.trainer.data_parallel` updates it later.
        self.frozen_expert_bias = True
        self.passes = (config.mtp_num_layers or 1) if is_mtp_layer and config.mtp_use_repeated_layer else 1
        """Number of MTP depths that share this router. Its losses are averaged over them."""
        self.tokens = 1
        load = torch.zeros(self.num_experts, dtype=torch.long, device=torch.cuda.current_device())
        self.register_buffer("load", load, persistent=False)
        self.register_buffer("replay_counts", load.new_zeros(2), persistent=False)
        self.choice: ExpertChoice | None = None
        """Routes to replay or record in the current pass (see `DecoderLayer`)."""

    @staticmethod
    def begin(routers: list[Router], tokens: int) -> None:
        """Begin an update. tokens: its number of tokens on all ranks together."""
        for router in routers:
            router.tokens = tokens
        if routers:
            torch._foreach_zero_([count for router in routers for count in (router.load, router.replay_counts)])

    def gating(self, input: Tensor) -> Tensor:
        """Hidden states [T, 1, H] → logits [T, 1, E] in fp32."""
        if is_bitwise(self.config):
            return exact_grad.router_logits(input, self.weight)
        if self.bias is not None or self.config.moe_router_dtype != "fp32":
            return super().gating(input)
        return router_logits(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, 1, E] → probs and routes (bool), both [T, E]. padding_mask [T]: set for padding tokens."""
        config = self.config
        logits = logits.view(-1, self.num_experts)
        # With activation recomputation a pass runs twice, the first time without gradients.
        is_training = self.training and torch.is_grad_enabled()
        is_real = None if padding_mask is None else ~padding_mask.view(-1, 1)
        if is_training and config.moe_z_loss_coeff:
            logits = self._attach_loss(logits, config.moe_z_loss_coeff * _z_loss_sum(logits, is_real))
        rule = self._kernel_rule(logits)
        if rule is not None:
            counts_in_kernel = is_training and is_real is None and not config.moe_aux_loss_coeff
            probs, routes = route(
                logits, self.expert_bias, rule, self.load if counts_in_kernel else None, self._routes_to_replay(is_training)
            )
        elif is_bitwise(config):
            counts_in_kernel = False
            selection = self.choice or ExpertChoice(None, recorded=False)
            _values, experts = selection.get_replay_topk(logits, self.topk, None, None, _top_experts)
            probs, routes = exact_grad.route(logits, experts, over_all=config.moe_router_pre_softmax)
        else:
            counts_in_kernel = False
            choice = self.choice
            if self.score_function == "softmax" and self.expert_bias is not None:
                choice = choice or ExpertChoice(None, recorded=False)
                choice.softmax_bias = self.expert_bias
            probs, routes = topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                scaling_factor=config.moe_router_topk_scaling_factor,
                score_function=self.score_function,
                expert_bias=self.expert_bias,
                router_replay=choice,
            )
        if is_training and rule is None and self.choice is not None and self.choice.replay is not None:
            self.replay_counts += torch.stack(self.choice.count_agreement())
        if is_training and not counts_in_kernel:
            load = (routes if is_real is None else routes & is_real).sum(0)
            self.load += load
            if config.moe_aux_loss_coeff:
                probs = self._attach_loss(probs, config.moe_aux_loss_coeff * self._balance_loss_sum(logits, load, is_real))
        return probs, routes

    def _kernel_rule(self, logits: Tensor) -> RoutingRule | None:
        """The rule for the kernel of `mtpctl.kernels.routing`.

        None if the kernel does not support the router: on a CPU, with logits other than fp32, expert groups, a bias on softmax scores or
        `numerics: bitwise`, or if it records routes.
        """
        config = self.config
        recorded = self.choice is not None and self.choice.recorded
        if not logits.is_cuda or logits.dtype != torch.float32 or config.moe_router_group_topk or recorded or is_bitwise(config):
            return None
        scaling = config.moe_router_topk_scaling_factor or 1.0
        if self.score_function == "sigmoid":
            return RoutingRule(self.topk, "sigmoid", scaling)
        if self.score_function == "softmax" and self.expert_bias is None:
            return RoutingRule(self.topk, "softmax of all" if config.moe_router_pre_softmax else "softmax of the chosen", scaling)
        return None

    def _routes_to_replay(self, is_training: bool) -> ReplayedRoutes | None:
        replay = None if self.choice is None else self.choice.replay
        return replace(replay, counts=self.replay_counts) if replay is not None and is_training else replay

    def _attach_loss(self, x: Tensor, loss: Tensor) -> Tensor:
        """Return x such that its backward pass also backpropagates `loss`, a sum over tokens."""
        return MoEAuxLossAutoScaler.apply(x, loss / (self.tokens * self.passes))

    def _balance_loss_sum(self, logits: Tensor, load: Tensor, is_real: Tensor | None) -> Tensor:
        """The balance loss E Σ f P of the microbatch (Switch, arXiv 2101.03961, equation 4), times this rank's number of tokens.

        f is the fraction of all (token, expert) pairs that are routed to an expert, P the expert's mean score over the rank's tokens. P
        times the number of tokens is the sum of the scores. Only P has a gradient.
        """
        if self.score_function == "softmax":
            scores = logits.softmax(-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        if is_real is not None:
            scores = scores * is_real
        if self.tp_cp_group.size() > 1:
            load = load.clone()
            dist.all_reduce(load, group=self.tp_cp_group)
        fraction = load / load.sum().clamp(min=1)
        return self.num_experts * (scores.sum(0) * fraction).sum()


def _top_experts(logits: Tensor, k: int, **_: object) -> tuple[Tensor, Tensor]:
    """The k largest logits [T, E] of each token, and their experts, with `exact_experts.top_experts`."""
    experts = top_experts(logits, k)
    return logits.gather(1, experts), experts


def _z_loss_sum(logits: Tensor, is_real: Tensor | None) -> Tensor:
    """Sum over tokens of log² Σ exp(logits) (ST-MoE, arXiv 2202.08906, equation 5)."""
    values = logits.float().logsumexp(-1, keepdim=True).square()
    return (values if is_real is None else values * is_real).sum()


class DecoderLayer(TransformerLayer):
    """A decoder layer that can replay or record routes. moe_index: its index among the MoE layers; None for a dense layer.

    The packing is an argument of the layer, so recomputation uses the same routes as the forward pass. MTP layers are upstream's
    `TransformerLayer`, whose routers get no routes.
    """

    moe_index: int | None = None

    def forward(self, *args: object, packed_seq_params: Packing, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        run = super().forward
        recorded = packed_seq_params.recorded
        if self.moe_index is None or (packed_seq_params.routes is None and recorded is None):
            return run(*args, packed_seq_params=packed_seq_params, **kwargs)
        router: Router = self.mlp.router
        router.choice = choice = ExpertChoice(self._routes_to_replay(packed_seq_params, self.moe_index), recorded=recorded is not None)
        try:
            result: tuple[Tensor, Tensor | None] = run(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            router.choice = None
        if recorded is not None:
            recorded[self.moe_index] = choice.used_experts.to(torch.int16)
        return result

    def _routes_to_replay(self, packing: Packing, moe_index: int) -> ReplayedRoutes | None:
        """The routes of this layer's tokens."""
        if packing.routes is None or packing.routed is None:
            return None
        experts, replayed = packing.routes[:, moe_index], packing.routed
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            experts, replayed = (x.chunk(tp.size())[tp.rank()] for x in (experts, replayed))
        return ReplayedRoutes(experts, replayed)


def number_moe_layers(model: torch.nn.Module, layers: tuple[int, ...]) -> None:
    """Assign each MoE layer its index in `layers`, the 0-based numbers of the MoE layers."""
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            number = module.layer_number - 1
            module.moe_index = layers.index(number) if number in layers else None


def use_softmax_scores(model: torch.nn.Module) -> None:
    """Set the score function of all routers to softmax after the build: upstream's config rejects softmax with a bias."""
    for module in model.modules():
        if isinstance(module, Router):
            module.score_function = "softmax"


def gather_recorded(packing: Packing, layer: DecoderLayer) -> Tensor:
    """Gather the experts [T, k] of the packed sequence's tokens in `layer` from the ranks that split them.

    These are CP ranks, and TP ranks with sequence parallelism. Collective; call after the pass.
    """
    assert packing.recorded is not None and layer.moe_index is not None
    experts = packing.recorded[layer.moe_index].int()  # gloo does not support int16
    if layer.config.sequence_parallel:
        experts = gather_from_sequence_parallel_region(experts, group=layer.pg_collection.tp)
    if layer.config.context_parallel_size > 1:
        experts = gather_from_sequence_parallel_region(experts, group=layer.pg_collection.cp)[packing.token_order]
    return experts
