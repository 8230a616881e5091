"""The router of a mixture of experts: its losses, the loads that it gives to the experts, and the routes that it follows.

Upstream's schedule divides its own losses of routers by tokens of a micro-batch. Here every loss is divided by tokens of the whole update,
so routers are told their number; that is why the losses are attached here and not upstream.

Where routes are replayed, tokens go to the experts that an earlier pass sent them to. Their shares are computed from this router's own
logits all the same, and its gradient passes through them (arXiv 2510.11370, section 3). Upstream has a replay too. It keeps routes in
lists of the process and finds those of a backward pass by counting, over all routers that were ever made; here a layer hands its
router the routes together with its tokens, so that recomputation and pipelines need nothing of their own, and MTP layers get none.

Shape legend: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mtpctl.kernels.router_logits import router_logits
from mtpctl.kernels.routing import ReplayedRoutes, RoutingRule, route


class Choice:
    """The experts of one pass: the router's own, or those that are replayed.

    Has the method of upstream's `RouterReplay` that `topk_routing_with_score_function` calls. `own` and `chosen` [T, k] are known then.
    recorded: whether somebody will read `chosen`.
    """

    def __init__(self, replay: ReplayedRoutes | None, *, recorded: bool = True) -> None:
        self.replay, self.recorded = replay, recorded
        self.own = self.chosen = torch.empty(0)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """scores [T, E] → those of the chosen experts, and their numbers, both [T, k]."""
        values, self.own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chosen = self.own
        if self.replay is None:
            return values, self.own
        self.chosen = torch.where(self.replay.replayed[:, None], self.replay.experts.long(), self.own)
        return scores.gather(1, self.chosen), self.chosen

    def agreement(self) -> tuple[Tensor, Tensor]:
        """How many of the replayed experts the router would have chosen too, and how many were replayed."""
        assert self.replay is not None
        same = (self.chosen[:, :, None] == self.own[:, None, :]).any(-1)
        replayed = self.replay.replayed
        return (same & replayed[:, None]).sum(), replayed.sum() * self.replay.experts.shape[1]


class Router(TopKRouter):
    """Upstream's weights and choice of experts. `begin` comes before the passes of an update, and `load` is complete after them.

    load [E]: how many tokens visited each expert. replayed [2]: how many of the replayed experts the router would have chosen too, and how
    many were replayed.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config, pg_collection, is_mtp_layer)
        # Upstream would move the bias before it is known whether the optimizer steps; `mtpctl.trainer.data_parallel` does so afterwards.
        self.frozen_expert_bias = True
        self.passes = (config.mtp_num_layers or 1) if is_mtp_layer and config.mtp_use_repeated_layer else 1
        """How many MTP depths share this router; its losses are means over them."""
        self.tokens = 1
        load = torch.zeros(self.num_experts, dtype=torch.long, device=torch.cuda.current_device())
        self.register_buffer("load", load, persistent=False)
        self.register_buffer("replayed", load.new_zeros(2), persistent=False)
        self.choice: Choice | None = None
        """What the layer that is run now follows; see `mtpctl.model.replay`."""

    @staticmethod
    def begin(routers: list[Router], tokens: int) -> None:
        """An update on so many tokens begins, those of all ranks together."""
        for router in routers:
            router.tokens = tokens
        if routers:
            torch._foreach_zero_([count for router in routers for count in (router.load, router.replayed)])

    def gating(self, input: Tensor) -> Tensor:
        """Tokens' states [T, 1, H] → logits [T, 1, E] in fp32."""
        if self.bias is not None or self.config.moe_router_dtype != "fp32":
            logits: Tensor = super().gating(input)
            return logits
        return router_logits(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, 1, E]; padding_mask [T], set where a token only fills up the row → each expert's share in a token's sum and whether
        the token visits it, both [T, E]."""
        config = self.config
        logits = logits.view(-1, self.num_experts)
        # A pass whose activations are recomputed runs twice, the first time without gradients.
        trains = self.training and torch.is_grad_enabled()
        real = None if padding_mask is None else ~padding_mask.view(-1, 1)
        if trains and config.moe_z_loss_coeff:
            logits = self._attach(logits, config.moe_z_loss_coeff * _z_loss_sum(logits, real))
        rule = self._rule(logits)
        if rule is not None:
            counts = trains and real is None and not config.moe_aux_loss_coeff
            shares, routes = route(logits, self.expert_bias, rule, self.load if counts else None, self._replay(trains))
        else:
            counts = False
            shares, routes = topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                scaling_factor=config.moe_router_topk_scaling_factor,
                score_function=self.score_function,
                expert_bias=self.expert_bias,
                router_replay=self.choice,
            )
        if trains and rule is None and self.choice is not None and self.choice.replay is not None:
            self.replayed += torch.stack(self.choice.agreement())
        if trains and not counts:
            load = (routes if real is None else routes & real).sum(0)
            self.load += load
            if config.moe_aux_loss_coeff:
                shares = self._attach(shares, config.moe_aux_loss_coeff * self._balance_loss_sum(logits, load, real))
        return shares, routes

    def _rule(self, logits: Tensor) -> RoutingRule | None:
        """What `mtpctl.kernels.routing` chooses by; None where it cannot: on a CPU, among groups of experts, where routes are recorded."""
        config = self.config
        recorded = self.choice is not None and self.choice.recorded
        if not logits.is_cuda or logits.dtype != torch.float32 or config.moe_router_group_topk or recorded:
            return None
        scaling = config.moe_router_topk_scaling_factor or 1.0
        if self.score_function == "sigmoid":
            return RoutingRule(self.topk, "sigmoid", scaling)
        if self.score_function == "softmax" and self.expert_bias is None:
            return RoutingRule(self.topk, "softmax of all" if config.moe_router_pre_softmax else "softmax of the chosen", scaling)
        return None

    def _replay(self, trains: bool) -> ReplayedRoutes | None:
        replay = None if self.choice is None else self.choice.replay
        return replace(replay, counts=self.replayed) if replay is not None and trains else replay

    def _attach(self, x: Tensor, loss: Tensor) -> Tensor:
        """x, whose backward pass starts the one of `loss`, a sum over tokens, as well."""
        return MoEAuxLossAutoScaler.apply(x, loss / (self.tokens * self.passes))

    def _balance_loss_sum(self, logits: Tensor, load: Tensor, real: Tensor | None) -> Tensor:
        """The micro-batch's E Σ f P (Switch, arXiv 2101.03961, equation 4) times its tokens: this rank's part of it.

        f is the share of all rows that an expert gets, P its mean score over all tokens. Only P has a gradient.
        """
        if self.score_function == "softmax":
            scores = logits.softmax(-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
        if real is not None:
            scores = scores * real
        if self.tp_cp_group.size() > 1:
            load = load.clone()
            dist.all_reduce(load, group=self.tp_cp_group)
        share = load / load.sum().clamp(min=1)
        return self.num_experts * (scores.sum(0) * share).sum()


def _z_loss_sum(logits: Tensor, real: Tensor | None) -> Tensor:
    """The sum over tokens of log² Σ exp(logits) (ST-MoE, arXiv 2202.08906, equation 5)."""
    values = logits.float().logsumexp(-1, keepdim=True).square()
    return (values if real is None else values * real).sum()
