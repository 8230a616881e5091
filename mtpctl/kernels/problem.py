"""What a backend is given, and what it gives back: the local problem of one rank, after rows are selected and before ranks are joined.

Shape legend: n selected rows, H hidden size, V this rank's vocabulary entries, k candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from mtpctl.kernels.reduce import RowStats

DraftLoss = Literal["ce", "soft_ce", "kl", "tv"]


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

    def part(self, rows: slice) -> Problem:
        """The same for some of the rows."""
        inverse = self.inverse_temperature
        return replace(
            self,
            hidden=self.hidden[rows],
            targets=self.targets[rows],
            inverse_temperature=inverse[rows] if isinstance(inverse, Tensor) else inverse,
        )

    def split(self, count: int) -> list[Problem]:
        """The same in at most `count` parts of nearly equally many rows; at least one part."""
        inverse = self.inverse_temperature
        hidden, targets = self.hidden.tensor_split(max(1, count)), self.targets.tensor_split(max(1, count))
        inverses: Sequence[float | Tensor] = [inverse] * len(hidden)
        if isinstance(inverse, Tensor):
            inverses = inverse.tensor_split(max(1, count))
        return [replace(self, hidden=h, targets=t, inverse_temperature=i) for h, t, i in zip(hidden, targets, inverses, strict=True)]


def slices(n: int, at_most: int) -> list[slice]:
    """Ranges of rows, about equal (in whole 128s), none longer than `at_most`; one empty range where there are no rows."""
    count = max(1, math.ceil(n / max(1, at_most)))
    size = math.ceil(n / count)
    if at_most >= 128:
        size = min(at_most, math.ceil(size / 128) * 128)
    return [slice(start, min(start + size, n)) for start in range(0, max(n, 1), max(size, 1))]


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


@dataclass
class Pair:
    """The logits of n drafts and of their teacher, every column of this rank, as `Backend.scores` kept them.

    rows [n]: which of the teacher's rows belongs to each draft; None where they are the same ones in the same order. draft_top [n]: the
    largest of the draft's logits in these columns. draft_lse and teacher_lse [n]: over the whole vocabulary.
    """

    draft: object
    teacher: object
    rows: Tensor | None
    draft_top: Tensor
    draft_lse: Tensor
    teacher_lse: Tensor


@dataclass
class Agreement:
    """What two distributions, the draft's q and the teacher's p, have in common over this rank's columns; all [n].

    overlap: Σ min(p, q); below: Σ q where q < p, for tv alone; cost: −Σ p log q for soft_ce, Σ p (log p − log q) for kl; first_choice:
    log p where q is largest. kept: what `Backend.draft_grads` needs of the draft's logits.
    """

    overlap: Tensor
    below: Tensor
    cost: Tensor
    first_choice: Tensor
    kept: object


@dataclass
class DraftPull:
    """The gradient of a draft's scaled logit j, x being the label:  q_j own − teacher t_j − label 1[j = x],  where t_j is p_j, or for
    the total variation q_j [q_j < p_j]. own [n]."""

    own: Tensor
    teacher: float
    label: float
    total_variation: bool


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

    def rows_that_keep(self, problem: Problem, states: int = 1) -> int:
        """Of how many rows the workspace can hold every logit of so many states between the passes; at least 1."""
        ...

    def compare(self, problem: Problem, pair: Pair, loss: DraftLoss) -> Agreement:
        """What the pair has in common, as far as `loss` needs it. May overwrite `pair.draft`, not `pair.teacher`."""
        ...

    def draft_grads(
        self, problem: Problem, pair: Pair, kept: object, pull: DraftPull, *, hidden: torch.dtype | None, weight: Tensor | None, add: bool
    ) -> Tensor | None:
        """The gradients of the draft's states and of the weight, as `grads` gives them. May overwrite `kept`, not `pair.teacher`."""
        ...
