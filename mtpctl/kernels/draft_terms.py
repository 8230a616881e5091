"""The losses by which a draft learns from the trunk's logits, one slice of `mtpctl.kernels.sweep` after another.

p is the trunk's distribution of a token and q the draft's, both at the rollout's temperature; x is the sampled token:

- ce:       −log q(x)
- soft_ce:  −Σ p log q
- kl:       Σ p (log p − log q): the same gradient as soft_ce, and 0 where q = p
- tv:       1 − Σ min(p, q), the total variation: the share of drafts sampled from q that rejection sampling rejects
  (Leviathan et al., arXiv 2211.17192, section 3.2: a draft from q is accepted with probability min(1, p / q))

The gradient of a scaled logit j is q_j − 1[j = x] for ce, q_j − p_j for soft_ce and kl, and q_j (Σ q [q < p] − [q_j < p_j]) for tv.

Where ranks split the vocabulary, they exchange a few numbers a row three times for each slice and draft.

Shape legend: N rows of the call, n selected rows, m rows of a draft, r of them in a slice, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtpctl.kernels import inputs, reduce
from mtpctl.kernels.call import Call, WeightSink
from mtpctl.kernels.problem import Agreement, Backend, DraftLoss, DraftPull, Pair, Problem

LOSSES = ("ce", "soft_ce", "kl", "tv")


class DraftLossOut(NamedTuple):
    """loss_sum: the loss summed over the draft's rows. The rest is [m], fp32 (hit: bool), without gradient, 0 in rows not selected.

    logprob, teacher_logprob: those of the label by draft and by trunk. overlap: Σ min(p, q), the probability that a draft sampled from q is
    accepted. greedy: p(argmax q), the same for a greedy draft. hit: whether no entry is likelier by the draft than the label.
    """

    loss_sum: Tensor
    logprob: Tensor
    teacher_logprob: Tensor
    overlap: Tensor
    greedy: Tensor
    hit: Tensor


@dataclass(frozen=True)
class Draft:
    """A draft that learns from the trunk's logits.

    hidden [m, H]: the draft's states. rows [m], ascending: the trunk row whose token each of them drafts, with that row's label and
    temperature; None: all N rows, in order. mix: the share of `loss` in the draft's loss; the rest is cross-entropy. weight: the factor of
    the draft's loss in the sum. detach_weight: the LM head takes no gradient from the draft.
    """

    hidden: Tensor
    rows: Tensor | None = None
    loss: DraftLoss = "tv"
    mix: float = 1.0
    weight: float = 1.0
    detach_weight: bool = False

    def check(self, trunk: Tensor) -> None:
        """Raise ValueError, naming the field, where the draft does not fit the trunk's states [N, H]."""
        if self.loss not in LOSSES:
            raise ValueError(f"loss: {self.loss!r}, expected one of {', '.join(LOSSES)}")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix: {self.mix}, expected 0 to 1")
        m = len(trunk) if self.rows is None else len(self.rows)
        if self.hidden.shape != (m, trunk.shape[1]) or self.hidden.dtype != trunk.dtype:
            expected = f"expected {(m, trunk.shape[1])} of {trunk.dtype}"
            raise ValueError(f"hidden of a draft: {tuple(self.hidden.shape)} of {self.hidden.dtype}, {expected}")
        if self.rows is not None and m:
            low, high, falls = torch.stack([self.rows[0], self.rows[-1], (self.rows.diff() <= 0).any()]).tolist()
            if falls or low < 0 or high >= len(trunk):
                raise ValueError(f"rows of a draft: expected ascending ones of 0 to {len(trunk) - 1}")


@dataclass
class TrunkSlice:
    """A slice of the trunk's selected rows: where it starts, its problem, statistics over the whole vocabulary, and kept logits."""

    start: int
    problem: Problem
    stats: reduce.RowStats
    kept: object


