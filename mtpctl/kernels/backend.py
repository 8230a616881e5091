"""Vocabulary shards of tensor-parallel ranks, and the backend protocol of the LM-head kernels: one rank's part of the computation.

Shape legend: n selected rows, H hidden size, V columns of this rank (vocabulary entries and padding), k candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.recipe.model import MtpLoss


@dataclass(frozen=True)
class Shard:
    """This rank's columns, `start` to `start + columns`, of the padded vocabulary. `total`: vocabulary entries without padding."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    start: int
    columns: int
    total: int

    @property
    def vocab_columns(self) -> int:
        """Number of columns that are vocabulary entries rather than padding."""
        return max(0, min(self.columns, self.total - self.start))


def vocab_shard(weight: Tensor, group: dist.ProcessGroup | None, valid_vocab: int | None) -> Shard:
    """The shard of `weight` [V, H]. V must be equal on all ranks. Raises ValueError if `valid_vocab` is not 1 to V · ranks."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    columns = weight.shape[0]
    total = columns * world if valid_vocab is None else valid_vocab
    if not 0 < total <= columns * world:
        raise ValueError(f"valid_vocab: {valid_vocab}, expected 1 to {columns * world} (weight's {columns} rows on {world} ranks)")
    return Shard(group, rank, world, rank * columns, columns, total)


@dataclass
class RowStats:
    """Softmax statistics of n rows over some columns, of scaled logits z = (h · w) / temperature.

    top: max z. mass: Σ exp(z − top). moment: Σ exp(z − top) (z − top); relative to the maximum, so that entropy is precise for large
    logits. target: z of the label, −inf if it is not among these columns.
    """

    top: Tensor
    mass: Tensor
    moment: Tensor
    target: Tensor

    @property
    def lse(self) -> Tensor:
        return self.top + self.mass.log()

    @property
    def logprob(self) -> Tensor:
        return ((self.target - self.top) - self.mass.log()).clamp(max=0)

    @property
    def entropy(self) -> Tensor:
        return (self.mass.log() - self.moment / self.mass).clamp(min=0)

    @property
    def hit(self) -> Tensor:
        return self.target >= self.top

    def gather_stats(self, shard: Shard) -> RowStats:
        """Statistics over the whole vocabulary: one all-gather of four numbers per row, combined in the same order on every rank."""
        return combine_stats(gather_shards(torch.stack([self.top, self.mass, self.moment, self.target]), shard))


def combine_stats(parts: Tensor) -> RowStats:
    """Combine `parts` [P, 4, n]: top, mass, moment and target of P disjoint sets of columns. An empty set has mass 0."""
    tops, masses, moments, targets = parts.unbind(1)
    empty = masses == 0
    top = tops.masked_fill(empty, float("-inf")).amax(0)
    shift = (tops - top).masked_fill(empty, 0)
    scale = shift.exp()
    return RowStats(top, (masses * scale).sum(0), ((moments + masses * shift) * scale).sum(0), targets.amax(0))


def gather_shards(x: Tensor, shard: Shard) -> Tensor:
    """Stack `x` of every rank: [world, ...]."""
    out = x.new_empty(shard.world, *x.shape)
    dist.all_gather(list(out.unbind(0)), x.contiguous(), group=shard.group)
    return out


def combine_shards(stats: RowStats, shard: Shard) -> RowStats:
    """Statistics over the whole vocabulary, equal on all ranks."""
    return stats if shard.world == 1 else stats.gather_stats(shard)


def sum_shards(x: Tensor, shard: Shard) -> Tensor:
    """Sum `x` over the ranks, in place."""
    if shard.world > 1:
        dist.all_reduce(x, group=shard.group)
    return x


DraftLoss = Literal[MtpLoss, "e2e_greedy"]
"""Losses of a draft: the recipe's, and `e2e_greedy`, the form of `e2e_tv` for greedy drafts."""
SOFT_CE_WEIGHT = 0.1
"""Weight of soft_ce in e2e_tv and e2e_greedy. Without soft_ce, these have almost no gradient if draft and target share no mass."""


