"""The multi-step loss `e2e_tv`: weights of the rows of all MTP depths, so that their gradients maximize the expected accepted length.

A step of speculative decoding that begins after token a drafts tokens a + 1 to a + k, one per depth. Let α_j be the probability that the
draft of depth j is accepted if it is reached: Σ min(p, q) for sampled drafts, p(argmax q) for greedy ones. The step accepts

E = Σ_i Π_{j ≤ i} α_j

drafts (Bebop, arXiv 2606.12370, equation 13, is 1 − E / k). E is linear in each α_j, so its derivative has the factor

c_j = ∂E / ∂α_j = Σ_{i ≥ j} Π_{l ≤ i, l ≠ j} α_l = P_{j−1} S_j,   P_j = Π_{l ≤ j} α_l,   S_j = 1 + α_{j+1} S_{j+1},   S_k = 1

which does not depend on α_j. The gradient of −E is therefore that of each depth's 1 − α_j, with row weight c_j. Since a row's gradient is
linear in its weight, it is computed with weight 1 in the pass that computes α_j, and multiplied in the backward pass, when all depths are
known. No logit is computed twice, and no logits of another depth are needed. The LM head must therefore be detached (`mtp.mode: isolated`):
the gradient of its weight is a sum over rows.

A chain that ends early, because its turn ends, has α_j = 0 from the first missing depth on. Its terms up to there are unchanged.

Greedy drafts: α_j = p(argmax q) is piecewise constant in q. The weights use it, and the row's gradient is that of Σ p q, the expected α_j
if the draft is sampled from q but verified like a greedy one, with probability p of the draft. Σ p q ≤ max p, with equality only if q is
concentrated on the most likely entries of p, so both have the same maximum. As q becomes concentrated, Σ p q approaches p(argmax q).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtpctl.trainer.batch import DraftRows


class Chains:
    """The chains of drafts of a microbatch, one for each token that a step can begin after.

    weights: c_j of each depth's rows, zeros until `fill`. They are written in place, because the losses are computed before them.
    """

    def __init__(self, drafts: Sequence[DraftRows], tokens: int) -> None:
        self.tokens = tokens
        self.begins = [draft.tokens - depth for depth, draft in enumerate(drafts, start=1)]
        """For each row of each depth, the index among the microbatch's response tokens of the token that its chain begins after."""
        self.weights = [torch.zeros(len(begin), device=begin.device) for begin in self.begins]

    @torch.no_grad()
    def fill(self, accepted: Sequence[Tensor]) -> list[Tensor]:
        """Compute the weights from each row's α. Returns, by depth, the sum of 1 − P_j: the drafts that are not accepted.

        accepted: for each depth, the acceptance probabilities of its rows.
        """
        alphas = [values.new_zeros(self.tokens).index_copy_(0, begin, values) for begin, values in zip(self.begins, accepted, strict=True)]
        following = [torch.ones(self.tokens, dtype=alpha.dtype, device=alpha.device) for alpha in alphas]
        for depth in range(len(alphas) - 2, -1, -1):
            following[depth] += alphas[depth + 1] * following[depth + 1]
        losses = []
        reached: Tensor | float = 1.0
        for begin, alpha, rest, weight in zip(self.begins, alphas, following, self.weights, strict=True):
            weight.copy_((reached * rest)[begin])
            reached = reached * alpha
            losses.append((1 - reached[begin]).sum())
        return losses


def scaled_gradient(x: Tensor, weights: Tensor | None, index: Tensor | None = None) -> Tensor:
    """Return x [n, ·], whose gradient is multiplied by a weight for each row, read in the backward pass. weights: None: 1.

    index [n]: the weight of each row; None: in order.
    """
    return x if weights is None else _ScaledGradient.apply(x, weights, index)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, index: Tensor | None) -> Tensor:
        ctx.weights, ctx.index = weights, index  # not saved tensors, because the weights are written after the forward pass
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weights = ctx.weights if ctx.index is None else ctx.weights[ctx.index]
        # Multiplied in the weights' precision, without a copy of the gradient in it.
        return torch.mul(grads[0], weights.unsqueeze(1), out=torch.empty_like(grads[0])), None, None
