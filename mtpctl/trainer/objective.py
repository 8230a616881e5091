"""What the engine asks of a loss: a pure function of per-token log-probs, of as many tokens at a time as it is given.

Losses return sums; the denominators are global (all micro-batches, dp and cp ranks), so that cutting a batch another way
leaves its gradient the same.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mtpctl.kernels.candidates import CandidateTerm
from mtpctl.kernels.policy import TokenLoss
from mtpctl.trainer.batch import MicroBatch

Sums = dict[str, Tensor]


class Objective(Protocol):
    """A loss over response tokens.

    couples_tokens: a token's term looks at other tokens' log-probs. Then the log-probs of a micro-batch are all made before its loss,
    and a fourth matrix product of the head is paid in the backward pass.
    """

    needs_entropy: bool
    couples_tokens: bool

    def denominator(self, *, tokens: int, sequences: int) -> float:
        """What the summed loss of so many sequences is divided by, which have so many trained tokens."""

    def candidates(self, micro: MicroBatch) -> CandidateTerm | None:
        """A further term of the loss, of the log-probs of named tokens at each of the R response tokens; None: no such term."""

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        """Loss sum (scalar, differentiable) and metric sums of any of the micro-batch's R response tokens, as a function of their
        log-probs [r], entropies [r] (None where not needed) and places among the R. Where tokens are coupled it is given all of them.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Named metrics from those sums, added over all micro-batches and ranks."""


class NextToken:
    """Supervised cross-entropy over the response."""

    needs_entropy = False
    couples_tokens = False

    def denominator(self, *, tokens: int, sequences: int) -> float:
        return float(max(1, tokens))

    def candidates(self, micro: MicroBatch) -> CandidateTerm | None:
        return None

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        def loss(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
            mask = micro.mask[tokens]
            value = -(logprob * mask).sum()
            return value, {"loss": value.detach(), "tokens": mask.sum()}

        return loss

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"sft/loss": sums["loss"] / max(1.0, sums["tokens"])}
