"""Plain torch, any device: the vocabulary in chunks, statistics joined as they come, logits computed anew in the backward pass.

A chunk of vocabulary (rather than of rows) finishes its rows of the weight gradient in one matrix product, so that no second copy of the
gradient is needed to add into; the hidden gradient adds up over chunks in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtpctl.kernels import products
from mtpctl.kernels.problem import Agreement, DraftLoss, DraftPull, LocalScores, Pair, Problem, RowGrads
from mtpctl.kernels.reduce import RowStats

TEMPORARIES = 3  # of a chunk's size: logits, their copy that is kept or their exponentials, and a product of the two
FEWEST = 32  # rows of a matrix product; with very few, its rounding depends on how many they are
NARROWEST = 64  # columns, and what chunks are multiples of; narrower ones would only wait on launches


def _chunks(problem: Problem, width: int) -> Iterator[slice]:
    """Ranges of valid columns, `width` at a time."""
    for start in range(0, problem.valid, width):
        yield slice(start, min(start + width, problem.valid))


def scaled(logits: Tensor, inverse_temperature: float | Tensor) -> Tensor:
    """Logits times the inverse temperature (a number, or one a row), in place."""
    if isinstance(inverse_temperature, Tensor):
        return logits.mul_(inverse_temperature.unsqueeze(1))
    return logits if inverse_temperature == 1 else logits.mul_(inverse_temperature)


class Chunked:
    name = "chunked"

    def rows_that_keep(self, problem: Problem, states: int = 1) -> int:
        # As many columns as one chunk has that holds them all. A further state's logits stay beside the temporaries of the last one's, of
        # which comparing the two needs one more.
        columns = max(1, -(-problem.valid // NARROWEST)) * NARROWEST
        held = TEMPORARIES + 2 * (states - 1)
        return max(1, problem.workspace_bytes // (held * problem.wide.itemsize * columns))

    def _width(self, problem: Problem) -> int:
        fit = problem.workspace_bytes // (TEMPORARIES * problem.wide.itemsize * max(1, len(problem.hidden)))
        return max(NARROWEST, fit // NARROWEST * NARROWEST)

    def _keeps(self, problem: Problem) -> bool:
        """Whether all logits fit the workspace: then they are one chunk, and kept."""
        return self._width(problem) >= problem.valid

    def scores(self, problem: Problem, *, entropy: bool, topk: int, keep: bool) -> LocalScores:
        fit = self.rows_that_keep(problem)
        if keep or problem.hidden.is_cuda or fit < FEWEST:
            return self._scores(problem, entropy=entropy, topk=topk, keep=keep)
        # A few rows over all columns, so that how a row's sums are cut, and what they round to, does not depend on its company.
        parts = [self._scores(part, entropy=entropy, topk=topk, keep=False) for part in problem.split(-(-len(problem.hidden) // fit))]
        return parts[0] if len(parts) == 1 else LocalScores.joined(parts)

    def _scores(self, problem: Problem, *, entropy: bool, topk: int, keep: bool) -> LocalScores:
        n, device, wide = len(problem.hidden), problem.hidden.device, problem.wide
        top = torch.full((n,), float("-inf"), dtype=wide, device=device)
        mass, moment, target = torch.zeros_like(top), torch.zeros_like(top), top.clone()
        best: tuple[Tensor, Tensor] | None = None
        kept: Tensor | None = None
        for columns in _chunks(problem, self._width(problem)):
            z = scaled(products.logits(problem.hidden, problem.weight[columns]), problem.inverse_temperature)
            if keep and self._keeps(problem):
                kept = z.clone()
            local = problem.targets - columns.start
            here = (local >= 0) & (local < z.shape[1])
            picked = z.gather(1, local.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
            target = torch.where(here, picked, target)
            if topk:
                best = _better(best, z, topk, columns.start)
            newer = torch.maximum(top, z.amax(1))
            shift = (top - newer).masked_fill(mass == 0, 0)
            scale = shift.exp()
            moment = (moment + mass * shift) * scale
            mass = mass * scale
            z.sub_(newer.unsqueeze(1))
            weights = z.exp()
            mass += weights.sum(1)
            if entropy:
                moment += weights.mul_(z).sum(1)
            top = newer
        return LocalScores(RowStats(top, mass, moment, target), best, kept)

    def grads(
        self, problem: Problem, rows: RowGrads, kept: object, *, hidden: torch.dtype | None, weight: Tensor | None, add: bool
    ) -> Tensor | None:
        assert kept is None or isinstance(kept, Tensor)
        h = problem.hidden
        hidden_grad: Tensor | None = None
        for columns in _chunks(problem, self._width(problem)):
            w = problem.weight[columns]
            z = kept if kept is not None else scaled(products.logits(h, w), problem.inverse_temperature)
            logit_grad = _logit_grad(z, problem, rows, columns.start)
            if hidden is not None:
                hidden_grad = products.hidden_grad(hidden_grad, logit_grad, w, hidden if len(w) == problem.valid else problem.wide)
            if weight is not None:
                products.weight_grad(logit_grad, h, weight[columns], add)
        if weight is not None and not add:
            weight[problem.valid :] = 0
        if hidden is not None and hidden_grad is None:  # this rank's shard is all padding
            hidden_grad = torch.zeros(h.shape, dtype=hidden, device=h.device)
        return hidden_grad

    def compare(self, problem: Problem, pair: Pair, loss: DraftLoss) -> Agreement:
        logq, zp = pair.draft, pair.teacher
        assert isinstance(logq, Tensor) and isinstance(zp, Tensor)
        best = logq.argmax(1, keepdim=True)
        logp = (zp if pair.rows is None else zp[pair.rows]) - pair.teacher_lse.unsqueeze(1)
        first_choice = logp.gather(1, best).squeeze(1)
        logq.sub_(pair.draft_lse.unsqueeze(1))
        below = cost = torch.zeros_like(pair.draft_lse)
        if loss == "kl":
            p = logp.exp()
            cost = logp.sub_(logq).mul_(p).sum(1)
        else:
            p = logp.exp_()
            if loss == "soft_ce":
                cost = -(p * logq).sum(1)
        q = logq.exp_()
        if loss == "tv":
            below = (q * (q < p)).sum(1)
        return Agreement(torch.minimum(p, q).sum(1), below, cost, first_choice, (q, p))

    def draft_grads(
        self, problem: Problem, pair: Pair, kept: object, pull: DraftPull, *, hidden: torch.dtype | None, weight: Tensor | None, add: bool
    ) -> Tensor | None:
        assert isinstance(kept, tuple)
        q, p = kept
        own = pull.own.unsqueeze(1)
        grad = q.mul_(torch.where(q < p, own - pull.teacher, own) if pull.total_variation else own)
        if not pull.total_variation:
            grad.sub_(p, alpha=pull.teacher)
        _add_at(grad, problem.targets, -pull.label)
        grad, w = scaled(grad, problem.inverse_temperature), problem.weight[: problem.valid]
        if weight is not None:
            products.weight_grad(grad, problem.hidden, weight[: problem.valid], add)
            if not add:
                weight[problem.valid :] = 0
        return None if hidden is None else products.hidden_grad(None, grad, w, hidden)


def _add_at(x: Tensor, targets: Tensor, values: Tensor | float) -> None:
    """Adds `values`, one or one a row, to x [n, c] at each row's target, where that is one of the columns."""
    here = (targets >= 0) & (targets < x.shape[1])
    x.scatter_add_(1, targets.clamp(0, x.shape[1] - 1).unsqueeze(1), (here.to(x.dtype) * values).unsqueeze(1))


def _logit_grad(z: Tensor, problem: Problem, rows: RowGrads, start: int) -> Tensor:
    """Gradient of unscaled logits, in place of the scaled ones `z` [n, columns]."""
    logp = z.sub_(rows.lse.unsqueeze(1))
    p = logp.exp()
    if rows.entropy is None or rows.row_entropy is None:
        grad = p.mul_(-rows.logprob.unsqueeze(1))
    else:
        grad = logp.add_(rows.row_entropy.unsqueeze(1)).mul_(rows.entropy.unsqueeze(1)).add_(rows.logprob.unsqueeze(1)).mul_(p).neg_()
    _add_at(grad, problem.targets - start, rows.logprob)
    return scaled(grad, problem.inverse_temperature)


def _better(best: tuple[Tensor, Tensor] | None, z: Tensor, k: int, start: int) -> tuple[Tensor, Tensor]:
    values, ids = z.topk(min(k, z.shape[1]), dim=1)
    ids = ids + start
    if best is None:
        return values, ids
    values, ids = torch.cat([best[0], values], 1), torch.cat([best[1], ids], 1)
    values, order = values.topk(min(k, values.shape[1]), dim=1)
    return values, ids.gather(1, order)
