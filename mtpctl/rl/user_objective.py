"""User-defined losses and advantages: `train.rl.loss` and `train.rl.advantage` as FILE.py:NAME or MODULE:NAME.

A loss is called as `loss(logprob, entropy, terms, config, **train.rl.loss_args)` in place of `losses.token_policy_loss`, inside the kernel
that computes the log-probs. It receives slices of the tokens, which may be empty. It must be a sum in which no token's term depends on
other tokens, so that it is additive over slices.

An advantage is called as `advantage(rewards, groups, lengths, **train.rl.advantage_args)` in place of `advantages.group_advantages`, on
every trainer rank with all responses of an update.

Both are tested on a small example before a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.advantages import group_advantages
from mtpctl.rl.losses import LossOut, TokenTerms, token_policy_loss
from mtpctl.user_code import check_call, describe_error, is_code_reference, load, location_of

LOSS, ADVANTAGE = "train.rl.loss", "train.rl.advantage"
_TOLERANCE = 1e-8
"""Maximum difference, relative and absolute, between the float64 results for all tokens and for their slices."""


class _InvalidResult(Exception):
    """The user's function returned something other than a loss or an advantage."""


class TokenPolicyLoss(Protocol):
    """The signature of `losses.token_policy_loss`."""

    def __call__(self, logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut: ...


def load_loss(config: RlConfig) -> TokenPolicyLoss:
    """The separable loss that the recipe names: the built-in one, or a user-defined one with its arguments.

    Raises UserError if a user-defined loss cannot be loaded. The returned loss raises RuntimeFailure, with file and line, if the user's
    code fails.
    """
    if not is_code_reference(config.loss):
        return token_policy_loss
    function = _load_function(config.loss, ("logprob", "entropy", "terms", "config"), config.loss_args, LOSS)

    def user_loss(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
        out = _run_user_code(lambda: _call_loss(function, logprob, entropy, terms, config), function, config.loss, LOSS, RuntimeFailure)
        # Sums that `loss_metrics` needs. Those that the user's loss returns replace them.
        trained = terms.aggregation > 0
        required = {"tokens": trained.sum(), "weighted": terms.aggregation.sum(), "pg_loss": out.loss_sum.detach()}
        return LossOut(out.loss_sum, required | {name: value.detach() for name, value in out.sums.items()})

    return user_loss


def compute_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor, config: RlConfig) -> Tensor:
    """Float64 advantages [N] by the built-in or user-defined estimator. Arguments as in `advantages.group_advantages`.

    Raises RuntimeFailure if a user-defined advantage fails.
    """
    if not is_code_reference(config.advantage):
        return group_advantages(rewards, groups, config.advantage, lengths)
    function = _load_advantage(config)
    arguments = (rewards.double(), groups, lengths)
    return _run_user_code(lambda: _call_advantage(function, arguments, config), function, config.advantage, ADVANTAGE, RuntimeFailure)


def check_objective(config: RlConfig) -> None:
    """Test the user-defined loss and advantage, if any, on a small example on the CPU. Raises UserError with file and line."""
    if is_code_reference(config.loss):
        _check_loss(config)
    if is_code_reference(config.advantage):
        _check_advantage(config)


def _check_loss(config: RlConfig) -> None:
    """Evaluate the loss on a few tokens in float64.

    It must return a `LossOut` of finite scalars, have a gradient at trained tokens only, and be additive over slices of the tokens.
    """
    function = _load_function(config.loss, ("logprob", "entropy", "terms", "config"), config.loss_args, LOSS)
    location = f"{LOSS}: {location_of(function)}"
    terms, logprob, entropy = _example_tokens(config)

    def evaluate(tokens: Tensor) -> tuple[LossOut, Tensor]:
        return _loss_and_gradient(function, location, logprob[tokens], entropy[tokens], terms.at(tokens), config)

    all_tokens = torch.arange(len(logprob))
    total, gradient = evaluate(all_tokens)
    if (untrained := gradient[terms.aggregation == 0].abs().max()) > 0:
        raise UserError(
            f"{location}: the gradient at tokens that are not trained is {untrained.item():.3g}; "
            "multiply each token's term by terms.aggregation"
        )
    if not gradient.any():
        raise UserError(f"{location}: no token has a gradient; compute the loss from `logprob` itself, not from a detached copy")
    slices = [evaluate(tokens) for tokens in (all_tokens[:0], all_tokens[:5], all_tokens[5:])]
    for out, _ in slices:
        if names := ", ".join(sorted(out.sums.keys() ^ total.sums.keys())):
            raise UserError(f"{location}: the names of its sums differ between slices of tokens ({names}); always return the same names")
    loss = torch.stack([out.loss_sum.detach() for out, _ in slices]).sum()
    for name, value, expected in (
        ("loss", loss, total.loss_sum.detach()),
        ("gradient", torch.cat([slice_gradient for _, slice_gradient in slices]), gradient),
    ):
        if not torch.allclose(value, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise UserError(
                f"{location}: its {name} over all tokens is not the sum over slices of them; return a sum, not a mean, in which no token's "
                "term depends on other tokens"
            )


def _check_advantage(config: RlConfig) -> None:
    """Evaluate the advantage on a group with different rewards and one with equal rewards; with `group_size: 1`, also on one response."""
    function = _load_advantage(config)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, -2.0], dtype=torch.float64)
    arguments = (rewards, torch.tensor([0, 0, 0, 0, 1, 1, 2]), torch.tensor([3, 1, 4, 1, 5, 0, 2]))
    if config.group_size > 1:
        arguments = (arguments[0][:6], arguments[1][:6], arguments[2][:6])
    _run_user_code(lambda: _call_advantage(function, arguments, config), function, config.advantage, ADVANTAGE, UserError)


