"""The KL between policy and teacher over the teacher's candidates, as a further term of each token's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.kernels.candidates import Candidates
from mtpctl.rl.distillation import Kl, candidate_kl


class CandidateLoss:
    """Makes the term once the log-probs of the sampled tokens are there, which tell the sum over the whole vocabulary.

    `candidates`: the policy's k named tokens at each of R places, and behind them the sampled one; `teacher` [R, k]: log-probs of the
    named ones; `weight` [R]: what the KL of each place counts in the sum.
    """

    def __init__(self, kl: Kl, candidates: Candidates, teacher: Tensor, weight: Tensor) -> None:
        self._kl: Kl = kl
        self._candidates, self._teacher, self._weight = candidates, teacher, weight

    def __call__(self, logprob: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The weighed sum over these places, and the KL [r] of each. `logprob` [r] carries the part of the gradient that goes through the
        whole vocabulary; the rest is left to `Candidates.loss`.
        """
        logits = self._candidates.logits[places]
        lse = logits[:, -1] - logprob.detach()
        with torch.enable_grad():
            named = (logits[:, :-1] - lse.unsqueeze(1)).clamp(max=0).requires_grad_()
            apart = candidate_kl(self._kl, named, self._teacher[places].to(named.dtype))
            total = (self._weight[places] * apart).sum()
            (pull,) = torch.autograd.grad(total, named)
        mass = pull.sum(1)
        self._candidates.pull[places] = torch.cat([pull, -mass.unsqueeze(1)], 1)
        through = (mass * logprob).sum()
        # Its value is the KL, its gradient that of `through`.
        return through - through.detach() + total.detach(), apart.detach()
