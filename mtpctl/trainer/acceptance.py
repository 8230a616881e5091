"""The acceptance rate that a drafter would have, estimated by the trainer from its own batches for sampled and for greedy drafts.

Per depth, over all tokens: the mean probability that a draft is accepted, given the tokens before it in the response. By position, as an
engine counts it (`rollout/spec_accept_rate_k`): a draft is only reached if the drafts before it were accepted, and a step begins where the
last one ended, after a rejected draft, or after all drafts and the bonus token.

With x the sampled tokens, p the trunk's and q the head's distribution: if rejection sampling emitted x, it accepted a draft with
probability w = min(1, q(x) / p(x)) for sampled drafts, and w = [x is the head's first choice] for greedy ones. From the begin of a step,
draft d of k is reached with the product of w before it, and accepted with Σ min(p, q), or with p of the first choice. A rejection at d
begins a step there. So the probability that a step begins at a token follows exactly from those of the tokens before it, in one pass over
the response.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtpctl.trainer.batch import MicroBatch
from mtpctl.trainer.objective import Sums

KINDS = {"probabilistic": "", "greedy": "_greedy"}
"""The kinds of drafts, and the suffixes of their metrics."""


@dataclass
class DepthChances:
    """Probabilities of one depth over the R response tokens, by the kind of drafts.

    measured: whether the token is measured. accepted: that a draft is accepted. kept: that a draft was accepted, given the sampled token.
    """

    measured: Tensor
    accepted: dict[str, Tensor]
    kept: dict[str, Tensor]


@dataclass
class Walk:
    """Expected steps, and expected accepted drafts by position, of one kind of drafts."""

    steps: float = 0.0
    accepted: list[float] = field(default_factory=list)

    def add(self, accepted: list[list[float]], kept: list[list[float]], length: int) -> None:
        """Add a turn of `length` tokens. accepted, kept: for each depth a probability per token; its first `depth` tokens are not read."""
        depths = len(accepted)
        self.accepted = self.accepted or [0.0] * depths
        begins = [1.0] + [0.0] * length
        for start in range(length - 1):
            reached = begins[start]
            if reached < 1e-6:
                continue
            self.steps += reached
            for depth in range(min(depths, length - 1 - start)):
                token = start + depth + 1
                self.accepted[depth] += reached * accepted[depth][token]
                through = reached * kept[depth][token]
                begins[token] += reached - through
                reached = through
            if start + depths + 1 < length:
                begins[start + depths + 1] += reached


def acceptance_sums(micro: MicroBatch, depths: list[DepthChances], tokens: int, drafts: int = 0) -> Sums:
    """The sums behind `mtp/expected_*` over the first `tokens` response tokens of the microbatch, which are whole sequences.

    drafts: draft tokens per step, of which those at a trained depth are estimated; 0: one per depth.
    """
    device = micro.labels.device
    sums: dict[str, float | Tensor] = {}
    for number, depth in enumerate(depths, start=1):
        sums[f"tokens_{number}"] = depth.measured.sum()
        for kind, suffix in KINDS.items():
            sums[f"accept{suffix}_{number}"] = depth.accepted[kind].sum()
    mask = micro.mask[:tokens].tolist()
    ends = [0]
    for length in micro.lengths:
        ends.append(ends[-1] + length)
    turns = _turns(mask, set(ends))
    drafted = depths[: drafts or None]
    for kind, suffix in KINDS.items():
        walk = Walk(accepted=[0.0] * len(drafted))
        accepted = [depth.accepted[kind][:tokens].tolist() for depth in drafted]
        accept_given_sampled = [depth.kept[kind][:tokens].tolist() for depth in drafted]
        for begin, end in turns:
            walk.add([each[begin:end] for each in accepted], [each[begin:end] for each in accept_given_sampled], end - begin)
        sums[f"steps{suffix}"] = walk.steps
        sums |= {f"rate{suffix}_{number}": value for number, value in enumerate(walk.accepted, start=1)}
    return {f"mtp/expected_{name}": torch.as_tensor(value, dtype=torch.float32, device=device) for name, value in sums.items()}


def acceptance_metrics(sums: dict[str, float], depths: int) -> dict[str, float]:
    """`mtp/expected_accept_k` of all depths, and `mtp/expected_rate_k` of the depths that draft; empty if nothing was measured."""
    metrics: dict[str, float] = {}
    for suffix in KINDS.values():
        for number in range(1, depths + 1):
            if tokens := sums[f"mtp/expected_tokens_{number}"]:
                metrics[f"mtp/expected_accept{suffix}_{number}"] = sums[f"mtp/expected_accept{suffix}_{number}"] / tokens
            rate = f"mtp/expected_rate{suffix}_{number}"
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
