"""Backend protocol of the LM-head kernels: one rank's part of the computation, before results are combined across ranks.

Shape legend: n selected rows, H hidden size, V vocabulary entries of this rank, k candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from mtpctl.kernels.shards import RowStats, Shard
from mtpctl.recipe.model import MtpLoss

DraftLoss = Literal[MtpLoss, "e2e_greedy"]
"""Losses of a draft: those of the recipe, and `e2e_greedy`, the form of `e2e_tv` for greedy drafts."""
SOFT_SHARE = 0.1
"""Weight of soft_ce in e2e_tv and e2e_greedy. Without it, they have almost no gradient if draft and target share no mass."""


@dataclass(frozen=True)
class Problem:
    """One rank's inputs: hidden [n, H], weight [V, H], targets [n].

    targets: label indices relative to this rank's first column; outside 0..V-1 if the label belongs to another rank.
    inverse_temperature: a number or [n] fp32. valid: number of columns that are vocabulary entries; the rest is padding.
    workspace_bytes: bound on what a backend allocates in addition to its results. shard: this rank's part of the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    inverse_temperature: float | Tensor
    valid: int
    workspace_bytes: int
    shard: Shard

    @property
    def wide(self) -> torch.dtype:
        """The dtype of logits and statistics."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def part(self, rows: slice) -> Problem:
        """The same problem for a slice of the rows."""
        inverse = self.inverse_temperature
        return replace(
            self,
            hidden=self.hidden[rows],
            targets=self.targets[rows],
            inverse_temperature=inverse[rows] if isinstance(inverse, Tensor) else inverse,
        )

    def split(self, count: int) -> list[Problem]:
        """Split the rows into `count` (at least one) nearly equal parts."""
        inverse = self.inverse_temperature
        hidden, targets = self.hidden.tensor_split(max(1, count)), self.targets.tensor_split(max(1, count))
        inverses: Sequence[float | Tensor] = [inverse] * len(hidden)
        if isinstance(inverse, Tensor):
            inverses = inverse.tensor_split(max(1, count))
        return [replace(self, hidden=h, targets=t, inverse_temperature=i) for h, t, i in zip(hidden, targets, inverses, strict=True)]


def slices(n: int, at_most: int) -> list[slice]:
    """Split n rows into slices of nearly equal length, at most `at_most`; n = 0 gives one empty slice.

    Lengths are rounded up to multiples of 128 if `at_most` allows.
    """
    count = max(1, math.ceil(n / max(1, at_most)))
    size = math.ceil(n / count)
    if at_most >= 128:
        size = min(at_most, math.ceil(size / 128) * 128)
    return [slice(start, min(start + size, n)) for start in range(0, max(n, 1), max(size, 1))]


@dataclass
class LocalScores:
    """Result of a forward pass. `best`: the top k (logits, local ids) if requested. `saved`: state for the backward pass."""

    stats: RowStats
    best: tuple[Tensor, Tensor] | None = None
    saved: object = None

    @classmethod
    def concatenate(cls, parts: list[LocalScores]) -> LocalScores:
        """Scores of consecutive rows, without saved state."""
        kind = type(parts[0].stats)
        stats = kind(*(torch.cat([getattr(part.stats, field.name) for part in parts]) for field in fields(kind)))
        best = [part.best for part in parts if part.best is not None]
        return cls(stats, (torch.cat([values for values, _ in best]), torch.cat([ids for _, ids in best])) if best else None)


@dataclass
class RowGrads:
    """Upstream gradients per row: dL/dlogprob and dL/dentropy (or None), with `lse` and `row_entropy` over the whole vocabulary.

    The gradient of scaled logit j is  logprob (1[j = label] - p_j) - entropy p_j (log p_j + row_entropy).
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    row_entropy: Tensor | None = None


@dataclass(frozen=True)
class GradTargets:
    """The gradients to compute.

    hidden: dtype of the hidden gradient; None if not needed. weight [V, H]: buffer of the weight gradient; None if not needed. add: add to
    the buffer instead of overwriting it.
    """

    hidden: torch.dtype | None
    weight: Tensor | None
    add: bool

    def clear_padding(self, valid: int) -> None:
        """Zero the weight gradient of padding columns, unless the buffer is added to."""
        if self.weight is not None and not self.add:
            self.weight[valid:] = 0


@dataclass
class LogitPair:
    """Saved logits of n drafts and of their teacher, over all columns of this rank.

    rows [n]: teacher row of each draft; None if draft i belongs to teacher row i. draft_top [n]: largest draft logit in these columns.
    draft_lse, teacher_lse [n]: log-sum-exp over the whole vocabulary.
    """

    draft: object
    teacher: object
    rows: Tensor | None
    draft_top: Tensor
    draft_lse: Tensor
    teacher_lse: Tensor


@dataclass
class Agreement:
    """Comparison of the draft's distribution q with the teacher's p over this rank's columns; all [n].

    overlap: Σ min(p, q). gained: Σ q [q < p] for tv and e2e_tv, Σ q p for e2e_greedy, else 0. cost: −Σ p log q for soft_ce, e2e_tv and
    e2e_greedy, Σ p (log p − log q) for kl, else 0. first_choice: log p of the most likely entry of q. saved: state for
    `Backend.draft_grads`.
    """

    overlap: Tensor
    gained: Tensor
    cost: Tensor
    first_choice: Tensor
    saved: object


@dataclass
class DraftGradCoefficients:
    """Coefficients of the gradient of a draft's scaled logit j with label x.

    The gradient is  q_j own − teacher p_j − gained q_j g_j − label 1[j = x], with g_j = p_j if `greedy`, else [q_j < p_j]. own: [n].
    """

    own: Tensor
    teacher: float
    gained: float
    label: float
    greedy: bool


class Backend(Protocol):
    """Computes one rank's problem, without autograd."""

    name: str

    def rows_per_slice(self, problem: Problem, states: int = 1) -> int:
        """Number of rows (at least 1) whose logits fit the workspace, if each row has `states` hidden states."""
        ...

    def scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        """Compute the statistics of every row and, with `for_backward`, the state for the backward pass."""
        ...

    def grads(self, problem: Problem, rows: RowGrads, saved: object, targets: GradTargets) -> Tensor | None:
        """Return the gradient of hidden [n, H] in the requested dtype or a wider one, and write the weight's to `targets.weight`.

        May overwrite `saved`.
        """
        ...

    def compare(self, problem: Problem, pair: LogitPair, loss: DraftLoss) -> Agreement:
        """Compute the terms that `loss` needs. May overwrite `pair.draft`, but not `pair.teacher`."""
        ...

    def draft_grads(
        self, problem: Problem, pair: LogitPair, saved: object, coefficients: DraftGradCoefficients, targets: GradTargets
    ) -> Tensor | None:
        """Gradients of the draft's states and of the weight, like `grads`. May overwrite `saved`, but not `pair.teacher`."""
        ...
