"""What a backend is given, and what it gives back: the local problem of one rank, after rows are selected and before ranks are joined.

Shape legend: n selected rows, H hidden size, V this rank's vocabulary entries, k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from mtpctl.kernels.reduce import RowStats


@dataclass(frozen=True)
class Problem:
    """hidden [n, H]; weight [V, H]; targets [n], counted from this rank's first column (outside 0..V-1: another rank's).

    inverse_temperature: a number or [n] fp32. valid: how many columns are vocabulary, the rest is padding. workspace_bytes: bound of what
    a backend allocates beside its results.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    inverse_temperature: float | Tensor
    valid: int
    workspace_bytes: int

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which logits and statistics are kept."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def split(self, count: int) -> list[Problem]:
        """The same in at most `count` parts of nearly equally many rows; at least one part."""
        inverse = self.inverse_temperature
        hidden, targets = self.hidden.tensor_split(max(1, count)), self.targets.tensor_split(max(1, count))
        inverses: Sequence[float | Tensor] = [inverse] * len(hidden)
        if isinstance(inverse, Tensor):
            inverses = inverse.tensor_split(max(1, count))
        return [replace(self, hidden=h, targets=t, inverse_temperature=i) for h, t, i in zip(hidden, targets, inverses, strict=True)]


@dataclass
class LocalScores:
    """A backend's forward pass. `best` is the top k (logits, local ids) where asked for; `kept` is what its backward pass can use again."""

    stats: RowStats
    best: tuple[Tensor, Tensor] | None = None
    kept: object = None

    @classmethod
    def joined(cls, parts: list[LocalScores]) -> LocalScores:
        """The scores of rows that were computed apart, none of them kept."""
        stats = RowStats(*(torch.cat([getattr(part.stats, field.name) for part in parts]) for field in fields(RowStats)))
        best = [part.best for part in parts if part.best is not None]
        return cls(stats, (torch.cat([values for values, _ in best]), torch.cat([ids for _, ids in best])) if best else None)


@dataclass
class RowGrads:
    """Per row: `logprob` = dL/dlogprob, `entropy` = dL/dentropy (or None), with the whole vocabulary's `lse` and `row_entropy` (None
    without).

    The gradient of a scaled logit j of a row is  logprob (1[j = label] - p_j) - entropy p_j (log p_j + row_entropy).
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    row_entropy: Tensor | None = None


class Backend(Protocol):
    """How the local problem is computed. Both passes run without autograd."""

    name: str

    def scores(self, problem: Problem, *, entropy: bool, topk: int, keep: bool) -> LocalScores:
        """Statistics of every row; with `keep`, a backward pass will follow."""
        ...

    def grads(
        self, problem: Problem, rows: RowGrads, kept: object, *, hidden: torch.dtype | None, weight: Tensor | None, add: bool
    ) -> Tensor | None:
        """The gradient of hidden [n, H] where a dtype is asked for, in it or wider; the weight's is written to `weight` [V, H], or
        added to it.

        May overwrite `kept`, which cannot be used a second time.
        """
        ...

    def rows_that_keep(self, problem: Problem) -> int:
        """Of how many rows the workspace can hold every logit between the passes; at least 1."""
        ...
