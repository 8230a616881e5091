"""Estimates a drafter's acceptance rate from the trainer's batches, for sampled and for greedy drafts.

Rate per depth: the mean probability over all tokens that a draft is accepted, given the preceding tokens of the response.

Rate per position, as an engine counts it (`rollout/spec_accept_rate_k`): a draft is reached only if the drafts before it were accepted. A
step begins where the previous step ended: after a rejected draft, or after all drafts and the bonus token.

Let x be a sampled token, p the trunk's distribution and q the head's. Given that rejection sampling emitted x, it accepted a draft with
probability w = min(1, q(x) / p(x)) for sampled drafts, and w = [x = argmax q] for greedy ones. Within a step, draft d is reached with the
product of w over the drafts before it, and is accepted with probability Σ min(p, q) if sampled, or p(argmax q) if greedy. If it is
rejected, a step begins there. The probability that a step begins at a token therefore follows exactly from those of earlier tokens, in one
pass over the response.
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
class DepthProbabilities:
    """Probabilities of one depth over the R response tokens, by kind of draft.

    measured: whether the token counts. accepted: probability that a draft is accepted. kept: probability that a draft was accepted, given
    the sampled token (w in the module docstring).
    """

    measured: Tensor
    accepted: dict[str, Tensor]
    kept: dict[str, Tensor]


@dataclass
class Walk:
    """Expected steps, and expected accepted drafts by position, for one kind of draft."""

    steps: float = 0.0
    accepted: list[float] = field(default_factory=list)

    def add(self, accepted: list[list[float]], kept: list[list[float]], length: int) -> None:
        """Add a turn of `length` tokens. accepted, kept: a probability per depth and token; depth d does not read its first d tokens."""
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


def acceptance_sums(micro: MicroBatch, depths: list[DepthProbabilities], tokens: int, drafts: int = 0) -> Sums:
    """The sums behind `mtp/expected_*` over the first `tokens` response tokens of the microbatch, which must be whole sequences.

    drafts: draft tokens per step, estimated up to the number of depths; 0: one per depth.
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
    """`mtp/expected_accept_k` for all depths, and `mtp/expected_rate_k` for the depths that draft; empty if no token was measured."""
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
