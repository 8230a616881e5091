"""A loss of the user's own: trained with as one of ours, and its mistakes told with file and line before anything starts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.rl import LOSSES, RlConfig
from mtpctl.rl.losses import loss_metrics, policy_loss, token_policy_loss, token_terms
from mtpctl.rl.own_loss import check_loss, loss_of
from tests.fakes import own_losses
from tests.rl.test_losses import batch

FILE = str(Path(own_losses.__file__))


def own(name: str, **settings: object) -> RlConfig:
    return RlConfig.model_validate({"loss": f"{FILE}:{name}", **settings})


def line_of(name: str) -> int:
    return inspect.getsourcelines(getattr(own_losses, name))[1]


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ["squared", "plain", "ours"])
def test_what_is_right_passes(name: str, aggregate: str) -> None:
    check_loss(own(name, aggregate=aggregate))
    check_loss(own(name, aggregate=aggregate, entropy_coef=0.1, kl_coef=0.1))


@pytest.mark.parametrize("loss", LOSSES)
def test_ours_are_themselves_and_are_not_tried(loss: str) -> None:
    config = RlConfig(loss=loss)
    assert loss_of(config) is token_policy_loss
    check_loss(config)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_of_ours_would_pass_the_trial(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial asks of a user nothing that our own losses do not hold."""
    config = RlConfig(loss=loss, entropy_coef=0.1, kl_coef=0.1)
    monkeypatch.setattr(RlConfig, "own_loss", True)
    monkeypatch.setattr("mtpctl.rl.own_loss._loaded", lambda config: token_policy_loss)
    check_loss(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", f"own_losses.py:{line_of('raises') + 1}: AttributeError: 'TokenTerms' object has no attribute 'old_logprob'"),
        ("mean", "its loss over all tokens is not the sum over slices of them; return a sum and no mean"),
        ("by_batch", "its loss over all tokens is not the sum over slices of them"),
        ("unmasked", "the gradient at tokens that are not trained is 1; multiply each token's term by terms.aggregation"),
        ("detached", "no token has a gradient; make the loss of `logprob` itself, not of a detached copy"),
        ("not_a_number", "loss_sum is nan for ordinary log-probs"),
        ("no_gradient_at_0", "its gradient is not finite for ordinary log-probs"),
        ("per_token", "loss_sum is a tensor of shape [12]; return a sum, a tensor without dimensions"),
        ("a_tensor", "it returned Tensor; return LossOut(loss_sum, sums) of mtpctl.rl.losses"),
        ("a_float", "mine is float; return a sum, a tensor without dimensions"),
        ("changing_names", "its sums differ in name from one slice of tokens to another (any); return the same names always"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_loss(own(name))
    told = str(caught.value)
    assert message in told and "\n" not in told
    assert re.match(rf"train\.rl\.loss: own_losses\.py:({line_of(name)}|{line_of(name) + 1}): ", told)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squard", "defines no squard; did you mean squared?"),
        ("NOT_A_FUNCTION", "is int, not a function; name one"),
        ("old_signature", "cannot be called as old_signature(logprob, entropy, terms, config): too many positional arguments"),
    ],
)
def test_what_is_no_loss_at_all_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_loss(own(name))
    assert message in str(caught.value) and str(caught.value).startswith("train.rl.loss: ")


def test_arguments_are_the_recipes_and_must_fit() -> None:
    inputs = batch()
    light, heavy = (own("squared", loss_args={"weight": weight}) for weight in (0.0, 2.0))
    terms = token_terms(inputs, light)
    values = [loss_of(config)(inputs.logprob, inputs.entropy, terms, config).loss_sum for config in (light, heavy)]
    penalty = ((inputs.logprob - inputs.old_logprob) ** 2 * inputs.mask).sum()
    torch.testing.assert_close(values[1] - values[0], 2 * penalty)
    with pytest.raises(UserError, match="got an unexpected keyword argument 'wieght'"):
        check_loss(own("squared", loss_args={"wieght": 1.0}))


def test_within_a_loss_of_ones_own_ours_is_that_of_ppo() -> None:
    inputs, config = batch(), own("ours")
    found = loss_of(config)(inputs.logprob, inputs.entropy, token_terms(inputs, config), config)
    torch.testing.assert_close(found.loss_sum, policy_loss(inputs, RlConfig()).loss_sum)


def test_its_sums_become_metrics_beside_the_usual_ones() -> None:
    inputs, config = batch(), own("squared")
    metrics = loss_metrics(loss_of(config)(inputs.logprob, inputs.entropy, token_terms(inputs, config), config).sums)
    far = ((inputs.logprob - inputs.old_logprob).abs() > 0.2) & inputs.mask.bool()
    assert metrics["actor/far"] == pytest.approx(float(far.sum() / inputs.mask.sum()))
    assert {"actor/pg_loss", "actor/ratio_mean", "actor/ppo_kl", "actor/entropy"} <= metrics.keys()
    assert "actor/clip_fraction_high" not in metrics


def test_a_loss_without_sums_has_the_least_metrics() -> None:
    inputs, config = batch(), own("plain")
    out = loss_of(config)(inputs.logprob, inputs.entropy, token_terms(inputs, config), config)
    assert loss_metrics(out.sums) == {"actor/pg_loss": pytest.approx(float(out.loss_sum.detach() / inputs.mask.sum()))}


def test_one_that_raises_while_it_trains_ends_the_run_with_its_line() -> None:
    inputs, config = batch(), own("raises")
    with pytest.raises(RuntimeFailure, match=rf"train\.rl\.loss: own_losses\.py:{line_of('raises') + 1}: AttributeError"):
        loss_of(config)(inputs.logprob, None, token_terms(inputs, config), config)
    config = own("a_tensor")
    with pytest.raises(RuntimeFailure, match=rf"own_losses\.py:{line_of('a_tensor')}: it returned Tensor"):
        loss_of(config)(inputs.logprob, None, token_terms(inputs, config), config)
