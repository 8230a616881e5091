"""Portable backend in plain PyTorch. Processes the vocabulary in chunks; the backward pass recomputes logits unless they fit one chunk.

Chunks split the vocabulary rather than the tokens. A single product then computes the weight gradient of a chunk's vocabulary entries, so
it needs no fp32 sum over chunks. The hidden gradient accumulates over chunks in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtpctl.kernels import exact, invariant, products
from mtpctl.kernels.backend import (
    Agreement,
    DraftGradCoefficients,
    DraftLoss,
    GradOutputs,
    LocalScores,
    LogitPair,
    Problem,
    RowGrads,
    RowStats,
    Shard,
    gather_shards,
)

TEMPORARIES = 3  # number of chunk-sized tensors: logits, their saved copy or exponentials, and an elementwise product
MIN_PRODUCT_ROWS = 32  # the rounding of a matrix product with fewer rows depends on the number of rows
MIN_CHUNK_COLUMNS = 64  # minimum width of a chunk, and its granularity; narrower chunks would be launch-bound


def _chunks(problem: Problem, width: int) -> Iterator[slice]:
    """Ranges of valid columns, `width` at a time."""
    for start in range(0, problem.vocab_columns, width):
        yield slice(start, min(start + width, problem.vocab_columns))


def scale_logits(logits: Tensor, inverse_temperature: float | Tensor) -> Tensor:
    """Multiply logits by the inverse temperature (a number, or one per row), in place."""
    if isinstance(inverse_temperature, Tensor):
        return logits.mul_(inverse_temperature.unsqueeze(1))
    return logits if inverse_temperature == 1 else logits.mul_(inverse_temperature)


class Chunked:
    name = "chunked"

    def rows_per_slice(self, problem: Problem, states_per_row: int = 1) -> int:
        # A draft's state, in addition to the trunk's, adds its saved logits and one temporary for the comparison.
        columns = max(1, -(-problem.vocab_columns // MIN_CHUNK_COLUMNS)) * MIN_CHUNK_COLUMNS
        temporaries = TEMPORARIES + 2 * (states_per_row - 1)
        return max(1, problem.workspace_bytes // (temporaries * problem.wide_dtype.itemsize * columns))

    def _width(self, problem: Problem) -> int:
        max_columns = problem.workspace_bytes // (TEMPORARIES * problem.wide_dtype.itemsize * max(1, len(problem.hidden)))
        return max(MIN_CHUNK_COLUMNS, max_columns // MIN_CHUNK_COLUMNS * MIN_CHUNK_COLUMNS)

    def scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        max_rows = self.rows_per_slice(problem)
        if for_backward or problem.hidden.is_cuda or max_rows < MIN_PRODUCT_ROWS:
            return self._scores(problem, entropy=entropy, topk=topk, for_backward=for_backward)
        # Process few rows over all columns, so that the order and rounding of a row's sums do not depend on the other rows.
        return self._sliced_scores(problem, -(-len(problem.hidden) // max_rows), entropy=entropy, topk=topk, for_backward=False)

    def _sliced_scores(self, problem: Problem, count: int, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        parts = [self._scores(part, entropy=entropy, topk=topk, for_backward=for_backward) for part in problem.split_rows(count)]
        return parts[0] if len(parts) == 1 else LocalScores.concatenate(parts)

    def _scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        n, device, wide_dtype, width = len(problem.hidden), problem.hidden.device, problem.wide_dtype, self._width(problem)
        # The fields of `RowStats`, over the columns so far.
        top = torch.full((n,), float("-inf"), dtype=wide_dtype, device=device)
        mass, moment, target = torch.zeros_like(top), torch.zeros_like(top), top.clone()
        candidates: tuple[Tensor, Tensor] | None = None
        saved: Tensor | None = None
        for columns in _chunks(problem, width):
            z = scale_logits(products.logits(problem.hidden, problem.weight[columns]), problem.inverse_temperature)
            if for_backward and width >= problem.vocab_columns:  # all logits fit the workspace as one chunk
                saved = z.clone()
            target_columns = problem.targets - columns.start
            is_local = (target_columns >= 0) & (target_columns < z.shape[1])
            target_logits = z.gather(1, target_columns.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
            target = torch.where(is_local, target_logits, target)
            if topk:
                candidates = _merge_topk(candidates, z, topk, columns.start)
            new_top = torch.maximum(top, z.amax(1))
            shift = (top - new_top).masked_fill(mass == 0, 0)
            scale = shift.exp()
            moment = (moment + mass * shift) * scale
            mass = mass * scale
            z.sub_(new_top.unsqueeze(1))
            weights = z.exp()
            mass += weights.sum(1)
            if entropy:
                moment += weights.mul_(z).sum(1)
            top = new_top
        return LocalScores(RowStats(top, mass, moment, target), candidates, saved)

    def grads(self, problem: Problem, row_grads: RowGrads, saved: object, outputs: GradOutputs) -> Tensor | None:
        assert saved is None or isinstance(saved, Tensor)
        h, weight_grad = problem.hidden, outputs.weight
        hidden_grad: Tensor | None = None
        for columns in _chunks(problem, self._width(problem)):
            w = problem.weight[columns]
            z = saved if saved is not None else scale_logits(products.logits(h, w), problem.inverse_temperature)
            logit_grad = _logit_grad(z, problem, row_grads, columns.start)
            if outputs.hidden_dtype is not None:
                dtype = outputs.hidden_dtype if len(w) == problem.vocab_columns else problem.wide_dtype
                hidden_grad = products.hidden_grad(hidden_grad, logit_grad, w, dtype)
            if weight_grad is not None:
                products.weight_grad(logit_grad, h, weight_grad[columns], outputs.add)
        outputs.clear_padding(problem.vocab_columns)
        if outputs.hidden_dtype is not None and hidden_grad is None:  # this rank's shard is all padding
            hidden_grad = torch.zeros(h.shape, dtype=outputs.hidden_dtype, device=h.device)
        return hidden_grad

    def compare(self, problem: Problem, pair: LogitPair, loss: DraftLoss) -> Agreement:
        logq, teacher = pair.draft, pair.teacher
        assert isinstance(logq, Tensor) and isinstance(teacher, Tensor)
        best = logq.argmax(1, keepdim=True)
        logp = (teacher if pair.rows is None else teacher[pair.rows]) - pair.teacher_lse.unsqueeze(1)
        first_choice = logp.gather(1, best).squeeze(1)
        logq.sub_(pair.draft_lse.unsqueeze(1))
        # Terms of `Agreement` that the loss does not need remain zero.
        expected_gain = cost = torch.zeros_like(pair.draft_lse)
        if loss == "kl":
            p = logp.exp()
            cost = logp.sub_(logq).mul_(p).sum(1)
        else:
            p = logp.exp_()
            if loss in ("soft_ce", "e2e_tv", "e2e_greedy"):
                cost = -(p * logq).sum(1)
        q = logq.exp_()
        if loss in ("tv", "e2e_tv"):
            expected_gain = (q * (q < p)).sum(1)
        elif loss == "e2e_greedy":
            expected_gain = (q * p).sum(1)
        return Agreement(torch.minimum(p, q).sum(1), expected_gain, cost, first_choice, (q, p))

    def draft_grads(
        self, problem: Problem, pair: LogitPair, saved: object, coefficients: DraftGradCoefficients, outputs: GradOutputs
    ) -> Tensor | None:
        assert isinstance(saved, tuple)
        q, p = saved
        draft_coefficient, gain = coefficients.draft.unsqueeze(1), coefficients.gain
        if gain:
            draft_coefficient = (
                draft_coefficient - gain * p if coefficients.greedy else torch.where(q < p, draft_coefficient - gain, draft_coefficient)
            )
        grad = q.mul_(draft_coefficient)
        if coefficients.teacher:
            grad.sub_(p, alpha=coefficients.teacher)
        _add_at_targets(grad, problem.targets, -coefficients.label)
        grad = scale_logits(grad, problem.inverse_temperature)
        if outputs.weight is not None:
            products.weight_grad(grad, problem.hidden, outputs.weight[: problem.vocab_columns], outputs.add)
        outputs.clear_padding(problem.vocab_columns)
        return (
            None
            if outputs.hidden_dtype is None
            else products.hidden_grad(None, grad, problem.weight[: problem.vocab_columns], outputs.hidden_dtype)
        )


def _add_at_targets(x: Tensor, targets: Tensor, values: Tensor | float) -> None:
    """Add `values` (a number, or one per row) to x [n, c] at each row's target, if it is among the columns."""
    is_local = (targets >= 0) & (targets < x.shape[1])
    x.scatter_add_(1, targets.clamp(0, x.shape[1] - 1).unsqueeze(1), (is_local.to(x.dtype) * values).unsqueeze(1))