class DraftTerm:
    """One draft over a sweep: its results, and the gradient of its states."""

    def __init__(self, draft: Draft, hidden: Tensor, call: Call, grad_scale: float, *, by_hidden: bool, by_weight: bool) -> None:
        self.draft, self.call, self.factor = draft, call, grad_scale * draft.weight
        self.by_hidden, self.by_weight = by_hidden, by_weight
        self.selected, self.trunk_row = _selected(draft, call.rows)
        self.hidden = self.selected.take(hidden).contiguous()
        share = call.share_dtype(hidden) if by_hidden else None
        self.share = share
        self.hidden_grad = None if share is None else torch.empty(self.hidden.shape, dtype=share, device=hidden.device)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        m = len(self.hidden)
        self.logprob, self.teacher_logprob, self.overlap, self.greedy, self.checked = torch.zeros(5, m, dtype=wide, device=hidden.device)
        self.hit = torch.zeros(m, dtype=torch.bool, device=hidden.device)
        self.loss_sum = torch.zeros((), dtype=wide, device=hidden.device)

    def cut(self, parts: list[slice]) -> list[slice]:
        """The range of the draft's rows that belongs to each slice of the trunk's rows."""
        if self.trunk_row is None:
            return parts
        starts = torch.tensor([part.start for part in parts], device=self.trunk_row.device)
        ends = [*torch.searchsorted(self.trunk_row, starts).tolist()[1:], len(self.hidden)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def run(self, backend: Backend, span: slice, trunk: TrunkSlice, sink: WeightSink, *, add: bool) -> bool:
        """Take the draft's rows `span`, which belong to this slice. Returns whether the weight's gradient was written."""
        if span.start >= span.stop:
            return False
        rows = None if self.trunk_row is None else self.trunk_row[span] - trunk.start
        inverse = trunk.problem.inverse_temperature
        problem = replace(
            trunk.problem,
            hidden=self.hidden[span],
            targets=_at(trunk.problem.targets, rows),
            inverse_temperature=_at(inverse, rows) if isinstance(inverse, Tensor) else inverse,
        )
        shard, loss = self.call.shard, self.draft.loss
        scores = backend.scores(problem, entropy=False, topk=0, keep=True)
        top = scores.stats.top  # of this rank's columns
        stats = reduce.join_shards(scores.stats, shard)
        pair = Pair(scores.kept, trunk.kept, rows, top, stats.lse, _at(trunk.stats.lse, rows))
        if problem.valid:
            found = backend.compare(problem, pair, loss)
        else:  # this rank's shard is all padding
            nothing = torch.zeros_like(top)
            found = Agreement(nothing, nothing, nothing, torch.full_like(top, float("-inf")), None)
        overlap, below, cost = reduce.sum_ranks(torch.stack([found.overlap, found.below, found.cost]), shard)
        overlap = overlap.clamp(max=1)
        self.logprob[span], self.teacher_logprob[span], self.hit[span] = stats.logprob, _at(trunk.stats.logprob, rows), stats.hit
        self.overlap[span], self.greedy[span], self.checked[span] = overlap, _first_choice(top, found, shard).exp(), stats.lse
        main, ce = (0.0, 1.0) if loss == "ce" else (self.draft.mix, 1 - self.draft.mix)
        self.loss_sum += (main * (1 - overlap if loss == "tv" else cost) - ce * stats.logprob).sum()
        if self.share is None and not self.by_weight:
            return False
        own = main * below + ce if loss == "tv" else torch.full_like(below, main + ce)
        pull = DraftPull(own * self.factor, main * self.factor, ce * self.factor, loss == "tv")
        out = sink.out if self.by_weight else None
        if problem.valid:
            local = backend.draft_grads(problem, pair, found.kept, pull, hidden=self.share, weight=out, add=add)
        else:
            local = None if self.share is None else torch.zeros_like(problem.hidden, dtype=self.share)
            if out is not None and not add:
                out.zero_()
        if self.hidden_grad is not None and local is not None:
            self.hidden_grad[span] = local
        return out is not None

    def finished_grad(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient of the draft's states [m, H], over all ranks of the vocabulary."""
        if self.hidden_grad is None:
            return None
        return self.selected.spread(reduce.sum_ranks(self.hidden_grad, self.call.shard).to(dtype))

    def outputs(self) -> tuple[Tensor, ...]:
        """The fields of `DraftLossOut`."""
        per_row = (self.logprob, self.teacher_logprob, self.overlap, self.greedy, self.hit)
        return self.loss_sum, *(self.selected.spread(x) for x in per_row)


def _selected(draft: Draft, trunk: inputs.Rows) -> tuple[inputs.Rows, Tensor | None]:
    """The draft's rows that belong to selected trunk rows, and the place of each among those; None where they are all of them, in order."""
    if draft.rows is None:
        return trunk, None
    m = len(draft.rows)
    if trunk.index is None:
        return inputs.Rows(m, m, None), draft.rows
    places = torch.full((trunk.total,), -1, device=draft.rows.device)
    places[trunk.index] = torch.arange(trunk.count, device=places.device)
    places = places[draft.rows]
    index = (places >= 0).nonzero().squeeze(1)
    return inputs.Rows(m, len(index), index), places[index]


def _at(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def _first_choice(top: Tensor, found: Agreement, shard: inputs.Shard) -> Tensor:
    """The trunk's log-prob of the draft's likeliest entry over all ranks' columns; of equally likely ones, that of the first rank."""
    if shard.world == 1:
        return found.first_choice
    best, theirs = reduce.gather(torch.stack([top, found.first_choice]), shard).unbind(1)
    return theirs.gather(0, best.argmax(0, keepdim=True)).squeeze(0)
