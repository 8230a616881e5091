"""Acceptance of drafts in the trainer's batches, for sampled and for greedy drafts: estimated rates, and weights of the loss `e2e_tv`.

Rate per depth: the probability that a draft is accepted, given the preceding tokens of the response, averaged over all drafted tokens.

Rate per position, as a rollout engine counts it (`rollout/spec_accept_rate_k`): the fraction of steps that accept draft k. A draft is
reached only if the drafts before it were accepted. A step begins where the previous step ended: after a rejected draft, or after all
drafts and the bonus token.

Let x be a sampled token, p the trunk's distribution and q the head's. Rejection sampling emits x either as an accepted draft or after a
rejection. Given x, the draft was accepted with probability w = min(1, q(x) / p(x)) if drafts are sampled, and w = [x = argmax q] if they
are greedy. Within a step, the probability of reaching draft d is the product of w over the drafts before it. It is then accepted with
probability Σ min(p, q) if sampled, or p(argmax q) if greedy. If it is rejected, the next step begins after this token. One pass over the
response therefore computes the probability that a step begins after each token.

The multi-step loss `e2e_tv` weights the rows of all MTP depths to maximize the expected number of accepted drafts per step.

A step of speculative decoding that begins after token a drafts tokens a + 1 to a + k, one per depth. Let α_j be the probability that the
draft of depth j is accepted if it is reached: Σ min(p, q) for sampled drafts, p(argmax q) for greedy ones. The expected number of accepted
drafts of the step is

E = Σ_i Π_{j ≤ i} α_j

(the loss of Bebop, arXiv 2606.12370, equation 13, is 1 − E / k). E is linear in each α_j, so its derivative

c_j = ∂E / ∂α_j = Σ_{i ≥ j} Π_{l ≤ i, l ≠ j} α_l = P_{j−1} S_j,   P_j = Π_{l ≤ j} α_l,   S_j = 1 + α_{j+1} S_{j+1},   S_k = 1

does not depend on α_j. The gradient of −E is therefore the sum over depths of the gradients of c_j (1 − α_j), with c_j as a constant weight
of the row. A row's gradient is linear in its weight. It is computed with weight 1 in the pass that computes α_j, and multiplied by c_j in
the backward pass, when the α_j of all depths are known. Logits are computed once, and no depth needs those of another. The LM head must be
detached (`mtp.mode: isolated`), because the gradient of its weight is a sum over rows, which cannot be weighted afterwards.

If a turn ends before depth k, the chain has α_j = 0 from the first missing depth on. Its earlier terms are unchanged.

Greedy drafts: α_j = p(argmax q) is piecewise constant in q, so it has no useful gradient. The weights c_j use it, but a row's gradient is
that of Σ p q: the expected α_j if the draft x were sampled from q and accepted with probability p(x). Both have the same maximum, because
Σ p q ≤ max p, with equality only if q is concentrated on the most likely entries of p. As q becomes concentrated, Σ p q approaches
p(argmax q).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtpctl.trainer.batch import DraftRows, MicroBatch
from mtpctl.trainer.objective import Sums

DRAFT_KINDS = {"probabilistic": "", "greedy": "_greedy"}
"""The kinds of drafts, and the suffixes of their metrics."""


@dataclass
class DepthProbabilities:
    """Probabilities of one depth over the R response tokens, by kind of draft.

    measured: whether the token is included. accepted: probability that a draft is accepted. accept_given_token: probability that a draft
    was accepted, given the sampled token (w in the module docstring).
    """

    measured: Tensor
    accepted: dict[str, Tensor]
    accept_given_token: dict[str, Tensor]


@dataclass
class StepEstimate:
    """Expected steps, and expected accepted drafts by position, for one kind of draft."""

    steps: float = 0.0
    accepted: list[float] = field(default_factory=list)

    def add(self, accept_probs: list[list[float]], accept_given_token: list[list[float]], length: int) -> None:
        """Add a turn of `length` tokens.

        accept_probs, accept_given_token: a probability per depth and token. Those of depth d (from 1) at the turn's first d tokens are not
        read, because no step drafts these tokens at that depth.
        """
        depths = len(accept_probs)
        self.accepted = self.accepted or [0.0] * depths
        start_probs = [1.0] + [0.0] * length
        for start in range(length - 1):
            reach_prob = start_probs[start]
            if reach_prob < 1e-6:
                continue
            self.steps += reach_prob
            for depth in range(min(depths, length - 1 - start)):
                token = start + depth + 1
                self.accepted[depth] += reach_prob * accept_probs[depth][token]
                accepted_prob = reach_prob * accept_given_token[depth][token]
                start_probs[token] += reach_prob - accepted_prob
                reach_prob = accepted_prob
            if start + depths + 1 < length:
                start_probs[start + depths + 1] += reach_prob


def acceptance_sums(micro: MicroBatch, depths: list[DepthProbabilities], tokens: int, drafts: int = 0) -> Sums:
    """The sums behind `mtp/expected_*` over the first `tokens` response tokens of the microbatch, which must be whole sequences.

    drafts: draft tokens per step of the engine; positions beyond the trained depths are not estimated. 0: one per depth.
    """
    device = micro.labels.device
    sums: dict[str, float | Tensor] = {}
    for depth_number, depth in enumerate(depths, start=1):
        sums[f"tokens_{depth_number}"] = depth.measured.sum()
        for kind, suffix in DRAFT_KINDS.items():
            sums[f"accept{suffix}_{depth_number}"] = depth.accepted[kind].sum()
    mask = micro.mask[:tokens].tolist()
    ends = [0]
    for length in micro.response_lengths:
        ends.append(ends[-1] + length)
    turns = _turns(mask, set(ends))
    draft_depths = depths[: drafts or None]
    for kind, suffix in DRAFT_KINDS.items():
        estimate = StepEstimate(accepted=[0.0] * len(draft_depths))
        accept_probs = [depth.accepted[kind][:tokens].tolist() for depth in draft_depths]
        accept_given_token = [depth.accept_given_token[kind][:tokens].tolist() for depth in draft_depths]
        for begin, end in turns:
            estimate.add(
                [depth_probs[begin:end] for depth_probs in accept_probs],
                [depth_probs[begin:end] for depth_probs in accept_given_token],
                end - begin,
            )
        sums[f"steps{suffix}"] = estimate.steps
        sums |= {f"rate{suffix}_{depth_number}": value for depth_number, value in enumerate(estimate.accepted, start=1)}
    return {f"mtp/expected_{name}": torch.as_tensor(value, dtype=torch.float32, device=device) for name, value in sums.items()}


def acceptance_metrics(sums: dict[str, float], depths: int) -> dict[str, float]:
    """`mtp/expected_accept_k` for all depths, and `mtp/expected_rate_k` for the depths that draft; empty if no token was measured."""
    metrics: dict[str, float] = {}
    for suffix in DRAFT_KINDS.values():
        for depth in range(1, depths + 1):
            if tokens := sums[f"mtp/expected_tokens_{depth}"]:
                metrics[f"mtp/expected_accept{suffix}_{depth}"] = sums[f"mtp/expected_accept{suffix}_{depth}"] / tokens
            rate = f"mtp/expected_rate{suffix}_{depth}"
            if rate in sums and (steps := sums[f"mtp/expected_steps{suffix}"]):
                metrics[rate] = sums[rate] / steps
    return metrics


def _turns(mask: list[float], ends: set[int]) -> list[tuple[int, int]]:
    """Runs of sampled tokens, split where a response ends."""
    turns: list[tuple[int, int]] = []
    begin: int | None = None
    for index in range(len(mask) + 1):
        sampled = index < len(mask) and mask[index] > 0
        if begin is not None and (not sampled or index in ends):
            turns.append((begin, index))
            begin = None
        if begin is None and sampled:
            begin = index
    return turns


class Chains:
    """The chains of drafts of a microbatch, one for each token after which a step can begin.

    weights: c_j of each depth's rows. They are zeros until `compute_weights` writes them in place, because they depend on the results of
    the losses.
    """

    def __init__(self, drafts: Sequence[DraftRows], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.start_tokens = [draft.response_indices - depth for depth, draft in enumerate(drafts, start=1)]
        """For each depth and row: the token after which the row's chain begins, as an index among the microbatch's response tokens."""
        self.weights = [torch.zeros(len(starts), device=starts.device) for starts in self.start_tokens]

    @torch.no_grad()
    def compute_weights(self, accepted: Sequence[Tensor]) -> list[Tensor]:
        """Compute the weights. Returns for each depth the sum of 1 − P_j over its rows: the expected number of drafts not accepted.

        accepted: α_j of each depth's rows.
        """
        alphas = [
            values.new_zeros(self.num_tokens).index_copy_(0, starts, values)
            for starts, values in zip(self.start_tokens, accepted, strict=True)
        ]
        later_factors = [torch.ones(self.num_tokens, dtype=alpha.dtype, device=alpha.device) for alpha in alphas]
        for depth in range(len(alphas) - 2, -1, -1):
            later_factors[depth] += alphas[depth + 1] * later_factors[depth + 1]
        losses = []
        reach_prob: Tensor | float = 1.0
        for starts, alpha, later_acceptance, weight in zip(self.start_tokens, alphas, later_factors, self.weights, strict=True):
            weight.copy_((reach_prob * later_acceptance)[starts])
            reach_prob = reach_prob * alpha
            losses.append((1 - reach_prob[starts]).sum())
        return losses
