"""A policy loss of the user's own, `train.rl.loss: FILE.py:NAME`: loaded, tried on a few tokens before anything starts, and called.

It is called as `loss(logprob, entropy, terms, config, **train.rl.loss_args)` in place of `losses.token_policy_loss`, inside the kernel
that makes the log-probs. So it is given any slice of the tokens, an empty one as well, and must add up over slices: a sum, in which no
token's term looks at another token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.losses import LossOut, TokenTerms, token_policy_loss
from mtpctl.user_code import check_call, describe_error, load, place_of

FIELD = "train.rl.loss"
_BOUND = 1e-8
"""Of relative differences in float64 between the loss of all tokens and the sum of its slices."""


class _NoLoss(Exception):
    """What the user's function returned is no `LossOut` of numbers."""


class TokenPolicyLoss(Protocol):
    """The signature of `losses.token_policy_loss`."""

    def __call__(self, logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut: ...


def loss_of(config: RlConfig) -> TokenPolicyLoss:
    """The separable loss that the recipe names: ours, or the user's with its arguments.

    Raises UserError where the user's cannot be loaded. One that raises while it trains ends the run with RuntimeFailure, its file and
    line.
    """
    if not config.own_loss:
        return token_policy_loss
    function = _loaded(config)

    def own(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
        try:
            out = _called(function, logprob, entropy, terms, config)
        except _NoLoss as error:
            raise RuntimeFailure(f"{FIELD}: {place_of(function)}: {error}") from error
        except Exception as error:
            raise RuntimeFailure(f"{FIELD}: {describe_error(error, config.loss)}") from error
        # What every loss is measured by, where the user's does not sum it itself.
        trained = terms.aggregation > 0
        common = {"tokens": trained.sum(), "weighted": terms.aggregation.sum(), "pg_loss": out.loss_sum.detach()}
        return LossOut(out.loss_sum, common | {name: value.detach() for name, value in out.sums.items()})

    return own


def check_loss(config: RlConfig) -> None:
    """Try a loss of the user's own on a few tokens in float64 on the CPU; one of ours is not tried.

    Raises UserError, with file and line, for one that raises, returns something else than a `LossOut` of numbers, is not finite, has a
    gradient at tokens that are not trained or none at all, or is not the sum of what it gives for slices of the tokens.
    """
    if not config.own_loss:
        return
    function = _loaded(config)
    where = f"{FIELD}: {place_of(function)}"
    terms, logprob, entropy = _example(config)
    every = torch.arange(len(logprob))
    whole, gradient = _tried(function, where, logprob, entropy, terms, every, config)
    if (stray := gradient[terms.aggregation == 0].abs().max()) > 0:
        raise UserError(
            f"{where}: the gradient at tokens that are not trained is {stray.item():.3g}; multiply each token's term by terms.aggregation"
        )
    if not gradient.any():
        raise UserError(f"{where}: no token has a gradient; make the loss of `logprob` itself, not of a detached copy")
    parts = [_tried(function, where, logprob, entropy, terms, part, config) for part in (every[:0], every[:5], every[5:])]
    for out, _ in parts:
        if out.sums.keys() != whole.sums.keys():
            told = ", ".join(sorted(out.sums.keys() ^ whole.sums.keys()))
            raise UserError(f"{where}: its sums differ in name from one slice of tokens to another ({told}); return the same names always")
    value = torch.stack([out.loss_sum.detach() for out, _ in parts]).sum()
    for what, found, expected in (
        ("loss", value, whole.loss_sum.detach()),
        ("gradient", torch.cat([part for _, part in parts]), gradient),
    ):
        if not torch.allclose(found, expected, rtol=_BOUND, atol=_BOUND):
            raise UserError(
                f"{where}: its {what} over all tokens is not the sum over slices of them; return a sum and no mean, in which no token's "
                "term looks at another token"
            )


def _loaded(config: RlConfig) -> Callable[..., object]:
    function = load(config.loss, FIELD)
    if not callable(function):
        raise UserError(f"{FIELD}: {config.loss} is {type(function).__name__}, not a function; name one")
    check_call(function, ("logprob", "entropy", "terms", "config"), config.loss_args, FIELD)
    return function


def _called(function: Callable[..., object], logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    out = function(logprob, entropy, terms, config, **config.loss_args)
    if not isinstance(out, LossOut):
        raise _NoLoss(f"it returned {type(out).__name__}; return LossOut(loss_sum, sums) of mtpctl.rl.losses")
    for name, value in {"loss_sum": out.loss_sum, **out.sums}.items():
        if not isinstance(value, Tensor) or value.dim():
            shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise _NoLoss(f"{name} is {shape}; return a sum, a tensor without dimensions")
    return out


def _tried(
    function: Callable[..., object], where: str, logprob: Tensor, entropy: Tensor, terms: TokenTerms, tokens: Tensor, config: RlConfig
) -> tuple[LossOut, Tensor]:
    """The loss of some tokens of the example, and its gradient by their log-probs. Raises UserError for what is no loss."""
    leaf = logprob[tokens].requires_grad_()
    beside = entropy[tokens].requires_grad_()
    try:
        out = _called(function, leaf, beside, terms.at(tokens), config)
    except _NoLoss as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:
        raise UserError(f"{FIELD}: {describe_error(error, config.loss)}") from error
    for name, value in {"loss_sum": out.loss_sum, **out.sums}.items():
        if not torch.isfinite(value):
            raise UserError(f"{where}: {name} is {value.item()} for ordinary log-probs; look for a division by 0 or the log of 0")
    if not out.loss_sum.requires_grad:
        return out, torch.zeros_like(leaf)
    grads = torch.autograd.grad(out.loss_sum, (leaf, beside), allow_unused=True)
    for grad in grads:
        if grad is not None and not torch.isfinite(grad).all():
            raise UserError(f"{where}: its gradient is not finite for ordinary log-probs; look for a root or a division by 0")
    return out, torch.zeros_like(leaf) if grads[0] is None else grads[0]


def _example(config: RlConfig) -> tuple[TokenTerms, Tensor, Tensor]:
    """Twelve tokens with advantages of both signs and 0, near their anchor and far from it, of which three are not trained."""
    draw = torch.Generator().manual_seed(0)
    count = 12

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=draw, dtype=torch.float64)

    logprob = -torch.rand(count, generator=draw, dtype=torch.float64) - 0.1
    aggregation = torch.ones(count, dtype=torch.float64)
    if config.aggregate == "sequence":
        aggregation /= 4
    aggregation[[0, 5, 11]] = 0.0
    terms = TokenTerms(
        anchor=logprob + noise(0.3),
        advantage=torch.tensor([1.0, -0.7, 0.0, 0.4], dtype=torch.float64).repeat_interleave(3),
        weight=torch.ones(count, dtype=torch.float64),
        aggregation=aggregation,
        ref_logprob=logprob + noise(0.3) if config.kl_coef else None,
        behaviour=logprob + noise(0.3),
        same_weights=torch.ones(count, dtype=torch.float64),
    )
    return terms, logprob, torch.rand(count, generator=draw, dtype=torch.float64)
