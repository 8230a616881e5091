"""User-defined losses and advantages: they train like built-in ones, and mistakes are reported with file and line before a run starts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.rl import ADVANTAGES, LOSSES, RlConfig
from mtpctl.rl import user_objective
from mtpctl.rl.advantages import group_advantages
from mtpctl.rl.losses import loss_metrics, policy_loss, token_policy_loss, token_terms
from mtpctl.rl.user_objective import check_objective, compute_advantages, load_loss
from tests.fakes import user_losses
from tests.fakes.policy_batch import batch, rl_config

FILE = str(Path(user_losses.__file__))
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 5.0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 2])


def with_loss(name: str, **settings: object) -> RlConfig:
    return rl_config(loss=f"{FILE}:{name}", **settings)


def with_advantage(name: str, **settings: object) -> RlConfig:
    return rl_config(advantage=f"{FILE}:{name}", **settings)


def line_of(name: str) -> int:
    return inspect.getsourcelines(getattr(user_losses, name))[1]


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ["squared", "plain", "built_in"])
def test_valid_loss_passes_the_check(name: str, aggregate: str) -> None:
    check_objective(with_loss(name, aggregate=aggregate))
    check_objective(with_loss(name, aggregate=aggregate, entropy_coef=0.1, kl_coef=0.1))


@pytest.mark.parametrize("loss", LOSSES)
def test_built_in_loss_is_used_as_it_is_and_would_pass_the_check(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rl_config(loss=loss, entropy_coef=0.1, kl_coef=0.1)
    assert load_loss(config) is token_policy_loss
    check_objective(config)
    monkeypatch.setattr(user_objective, "_load_function", lambda *_: token_policy_loss)
    user_objective._check_loss(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", f"user_losses.py:{line_of('raises') + 1}: AttributeError: 'TokenTerms' object has no attribute 'old_logprob'"),
        ("mean", "its loss over all tokens is not the sum over slices of them; return a sum, not a mean"),
        ("by_batch", "its loss over all tokens is not the sum over slices of them"),
        ("unmasked", "the gradient at tokens that are not trained is 1; multiply each token's term by terms.aggregation"),
        ("detached", "no token has a gradient; compute the loss from `logprob` itself, not from a detached copy"),
        ("not_a_number", "loss_sum is nan for ordinary log-probs"),
        ("no_gradient_at_0", "its gradient is not finite for ordinary log-probs"),
        ("per_token", "loss_sum is a tensor of shape [12]; return a sum, a tensor without dimensions"),
        ("a_tensor", "it returned Tensor; return LossOut(loss_sum, sums) of mtpctl.rl.losses"),
        ("a_float", "mine is float; return a sum, a tensor without dimensions"),
        ("changing_names", "the names of its sums differ between slices of tokens (any); always return the same names"),
    ],
)
def test_mistake_in_a_loss_is_one_line_with_file_and_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_objective(with_loss(name))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert re.match(rf"train\.rl\.loss: user_losses\.py:({line_of(name)}|{line_of(name) + 1}): ", str(caught.value))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("advantage_raises", f"user_losses.py:{line_of('advantage_raises') + 1}: IndexError: "),
        ("advantage_list", "it returned list for 6 responses; return one advantage per response, a tensor of shape [6]"),
        ("advantage_per_group", "it returned a tensor of shape [2] for 6 responses"),
        ("advantage_divides", "it returned nan for rewards of 0 to 1; check for a division by 0, as in a group of equal rewards"),
    ],
)
def test_mistake_in_an_advantage_is_one_line_with_file_and_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_objective(with_advantage(name))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert re.match(rf"train\.rl\.advantage: user_losses\.py:({line_of(name)}|{line_of(name) + 1}): ", str(caught.value))


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("loss", "squard", "defines no squard; did you mean squared?"),
        ("loss", "NOT_A_FUNCTION", "is int, not a function; name a function"),
        ("loss", "old_signature", "cannot be called as old_signature(logprob, entropy, terms, config): too many positional arguments"),
        ("advantage", "NOT_A_FUNCTION", "is int, not a function; name a function"),
        ("advantage", "squared", "cannot be called as squared(rewards, groups, lengths): missing a required argument: 'config'"),
    ],
)
def test_reference_that_is_no_objective_is_refused(key: str, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_objective(RlConfig.model_validate({key: f"{FILE}:{name}"}))
    assert message in str(caught.value) and str(caught.value).startswith(f"train.rl.{key}: ")


def test_arguments_come_from_the_recipe_and_must_fit() -> None:
    inputs = batch()
    light, heavy = (with_loss("squared", loss_args={"weight": weight}) for weight in (0.0, 2.0))
    terms = token_terms(inputs, light)
    values = [load_loss(config)(inputs.logprob, inputs.entropy, terms, config).loss_sum for config in (light, heavy)]
    penalty = ((inputs.logprob - inputs.old_logprob) ** 2 * inputs.mask).sum()
    torch.testing.assert_close(values[1] - values[0], 2 * penalty)
    single, double = (with_advantage("leave_one_out", advantage_args={"scale": scale}) for scale in (1.0, 2.0))
    values = [compute_advantages(REWARDS, GROUPS, LENGTHS, config) for config in (single, double)]
    torch.testing.assert_close(values[1], 2 * values[0])
    for config in (with_loss("squared", loss_args={"wieght": 1.0}), with_advantage("leave_one_out", advantage_args={"wieght": 1.0})):
        with pytest.raises(UserError, match="got an unexpected keyword argument 'wieght'"):
            check_objective(config)


def test_token_policy_loss_called_by_a_user_defined_loss_is_ppo() -> None:
    inputs, config = batch(), with_loss("built_in")
    out = load_loss(config)(inputs.logprob, inputs.entropy, token_terms(inputs, config), config)
    torch.testing.assert_close(out.loss_sum, policy_loss(inputs, rl_config()).loss_sum)


def test_sums_of_a_user_defined_loss_become_metrics() -> None:
    inputs, config = batch(), with_loss("squared")
    metrics = loss_metrics(load_loss(config)(inputs.logprob, inputs.entropy, token_terms(inputs, config), config).sums)
    far = ((inputs.logprob - inputs.old_logprob).abs() > 0.2) & inputs.mask.bool()
    assert metrics["actor/far"] == pytest.approx(float(far.sum() / inputs.mask.sum()))
    assert {"actor/pg_loss", "actor/ratio_mean", "actor/ppo_kl", "actor/entropy"} <= metrics.keys()
    assert "actor/clip_fraction_high" not in metrics


def test_loss_without_sums_has_only_the_required_metrics() -> None:
    inputs, config = batch(), with_loss("plain")
    out = load_loss(config)(inputs.logprob, inputs.entropy, token_terms(inputs, config), config)
    assert loss_metrics(out.sums) == {"actor/pg_loss": pytest.approx(float(out.loss_sum.detach() / inputs.mask.sum()))}


def test_failure_during_training_ends_the_run_with_file_and_line() -> None:
    inputs, config = batch(), with_loss("raises")
    with pytest.raises(RuntimeFailure, match=rf"train\.rl\.loss: user_losses\.py:{line_of('raises') + 1}: AttributeError"):
        load_loss(config)(inputs.logprob, None, token_terms(inputs, config), config)
    config = with_loss("a_tensor")
    with pytest.raises(RuntimeFailure, match=rf"user_losses\.py:{line_of('a_tensor')}: it returned Tensor"):
        load_loss(config)(inputs.logprob, None, token_terms(inputs, config), config)
    name = "advantage_divides"
    with pytest.raises(RuntimeFailure, match=rf"train\.rl\.advantage: user_losses\.py:{line_of(name)}: it returned nan"):
        compute_advantages(torch.ones(2), torch.tensor([0, 0]), torch.tensor([1, 1]), with_advantage(name))


def test_user_defined_advantage_replaces_the_built_in_one() -> None:
    config = with_advantage("leave_one_out")
    check_objective(config)
    torch.testing.assert_close(compute_advantages(REWARDS, GROUPS, LENGTHS, config), group_advantages(REWARDS, GROUPS, "rloo", LENGTHS))
    for kind in ADVANTAGES:
        built_in = compute_advantages(REWARDS, GROUPS, LENGTHS, RlConfig(advantage=kind))
        assert torch.equal(built_in, group_advantages(REWARDS, GROUPS, kind, LENGTHS))


def test_user_defined_advantage_gets_copies() -> None:
    rewards = REWARDS.double()
    compute_advantages(rewards, GROUPS, LENGTHS, with_advantage("advantage_in_place"))
    assert torch.equal(rewards, REWARDS.double())


def test_user_defined_advantage_accepts_groups_of_one_response() -> None:
    recipe = RlConfig.model_validate({"advantage": f"{FILE}:advantage_in_place", "group_size": 1, "dynamic_sampling": False})
    check_objective(recipe)
    with pytest.raises(UserError, match="it returned nan for rewards of -2 to 1"):
        check_objective(with_advantage("leave_one_out", group_size=1, dynamic_sampling=False))
