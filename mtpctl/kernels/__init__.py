"""Log-probs of given labels straight from hidden states and the LM head, without the logits in memory.

`linear_logprob` gives per-token log-probs, entropy, greedy hits and the top k; `linear_policy_loss` gives a policy loss and its
gradients in one pass. Both take vocab-sharded heads (tensor parallel) and run on CPU and CUDA; `implementation` chooses how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.kernels.logprob import LogProbOut, TopK, linear_logprob
    from mtpctl.kernels.policy import PolicyLossOut, TokenLoss, linear_policy_loss

_HOME = {
    "LogProbOut": "logprob",
    "PolicyLossOut": "policy",
    "TokenLoss": "policy",
    "TopK": "logprob",
    "linear_logprob": "logprob",
    "linear_policy_loss": "policy",
}
__all__ = ["LogProbOut", "PolicyLossOut", "TokenLoss", "TopK", "linear_logprob", "linear_policy_loss"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