def _load_function(reference: str, arguments: tuple[str, ...], options: Mapping[str, object], field: str) -> Callable[..., object]:
    function = load(reference, field)
    if not callable(function):
        raise UserError(f"{field}: {reference} is {type(function).__name__}, not a function; name a function")
    check_call(function, arguments, options, field)
    return function


def _load_advantage(config: RlConfig) -> Callable[..., object]:
    return _load_function(config.advantage, ("rewards", "groups", "lengths"), config.advantage_args, ADVANTAGE)


def _run_user_code[T](
    call: Callable[[], T], function: object, reference: str, field: str, failure: type[UserError] | type[RuntimeFailure]
) -> T:
    """The result of calling user code. Raises `failure`, with file and line, if it raises or returns an invalid result."""
    try:
        return call()
    except _InvalidResult as error:
        raise failure(f"{field}: {location_of(function)}: {error}") from error
    except Exception as error:
        raise failure(f"{field}: {describe_error(error, reference)}") from error


def _call_loss(function: Callable[..., object], logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig) -> LossOut:
    out = function(logprob, entropy, terms, config, **config.loss_args)
    if not isinstance(out, LossOut):
        raise _InvalidResult(f"it returned {type(out).__name__}; return LossOut(loss_sum, sums) of mtpctl.rl.losses")
    for name, value in {"loss_sum": out.loss_sum, **out.sums}.items():
        if not isinstance(value, Tensor) or value.dim():
            raise _InvalidResult(f"{name} is {_describe(value)}; return a sum, a tensor without dimensions")
    return out


def _call_advantage(function: Callable[..., object], arguments: tuple[Tensor, Tensor, Tensor], config: RlConfig) -> Tensor:
    out = function(*(argument.clone() for argument in arguments), **config.advantage_args)
    count = len(arguments[0])
    if not isinstance(out, Tensor) or out.shape != (count,):
        raise _InvalidResult(
            f"it returned {_describe(out)} for {count} responses; return one advantage per response, a tensor of shape [{count}]"
        )
    if not torch.isfinite(out).all():
        raise _InvalidResult(
            f"it returned {out[~torch.isfinite(out)][0].item()} for rewards of {arguments[0].min():g} to {arguments[0].max():g}; "
            "check for a division by 0, as in a group of equal rewards"
        )
    return out.detach().double()


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _loss_and_gradient(
    function: Callable[..., object], location: str, logprob: Tensor, entropy: Tensor, terms: TokenTerms, config: RlConfig
) -> tuple[LossOut, Tensor]:
    """The loss of some tokens of the example, and its gradient with respect to their log-probs. Raises UserError."""
    logprob.requires_grad_()
    entropy.requires_grad_()
    out = _run_user_code(lambda: _call_loss(function, logprob, entropy, terms, config), function, config.loss, LOSS, UserError)
    for name, value in {"loss_sum": out.loss_sum, **out.sums}.items():
        if not torch.isfinite(value):
            raise UserError(f"{location}: {name} is {value.item()} for ordinary log-probs; check for a division by 0 or the log of 0")
    if not out.loss_sum.requires_grad:
        return out, torch.zeros_like(logprob)
    gradients = torch.autograd.grad(out.loss_sum, (logprob, entropy), allow_unused=True)
    for gradient in gradients:
        if gradient is not None and not torch.isfinite(gradient).all():
            raise UserError(f"{location}: its gradient is not finite for ordinary log-probs; check for a root or a division by 0")
    return out, torch.zeros_like(logprob) if gradients[0] is None else gradients[0]


def _example_tokens(config: RlConfig) -> tuple[TokenTerms, Tensor, Tensor]:
    """Twelve tokens, three of them not trained, with advantages of both signs and 0, and log-probs close to the anchor and far from it."""
    generator = torch.Generator().manual_seed(0)
    count = 12

    def perturb(logprob: Tensor) -> Tensor:
        return logprob + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)

    logprob = -torch.rand(count, generator=generator, dtype=torch.float64) - 0.1
    aggregation = torch.ones(count, dtype=torch.float64)
    if config.aggregate == "sequence":
        aggregation /= 4
    aggregation[[0, 5, 11]] = 0.0
    terms = TokenTerms(
        anchor=perturb(logprob),
        advantage=torch.tensor([1.0, -0.7, 0.0, 0.4], dtype=torch.float64).repeat_interleave(3),
        weight=torch.ones(count, dtype=torch.float64),
        aggregation=aggregation,
        ref_logprob=perturb(logprob) if config.kl_coef else None,
        behaviour=perturb(logprob),
        same_weights=torch.ones(count, dtype=torch.float64),
    )
    return terms, logprob, torch.rand(count, generator=generator, dtype=torch.float64)
