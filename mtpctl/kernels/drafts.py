"""Losses that train a draft on the trunk's logits, computed per slice of rows (see `mtpctl.kernels.policy`).

p is the trunk's distribution of a token and q the draft's, both at the rollout's temperature; x is the sampled token:

- ce:       −log q(x)
- soft_ce:  −Σ p log q
- kl:       Σ p (log p − log q): same gradient as soft_ce, but 0 if q = p
- tv:       1 − Σ min(p, q), the total variation: the fraction of drafts from q that rejection sampling rejects (Leviathan et al., arXiv
  2211.17192, section 3.2: a draft from q is accepted with probability min(1, p / q))
- e2e_tv:   tv + `SOFT_CE_WEIGHT` soft_ce, for sampled drafts
- e2e_greedy: 1 − Σ p q + `SOFT_CE_WEIGHT` soft_ce, for greedy drafts

e2e_tv and e2e_greedy are per-row terms of the multi-step loss; `mtpctl.trainer.acceptance` computes the rows' weights.

The gradient of a scaled logit j is q_j − 1[j = x] for ce, q_j − p_j for soft_ce and kl, q_j (Σ q [q < p] − [q_j < p_j]) for tv, and
q_j (Σ q p − p_j) for 1 − Σ p q.

With a sharded vocabulary, each slice of each draft takes three collectives, with a few numbers per row.

Shape legend: N rows of the call, n selected rows, m rows of a draft, r of them in a slice, H hidden size, V vocabulary entries of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from mtpctl.kernels.backend import (
    SOFT_CE_WEIGHT,
    Agreement,
    Backend,
    DraftGradCoefficients,
    DraftLoss,
    GradOutputs,
    LogitPair,
    Problem,
    RowStats,
    Shard,
    combine_shards,
    gather_shards,
    sum_shards,
)
from mtpctl.kernels.inputs import Call, Rows, WeightGradBuffer

LOSSES: tuple[DraftLoss, ...] = get_args(DraftLoss)
LOSS_WEIGHTS: dict[DraftLoss, tuple[float, float]] = {
    "ce": (0.0, 0.0),
    "soft_ce": (0.0, 1.0),
    "kl": (0.0, 1.0),
    "tv": (1.0, 0.0),
    "e2e_tv": (1.0, SOFT_CE_WEIGHT),
    "e2e_greedy": (1.0, SOFT_CE_WEIGHT),
}
"""Weights of a draft's probability of rejection and of `Agreement.cost` in each loss. ce uses neither."""


class DraftLossOut(NamedTuple):
    """loss_sum: the loss summed over the draft's rows.

    Other fields: [m], fp32 or wider (hit: bool), without gradients, 0 in unselected rows.

    logprob, teacher_logprob: log-prob of the label under the draft and the trunk. overlap: Σ min(p, q), the acceptance probability of a
    draft sampled from q. greedy: p(argmax q), the acceptance probability of a greedy draft. hit: whether the label is the draft's most
    likely entry.
    """

    loss_sum: Tensor
    logprob: Tensor
    teacher_logprob: Tensor
    overlap: Tensor
    greedy: Tensor
    hit: Tensor


@dataclass(frozen=True)
class Draft:
    """The states of one MTP depth, and the loss that trains them on the trunk's logits.

    hidden [m, H]: the draft's states. rows [m], ascending: the trunk row of each draft row, which has the same label and temperature;
    None: all N rows in order. mix: weight of `loss`; the cross-entropy has weight 1 − mix. weight: factor of the draft's loss in the total
    loss. detach_weight: the LM head gets no gradient from the draft.
    """

    hidden: Tensor
    rows: Tensor | None = None
    loss: DraftLoss = "tv"
    mix: float = 1.0
    weight: float = 1.0
    detach_weight: bool = False

    def check(self, trunk: Tensor) -> None:
        """Raise ValueError, naming the field, if the draft does not fit the trunk's states [N, H]."""
        if self.loss not in LOSSES:
            raise ValueError(f"loss: {self.loss!r}, expected one of {', '.join(LOSSES)}")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix: {self.mix}, expected 0 to 1")
        m = len(trunk) if self.rows is None else len(self.rows)
        if self.hidden.shape != (m, trunk.shape[1]) or self.hidden.dtype != trunk.dtype:
            expected = f"expected {(m, trunk.shape[1])} of {trunk.dtype}"
            raise ValueError(f"hidden of a draft: {tuple(self.hidden.shape)} of {self.hidden.dtype}, {expected}")
        if self.rows is not None and m:
            first_row, last_row, not_ascending = torch.stack([self.rows[0], self.rows[-1], (self.rows.diff() <= 0).any()]).tolist()
            if not_ascending or first_row < 0 or last_row >= len(trunk):
                raise ValueError(f"rows of a draft: expected ascending indices from 0 to {len(trunk) - 1}")


@dataclass
class TrunkSlice:
    """A slice of the trunk's selected rows: its start, problem, statistics over the whole vocabulary, and saved logits."""

    start: int
    problem: Problem
    stats: RowStats
    saved: object


