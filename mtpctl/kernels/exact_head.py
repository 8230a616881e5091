"""Backend of the LM-head kernels whose log-probs equal those of an engine with exact sums (`mtpctl.kernels.exact`), to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.kernels import exact
from mtpctl.kernels.backend import LocalScores, Problem
from mtpctl.kernels.chunked import Chunked, scaled
from mtpctl.kernels.shards import RowStats


@dataclass
class ExactStats(RowStats):
    """log_mass [n]: log Σ exp(z − top), as the engine computes it."""

    log_mass: Tensor

    @property
    def lse(self) -> Tensor:
        return self.top + self.log_mass

    @property
    def logprob(self) -> Tensor:
        return (self.target - self.top) - self.log_mass


class Exact(Chunked):
    """All columns of a slice of rows at once. The vocabulary must not be split over ranks. Gradients are those of `Chunked`.

    The workspace limits fp32 temporaries. Those in float64 are limited by `BLOCK_BYTES`.
    """

    name = "exact"

    def scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        count = -(-len(problem.hidden) // self.rows_per_slice(problem))
        # Logits that do not fit the workspace are not saved: the backward pass recomputes them.
        return self._sliced_scores(problem, count, entropy=entropy, topk=topk, for_backward=for_backward and count <= 1)

    def _scores(self, problem: Problem, *, entropy: bool, topk: int, for_backward: bool) -> LocalScores:
        z = scaled(exact.linear(problem.hidden, problem.weight[: problem.valid]), problem.inverse_temperature)
        top, log_mass = (each.squeeze(1) for each in exact.log_mass(z))
        target = z.gather(1, problem.targets.unsqueeze(1)).squeeze(1)
        mass, moment = log_mass.exp(), torch.zeros_like(top)
        if entropy:
            shifted = z - top.unsqueeze(1)
            moment = shifted.exp().mul_(shifted).sum(1)
        best = z.topk(topk, dim=1) if topk else None
        stats = ExactStats(top, mass, moment, target, log_mass)
        return LocalScores(stats, None if best is None else (best.values, best.indices), z if for_backward else None)
