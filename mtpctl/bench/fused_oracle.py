"""Exact log-probs, entropies and sampled gradients in float64, on the device at hand, a slice of rows at a time.

Whole exact gradients would take as long as the benchmark; the hidden gradient of some rows and the weight gradient of some vocabulary
entries (half of them drawn among the labels, where it is largest) show the same error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 512
SAMPLED = 128


def distance(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖; NaN where `got` holds one."""
    return ((got.double() - exact).norm() / exact.norm()).item()


@dataclass(frozen=True)
class Exact:
    """hidden [N, H], weight [V, H] and labels [N] at temperature 1; in float64 their logprob, entropy and log-sum-exp (lse) [N]; and the
    sampled rows and vocabulary entries."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    lse: Tensor
    logprob: Tensor
    entropy: Tensor
    rows: Tensor
    entries: Tensor

    def grads(self, by_logprob: Tensor, by_entropy: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gradient of hidden at `rows`, and of weight at `entries`, for upstream gradients [N]."""
        wide = self.weight.double()
        at_entries = torch.zeros(len(self.entries), self.hidden.shape[1], dtype=torch.float64, device=self.hidden.device)
        for start in range(0, len(self.hidden), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            h = self.hidden[part].double()
            logit_grad = self._logit_grad(h @ wide[self.entries].T, part, by_logprob, by_entropy, self.entries)
            at_entries += logit_grad.T @ h
        z = self.hidden[self.rows].double() @ wide.T
        every = torch.arange(len(wide), device=wide.device)
        return self._logit_grad(z, self.rows, by_logprob, by_entropy, every) @ wide, at_entries

    def _logit_grad(self, z: Tensor, rows: slice | Tensor, by_logprob: Tensor, by_entropy: Tensor | None, entries: Tensor) -> Tensor:
        logp = z - self.lse[rows].unsqueeze(1)
        p = logp.exp()
        hot = self.labels[rows].unsqueeze(1) == entries
        grad = by_logprob[rows].double().unsqueeze(1) * (hot.double() - p)
        if by_entropy is not None:
            grad -= by_entropy[rows].double().unsqueeze(1) * p * (logp + self.entropy[rows].unsqueeze(1))
        return grad


@torch.no_grad()
def exact(hidden: Tensor, weight: Tensor, labels: Tensor) -> Exact:
    """Compute everything but the gradients, and choose the rows and entries for those."""
    wide, rows, parts = weight.double(), len(hidden), []
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        z = hidden[part].double() @ wide.T
        lse = z.logsumexp(1)
        logp = z.sub_(lse.unsqueeze(1))
        picked = logp.gather(1, labels[part].unsqueeze(1)).squeeze(1)
        parts.append((lse, picked, -(logp.exp() * logp).sum(1)))
    lse, logprob, entropy = (torch.cat(x) for x in zip(*parts, strict=True))
    sampled = torch.arange(0, rows, max(1, rows // SAMPLED), device=hidden.device)[:SAMPLED]
    evenly = torch.arange(0, len(weight), max(1, len(weight) // SAMPLED), device=hidden.device)[:SAMPLED]
    return Exact(hidden, weight, labels, lse, logprob, entropy, sampled, torch.cat([evenly, labels[sampled]]).unique())