class DraftTerm:
    """One draft's results and the gradient of its states, accumulated over slices."""

    def __init__(
        self, draft: Draft, hidden: Tensor, call: Call, grad_scale: float, *, needs_hidden_grad: bool, needs_weight_grad: bool
    ) -> None:
        self.draft, self.call, self.factor = draft, call, grad_scale * draft.weight
        self.needs_weight_grad = needs_weight_grad
        self.selected, self.trunk_row = _select_draft_rows(draft, call.rows)
        self.hidden = self.selected.select(hidden).contiguous()
        self.grad_dtype = call.partial_dtype(hidden) if needs_hidden_grad else None
        self.hidden_grad = None
        if self.grad_dtype is not None:
            self.hidden_grad = torch.empty(self.hidden.shape, dtype=self.grad_dtype, device=hidden.device)
        wide_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        m = len(self.hidden)
        self.logprob, self.teacher_logprob, self.overlap, self.greedy, self.lse = torch.zeros(5, m, dtype=wide_dtype, device=hidden.device)
        self.hit = torch.zeros(m, dtype=torch.bool, device=hidden.device)
        self.loss_sum = torch.zeros((), dtype=wide_dtype, device=hidden.device)

    def draft_slices(self, trunk_slices: list[slice]) -> list[slice]:
        """For each slice of the trunk's rows, the slice of the draft's rows."""
        if self.trunk_row is None:
            return trunk_slices
        starts = torch.tensor([trunk_slice.start for trunk_slice in trunk_slices], device=self.trunk_row.device)
        ends = [*torch.searchsorted(self.trunk_row, starts).tolist()[1:], len(self.hidden)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def process(self, backend: Backend, span: slice, trunk: TrunkSlice, buffer: WeightGradBuffer, *, add: bool) -> bool:
        """Compute results, loss and gradients of the draft rows `span` of a slice. Returns whether the weight gradient was written."""
        if span.start >= span.stop:
            return False
        rows = None if self.trunk_row is None else self.trunk_row[span] - trunk.start
        inverse = trunk.problem.inverse_temperature
        problem = replace(
            trunk.problem,
            hidden=self.hidden[span],
            targets=_select(trunk.problem.targets, rows),
            inverse_temperature=_select(inverse, rows) if isinstance(inverse, Tensor) else inverse,
        )
        shard, loss = self.call.shard, self.draft.loss
        scores = backend.scores(problem, entropy=False, topk=0, for_backward=True)
        top = scores.stats.top  # of this rank's columns
        stats = combine_shards(scores.stats, shard)
        pair = LogitPair(scores.saved, trunk.saved, rows, top, stats.lse, _select(trunk.stats.lse, rows))
        if problem.vocab_columns:
            agreement = backend.compare(problem, pair, loss)
        else:  # this rank's shard is all padding
            zero = torch.zeros_like(top)
            agreement = Agreement(zero, zero, zero, torch.full_like(top, float("-inf")), None)
        overlap, expected_gain, cost = sum_shards(torch.stack([agreement.overlap, agreement.expected_gain, agreement.cost]), shard)
        overlap = overlap.clamp(max=1)
        self.logprob[span], self.teacher_logprob[span], self.hit[span] = stats.logprob, _select(trunk.stats.logprob, rows), stats.hit
        self.overlap[span], self.greedy[span], self.lse[span] = overlap, _first_choice(top, agreement, shard).exp(), stats.lse
        loss_weight, ce_weight = (0.0, 1.0) if loss == "ce" else (self.draft.mix, 1 - self.draft.mix)
        greedy = loss == "e2e_greedy"
        rejection_weight, cost_weight = (loss_weight * component_weight for component_weight in LOSS_WEIGHTS[loss])
        self.loss_sum += (
            rejection_weight * (1 - (expected_gain if greedy else overlap)) + cost_weight * cost - ce_weight * stats.logprob
        ).sum()
        if self.grad_dtype is None and not self.needs_weight_grad:
            return False
        coefficients = DraftGradCoefficients(
            draft=(rejection_weight * expected_gain + cost_weight + ce_weight) * self.factor,
            teacher=cost_weight * self.factor,
            gain=rejection_weight * self.factor,
            label=ce_weight * self.factor,
            greedy=greedy,
        )
        out = buffer.out if self.needs_weight_grad else None
        if problem.vocab_columns:
            local_grad = backend.draft_grads(problem, pair, agreement.saved, coefficients, GradOutputs(self.grad_dtype, out, add))
        else:
            local_grad = None if self.grad_dtype is None else torch.zeros_like(problem.hidden, dtype=self.grad_dtype)
            if out is not None and not add:
                out.zero_()
        if self.hidden_grad is not None and local_grad is not None:
            self.hidden_grad[span] = local_grad
        return out is not None

    def reduce_grad(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient of the draft's states [m, H], summed over vocabulary shards."""
        if self.hidden_grad is None:
            return None
        return self.selected.scatter(sum_shards(self.hidden_grad, self.call.shard).to(dtype))

    def outputs(self) -> tuple[Tensor, ...]:
        """The fields of `DraftLossOut`."""
        per_row = (self.logprob, self.teacher_logprob, self.overlap, self.greedy, self.hit)
        return self.loss_sum, *(self.selected.scatter(x) for x in per_row)


def _select_draft_rows(draft: Draft, trunk: Rows) -> tuple[Rows, Tensor | None]:
    """The draft rows whose trunk rows are selected, and each one's index among the selected trunk rows (None: the same order)."""
    if draft.rows is None:
        return trunk, None
    m = len(draft.rows)
    if trunk.index is None:
        return Rows(m, m, None), draft.rows
    position = torch.full((trunk.total,), -1, device=draft.rows.device)
    position[trunk.index] = torch.arange(trunk.count, device=position.device)
    position = position[draft.rows]
    index = (position >= 0).nonzero().squeeze(1)
    return Rows(m, len(index), index), position[index]


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def _first_choice(top: Tensor, agreement: Agreement, shard: Shard) -> Tensor:
    """The trunk's log-prob of the draft's most likely entry over all ranks' columns; ties go to the first rank."""
    if shard.world == 1:
        return agreement.first_choice
    tops, first_choices = gather_shards(torch.stack([top, agreement.first_choice]), shard).unbind(1)
    return first_choices.gather(0, tops.argmax(0, keepdim=True)).squeeze(0)
