"""The arithmetic of reinforcement learning: pure functions on tensors, and the checkers that give rewards.

Losses and metrics come as sums, so that micro-batches, data-parallel and context-parallel ranks can be added up and
divided once, by counts of the whole batch. Names load on first use: the reward checkers need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "group_advantages": "advantages",
    "has_signal": "advantages",
    "correction_weights": "corrections",
    "kl_estimate": "divergence",
    "LossInputs": "losses",
    "LossOut": "losses",
    "TokenTerms": "losses",
    "loss_denominator": "losses",
    "loss_metrics": "losses",
    "policy_loss": "losses",
    "token_policy_loss": "losses",
    "token_terms": "losses",
    "mismatch_metrics": "mismatch",
    "mismatch_sums": "mismatch",
    "Checker": "rewards",
    "MathChecker": "rewards",
    "exact_checker": "rewards",
    "final_answer": "rewards",
    "make_checker": "rewards",
    "overlong_penalty": "rewards",
}

__all__ = [
    "Checker",
    "LossInputs",
    "LossOut",
    "MathChecker",
    "TokenTerms",
    "correction_weights",
    "exact_checker",
    "final_answer",
    "group_advantages",
    "has_signal",
    "kl_estimate",
    "loss_denominator",
    "loss_metrics",
    "make_checker",
    "mismatch_metrics",
    "mismatch_sums",
    "overlong_penalty",
    "policy_loss",
    "token_policy_loss",
    "token_terms",
]

if TYPE_CHECKING:
    from mtpctl.rl.advantages import group_advantages, has_signal
    from mtpctl.rl.corrections import correction_weights
    from mtpctl.rl.divergence import kl_estimate
    from mtpctl.rl.losses import (
        LossInputs,
        LossOut,
        TokenTerms,
        loss_denominator,
        loss_metrics,
        policy_loss,
        token_policy_loss,
        token_terms,
    )
    from mtpctl.rl.mismatch import mismatch_metrics, mismatch_sums
    from mtpctl.rl.rewards import Checker, MathChecker, exact_checker, final_answer, make_checker, overlong_penalty


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
