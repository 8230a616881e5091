"""Liger's Hopper kernel behind the same protocol, where `liger-kernel` and CuTe DSL are installed.

It takes bf16 and one temperature for all rows, gives log-prob and entropy (which it rounds to bf16) but no maximum, so no greedy hit, and
always computes both gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from mtpctl.kernels.problem import LocalScores, Problem, RowGrads
from mtpctl.kernels.reduce import RowStats

_KERNEL = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"


@dataclass
class _Graph:
    hidden: Tensor
    weight: Tensor
    nll: Tensor
    entropy: Tensor | None


def refusal(hidden: Tensor, temperature: float | Tensor, hit: bool, topk: int, world: int) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if find_spec("liger_kernel") is None or find_spec("cutlass") is None:
        return "needs liger-kernel and nvidia-cutlass-dsl installed"
    if not hidden.is_cuda or torch.cuda.get_device_capability(hidden.device) != (9, 0):
        return f"needs a Hopper card, hidden is on {hidden.device}"
    if hidden.dtype != torch.bfloat16:
        return f"needs torch.bfloat16, hidden is {hidden.dtype}"
    for what, asked in {
        "a temperature per token": isinstance(temperature, Tensor),
        "hit": hit,
        "topk": topk > 0,
        "a vocabulary-sharded weight": world > 1,
    }.items():
        if asked:
            return f"does not do {what}"
    return None


class Liger:
    name = "liger"

    def scores(self, problem: Problem, *, entropy: bool, topk: int, keep: bool) -> LocalScores:
        from importlib import import_module

        function = import_module(_KERNEL).LigerFusedScaledCrossEntropySM90Function
        hidden = problem.hidden.detach().requires_grad_(keep)
        weight = problem.weight[: problem.valid].detach().requires_grad_(keep)
        assert isinstance(problem.inverse_temperature, float)
        with torch.set_grad_enabled(keep):
            out = function.apply(hidden, weight, problem.targets, 1.0 / problem.inverse_temperature, -100, 1, entropy)
        nll, row_entropy = out if entropy else (out, None)
        zero, one = torch.zeros_like(nll), torch.ones_like(nll)
        # Its log-sum-exp stays inside: statistics are given relative to it, as if it were 0.
        moment = zero if row_entropy is None else -row_entropy.detach().float()
        return LocalScores(RowStats(zero, one, moment, -nll.detach()), kept=_Graph(hidden, weight, nll, row_entropy) if keep else None)

    def grads(
        self, problem: Problem, rows: RowGrads, kept: object, *, hidden: torch.dtype | None, weight: Tensor | None, add: bool
    ) -> Tensor | None:
        if not isinstance(kept, _Graph):
            raise RuntimeError("implementation: 'liger' can go backward once only; its graph is spent")
        outputs, upstream = [kept.nll], [-rows.logprob]
        if rows.entropy is not None and kept.entropy is not None:
            outputs.append(kept.entropy)
            upstream.append(rows.entropy.to(kept.entropy.dtype))
        hidden_grad, weight_grad = torch.autograd.grad(outputs, (kept.hidden, kept.weight), upstream)
        if weight is not None:
            if add:
                weight[: problem.valid] += weight_grad
            else:
                weight[: problem.valid] = weight_grad
                weight[problem.valid :] = 0
        return None if hidden is None else hidden_grad