@dataclass(frozen=True)
class Problem:
    """One rank's inputs: hidden [n, H], weight [V, H], targets [n].

    targets: label indices relative to this rank's first column; outside 0..V-1 if the label belongs to another rank.
    inverse_temperature: a number or [n] fp32. vocab_columns: number of columns that are vocabulary entries; the rest is padding.
    workspace_bytes: limit on a backend's memory in addition to its results. shard: this rank's part of the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    inverse_temperature: float | Tensor
    vocab_columns: int
    workspace_bytes: int
    shard: Shard

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of logits and statistics."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def select_rows(self, rows: slice) -> Problem:
        """The same problem for a slice of the rows."""
        inverse = self.inverse_temperature
        return replace(
            self,
            hidden=self.hidden[rows],
            targets=self.targets[rows],
            inverse_temperature=inverse[rows] if isinstance(inverse, Tensor) else inverse,
        )

    def split_rows(self, count: int) -> list[Problem]:
        """Split the rows into `count` (at least one) nearly equal parts."""
        inverse = self.inverse_temperature
        hidden, targets = self.hidden.tensor_split(max(1, count)), self.targets.tensor_split(max(1, count))
        inverses: Sequence[float | Tensor] = [inverse] * len(hidden)
        if isinstance(inverse, Tensor):
            inverses = inverse.tensor_split(max(1, count))
        return [replace(self, hidden=h, targets=t, inverse_temperature=i) for h, t, i in zip(hidden, targets, inverses, strict=True)]


def row_slices(n: int, max_rows: int) -> list[slice]:
    """Split n rows into slices of nearly equal length, at most `max_rows`; n = 0 gives one empty slice.

    Lengths are rounded up to multiples of 128 if `max_rows` allows.
    """
    count = max(1, math.ceil(n / max(1, max_rows)))
    slice_rows = math.ceil(n / count)
    if max_rows >= 128:
        slice_rows = min(max_rows, math.ceil(slice_rows / 128) * 128)
    return [slice(start, min(start + slice_rows, n)) for start in range(0, max(n, 1), max(slice_rows, 1))]


@dataclass
class LocalScores:
    """Result of a forward pass. `topk`: the top k (logits, local ids) if requested. `saved`: state for the backward pass."""

    stats: RowStats
    topk: tuple[Tensor, Tensor] | None = None
    saved: object = None

    @classmethod
    def concatenate(cls, parts: list[LocalScores]) -> LocalScores:
        """Scores of consecutive rows, without saved state."""
        stats_type = type(parts[0].stats)
        stats = stats_type(*(torch.cat([getattr(part.stats, field.name) for part in parts]) for field in fields(stats_type)))
        topks = [part.topk for part in parts if part.topk is not None]
        if not topks:
            return cls(stats)
        return cls(stats, (torch.cat([values for values, _ in topks]), torch.cat([ids for _, ids in topks])))


@dataclass
class RowGrads:
    """Gradients of the loss L per row: `logprob` is dL/dlogprob, `entropy` is dL/dentropy (or None).

    `lse` and `row_entropy` are values of the forward pass over the whole vocabulary. With these names, the gradient of scaled logit j is
    logprob (1[j = label] - p_j) - entropy p_j (log p_j + row_entropy).
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    row_entropy: Tensor | None = None


@dataclass(frozen=True)
class GradOutputs:
    """The gradients to compute, and where the weight's is written.

    hidden_dtype: dtype of the hidden gradient; None if not needed. weight [V, H]: buffer of the weight gradient; None if not needed. add:
    add to the buffer instead of overwriting it.
    """

    hidden_dtype: torch.dtype | None
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

    overlap: Σ min(p, q). expected_gain: Σ q g, with the gain g = [q < p] for tv and e2e_tv, p for e2e_greedy, else 0. cost: −Σ p log q for
    soft_ce, e2e_tv and e2e_greedy, Σ p (log p − log q) for kl, else 0. first_choice: log p of the most likely entry of q. saved: state
    for `Backend.draft_grads`.
    """

    overlap: Tensor
    expected_gain: Tensor
    cost: Tensor
    first_choice: Tensor
    saved: object


@dataclass
class DraftGradCoefficients:
    """Coefficients of the gradient of a draft's scaled logit j with label x.

    The gradient is  q_j draft − teacher p_j − gain q_j g_j − label 1[j = x], with g_j = p_j if `greedy`, else [q_j < p_j]. draft: [n].
    """

    draft: Tensor
    teacher: float
    gain: float
    label: float
    greedy: bool


class Backend(Protocol):
    """Computes one rank's problem, without autograd."""

    name: str

    def rows_per_slice(self, problem: Problem, states_per_row: int = 1) -> int:
        """Number of rows (at least 1) whose logits fit the workspace. `states_per_row`: 2 if each row also has a draft's state, else 1."""
        ...

    def scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        """Compute the statistics of every row and, with `for_backward`, the state for the backward pass."""
        ...

    def grads(self, problem: Problem, row_grads: RowGrads, saved: object, outputs: GradOutputs) -> Tensor | None:
        """Return the gradient of hidden [n, H] in the requested dtype or a wider one, and write the weight's to `outputs.weight`.

        May overwrite `saved`.
        """
        ...

    def compare(self, problem: Problem, pair: LogitPair, loss: DraftLoss) -> Agreement:
        """Compute the terms that `loss` needs. May overwrite `pair.draft`, but not `pair.teacher`."""
        ...

    def draft_grads(
        self, problem: Problem, pair: LogitPair, saved: object, coefficients: DraftGradCoefficients, outputs: GradOutputs
    ) -> Tensor | None:
        """Gradients of the draft's states and of the weight, like `grads`. May overwrite `saved`, but not `pair.teacher`."""
        ...