def _logit_grad(z: Tensor, problem: Problem, row_grads: RowGrads, start: int) -> Tensor:
    """Gradient of the unscaled logits, overwriting the scaled logits `z` [n, columns]."""
    logp = z.sub_(row_grads.lse.unsqueeze(1))
    p = logp.exp()
    if row_grads.entropy is None or row_grads.row_entropy is None:
        grad = p.mul_(-row_grads.logprob.unsqueeze(1))
    else:
        grad = (
            logp.add_(row_grads.row_entropy.unsqueeze(1))
            .mul_(row_grads.entropy.unsqueeze(1))
            .add_(row_grads.logprob.unsqueeze(1))
            .mul_(p)
            .neg_()
        )
    _add_at_targets(grad, problem.targets - start, row_grads.logprob)
    return scale_logits(grad, problem.inverse_temperature)


def _merge_topk(candidates: tuple[Tensor, Tensor] | None, z: Tensor, k: int, start: int) -> tuple[Tensor, Tensor]:
    values, ids = z.topk(min(k, z.shape[1]), dim=1)
    ids = ids + start
    if candidates is None:
        return values, ids
    values, ids = torch.cat([candidates[0], values], 1), torch.cat([candidates[1], ids], 1)
    values, order = values.topk(min(k, values.shape[1]), dim=1)
    return values, ids.gather(1, order)


