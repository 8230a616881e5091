"""How often a drafter would be accepted, told by the trainer from its own batches: drafts sampled from the head, and its first choices.

Per depth, over all tokens, the mean chance that a draft is accepted where the tokens before it are those of the response. And by position
as an engine counts it (`rollout/spec_accept_rate_k`), which differs twice. A draft is reached only where those before it were accepted.
And a step begins where the last one ended: behind a draft that was turned down, or behind all of them and the one that follows.

With x the sampled tokens, p the trunk's and q the head's distribution: rejection sampling that emits x has kept a draft with probability
w = min(1, q(x) / p(x)) for sampled drafts, and w = [x is the head's first choice] for the others. From a step's begin, draft d of k is
reached with the product of w before it, and accepted with Σ min(p, q), or with p at the first choice. Being turned down at d begins a step
there. So the chances that a step begins at a token follow from those of the tokens before it, exactly, in one walk over the response.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtpctl.trainer.batch import MicroBatch
from mtpctl.trainer.objective import Sums

KINDS = {"probabilistic": "", "greedy": "_greedy"}
"""The kinds of drafts, and what is appended to the names of their metrics."""


@dataclass
class DepthChances:
    """Of one depth, over the R response tokens: whether a draft is measured there, and by the kind of drafts the chance that one is
    accepted, and the chance that one was kept where the sampled token was emitted."""

    there: Tensor
    accepted: dict[str, Tensor]
    kept: dict[str, Tensor]


@dataclass
class Walk:
    """Of one kind of drafts: steps, and accepted drafts by position, in the mean over what an engine may draw."""

    steps: float = 0.0
    accepted: list[float] = field(default_factory=list)

    def add(self, accepted: list[list[float]], kept: list[list[float]], length: int) -> None:
        """A turn of `length` tokens. accepted, kept: for each depth, one chance a token; those of its first `depth` tokens are not read."""
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
    """The sums behind `mtp/expected_*`, over the first `tokens` response tokens of the micro-batch, which are those of whole sequences.

    drafts: draft tokens a step, of which those at a trained depth are told; 0: one for each depth.
    """
    device = micro.labels.device
    sums: dict[str, float | Tensor] = {}
    for number, depth in enumerate(depths, start=1):
        sums[f"tokens_{number}"] = depth.there.sum()
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
        kept = [depth.kept[kind][:tokens].tolist() for depth in drafted]
        for begin, end in turns:
            walk.add([each[begin:end] for each in accepted], [each[begin:end] for each in kept], end - begin)
        sums[f"steps{suffix}"] = walk.steps
        sums |= {f"rate{suffix}_{number}": value for number, value in enumerate(walk.accepted, start=1)}
    return {f"mtp/expected_{name}": torch.as_tensor(value, dtype=torch.float32, device=device) for name, value in sums.items()}


def acceptance_metrics(sums: dict[str, float], depths: int) -> dict[str, float]:
    """`mtp/expected_accept_k` of all depths, and `mtp/expected_rate_k` of those that draft, of both kinds of drafts; empty where nothing
    was measured."""
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
    """Runs of sampled tokens, cut where a response ends."""
    turns: list[tuple[int, int]] = []
    begin: int | None = None
    for place in range(len(mask) + 1):
        sampled = place < len(mask) and mask[place] > 0
        if begin is not None and (not sampled or place in ends):
            turns.append((begin, place))
            begin = None
        if begin is None and sampled:
            begin = place
    return turns
