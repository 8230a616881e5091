"""What the engine asks of a loss: a pure function of per-token log-probs.

Losses return sums; the denominators are global (all micro-batches, dp and cp ranks), so that cutting a batch another way
leaves its gradient the same.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mtpctl.engine.batch import MicroBatch, Sequence

Sums = dict[str, Tensor]


class Objective(Protocol):
    """A loss over response tokens."""

    needs_entropy: bool

    def denominator(self, sequences: list[Sequence]) -> float:
        """What the summed loss of all these sequences is divided by."""

    def __call__(self, logprob: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, Sums]:
        """Loss sum (scalar, differentiable) and metric sums of one micro-batch, from log-probs [R] and entropy [R]."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Named metrics from those sums, added over all micro-batches and ranks."""


class NextToken:
    """Supervised cross-entropy over the response."""

    needs_entropy = False

    def denominator(self, sequences: list[Sequence]) -> float:
        return float(max(1, sum(sum(s.loss_mask) for s in sequences)))

    def __call__(self, logprob: Tensor, entropy: Tensor | None, micro: MicroBatch) -> tuple[Tensor, Sums]:
        loss = -(logprob * micro.mask).sum()
        return loss, {"loss": loss.detach(), "tokens": micro.mask.sum()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"sft/loss": sums["loss"] / max(1.0, sums["tokens"])}