@dataclass
class ExactStats(RowStats):
    """vocab_max, log_mass [n]: max z and log Σ exp(z − max z) of the whole vocabulary, as the engine computes them.

    mass and moment are relative to `vocab_max`, and mass is summed over the whole vocabulary.
    """

    vocab_max: Tensor
    log_mass: Tensor

    @property
    def lse(self) -> Tensor:
        return self.vocab_max + self.log_mass

    @property
    def logprob(self) -> Tensor:
        return (self.target - self.vocab_max) - self.log_mass

    def gather_stats(self, shard: Shard) -> ExactStats:
        gathered = gather_shards(torch.stack([self.moment, self.target]), shard)
        return replace(self, top=self.vocab_max, moment=gathered[:, 0].sum(0), target=gathered[:, 1].amax(0))


class Exact(Chunked):
    """Log-probs equal those of an engine with `numerics: bitwise`, to the last bit. Gradients are those of `Chunked`.

    Computes with `mtpctl.kernels.exact` on a CPU, and with `mtpctl.kernels.invariant` on CUDA. All columns of a slice of rows are computed
    at once. Tensor-parallel ranks add exponentials as integers, so results do not depend on the number of ranks.

    The workspace limits fp32 temporaries. On a CPU, those in float64 are limited by `BLOCK_BYTES`.
    """

    name = "exact"

    def scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        # Ranks combine their sums per slice, so all use the slices that fit rank 0, which has the most vocabulary entries.
        widest = replace(problem, vocab_columns=min(problem.shard.columns, problem.shard.total))
        count = -(-len(problem.hidden) // self.rows_per_slice(widest))
        # Logits that do not fit the workspace are not saved: the backward pass recomputes them.
        return self._sliced_scores(problem, count, entropy=entropy, topk=topk, for_backward=for_backward and count <= 1)

    def _scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        operations, shard = invariant if problem.hidden.is_cuda else exact, problem.shard
        z = scale_logits(operations.logits(problem.hidden, problem.weight[: problem.vocab_columns]), problem.inverse_temperature)
        if not problem.vocab_columns:  # this rank's shard is all padding
            z = z.new_full((len(z), 1), float("-inf"))
        vocab_max, log_mass = (each.squeeze(1) for each in operations.log_mass(z, shard.total, shard.group))
        top = vocab_max if shard.world == 1 else z.amax(1)
        is_local = (problem.targets >= 0) & (problem.targets < problem.vocab_columns)
        target_logits = z.gather(1, problem.targets.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
        target = target_logits.masked_fill_(~is_local, float("-inf"))
        mass, moment = log_mass.exp(), torch.zeros_like(top)
        if entropy and problem.vocab_columns:
            shifted = z - vocab_max.unsqueeze(1)
            moment = shifted.exp().mul_(shifted).sum(1)
        candidates = z.topk(min(topk, problem.vocab_columns), dim=1) if topk and problem.vocab_columns else None
        stats = ExactStats(top, mass, moment, target, vocab_max, log_mass)
        return LocalScores(stats, None if candidates is None else (candidates.values, candidates.indices), z if for_backward else None)
