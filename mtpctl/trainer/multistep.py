"""The multi-step loss `e2e_tv`, which weights the rows of all MTP depths to maximize the expected number of accepted drafts per step.

A step of speculative decoding that begins after token a drafts tokens a + 1 to a + k, one per depth. Let α_j be the probability that the
draft of depth j is accepted if it is reached: Σ min(p, q) for sampled drafts, p(argmax q) for greedy ones. The step accepts

E = Σ_i Π_{j ≤ i} α_j

drafts (Bebop, arXiv 2606.12370, equation 13, is 1 − E / k). E is linear in each α_j, so its derivative

c_j = ∂E / ∂α_j = Σ_{i ≥ j} Π_{l ≤ i, l ≠ j} α_l = P_{j−1} S_j,   P_j = Π_{l ≤ j} α_l,   S_j = 1 + α_{j+1} S_{j+1},   S_k = 1

does not depend on α_j. The gradient of −E is therefore the sum over depths of the gradients of c_j (1 − α_j), with c_j as a constant weight
of the row. A row's gradient is linear in its weight. It is computed with weight 1 in the pass that computes α_j, and multiplied by c_j in
the backward pass, when the α_j of all depths are known. Logits are computed once, and no depth needs those of another. The LM head must be
detached (`mtp.mode: isolated`), because the gradient of its weight is a sum over rows, which cannot be weighted afterwards.

If a turn ends before depth k, the chain has α_j = 0 from the first missing depth on. Its earlier terms are unchanged.

Greedy drafts: α_j = p(argmax q) is piecewise constant in q. The weights c_j use it, but a row's gradient is that of Σ p q, the expected
α_j if the draft x is sampled from q and, like a greedy draft, accepted with probability p(x). Σ p q ≤ max p, with equality only if q is
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

    weights: c_j of each depth's rows. They are zeros until `fill` writes them in place, because they depend on the losses' results.
    """

    def __init__(self, drafts: Sequence[DraftRows], tokens: int) -> None:
        self.tokens = tokens
        self.begins = [draft.tokens - depth for depth, draft in enumerate(drafts, start=1)]
        """For each depth, the chain of each row: the index of the token that it begins after, among the microbatch's response tokens."""
        self.weights = [torch.zeros(len(start), device=start.device) for start in self.begins]

    @torch.no_grad()
    def fill(self, accepted: Sequence[Tensor]) -> list[Tensor]:
        """Compute the weights. Returns for each depth the sum of 1 − P_j over its rows: the expected number of drafts not accepted.

        accepted: α_j of each depth's rows.
        """
        alphas = [values.new_zeros(self.tokens).index_copy_(0, start, values) for start, values in zip(self.begins, accepted, strict=True)]
        following = [torch.ones(self.tokens, dtype=alpha.dtype, device=alpha.device) for alpha in alphas]
        for depth in range(len(alphas) - 2, -1, -1):
            following[depth] += alphas[depth + 1] * following[depth + 1]
        losses = []
        reached: Tensor | float = 1.0
        for start, alpha, rest, weight in zip(self.begins, alphas, following, self.weights, strict=True):
            weight.copy_((reached * rest)[start])
            reached = reached * alpha
            losses.append((1 - reached[start]).sum())
        return losses


def scaled_gradient(x: Tensor, weights: Tensor | None, index: Tensor | None = None) -> Tensor:
    """Return x [n, ·], and multiply its gradient by a weight for each row.

    weights: read in the backward pass, so they may be written after this call; None: 1. index [n]: the index into `weights` of each row;
    None: row i has weight i.
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
        # The product is computed in the weights' precision without a copy of the gradient in that precision.
        return torch.mul(grads[0], weights.unsqueeze(1), out=torch.empty_like(grads[0])), None, None
