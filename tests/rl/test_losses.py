"""Policy losses: hand-computed values, gradients, and equivalences between losses."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.losses import LossInputs, kl_estimate, loss_denominator, loss_metrics, policy_loss, token_policy_loss, token_terms
from tests.fakes.policy_batch import LENGTHS, batch, rl_config


def select(inputs: LossInputs, index: Tensor | slice, first: int, count: int) -> LossInputs:
    """The tokens at `index`, with the responses renumbered from `first`."""
    parts: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        parts[field.name] = value[index] if isinstance(value, Tensor) else value
    return replace(LossInputs(**parts), seq_ids=inputs.seq_ids[index] - first, num_sequences=count)


def gradient(inputs: LossInputs, config: RlConfig) -> Tensor:
    (grad,) = torch.autograd.grad(policy_loss(inputs, config).loss_sum, inputs.logprob)
    return grad


def one_token(ratio: float, advantage: float, **config: Any) -> tuple[float, float]:
    """Loss and its gradient by the log-prob, of a single token with this ratio."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    inputs = LossInputs(
        logprob=(old + math.log(ratio)).requires_grad_(),
        old_logprob=old,
        behaviour_logprob=old,
        advantage=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.ones(1),
        seq_ids=torch.zeros(1, dtype=torch.long),
        num_sequences=1,
    )
    loss = policy_loss(inputs, rl_config(**config)).loss_sum
    (grad,) = torch.autograd.grad(loss, inputs.logprob)
    return loss.item(), grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the band: -A r, and d/dlogp of it
        (1.25, 2.0, -2.5, -2.5),  # above 1 + clip_low, still under 1 + clip_high: clip-higher lets it rise
        (1.4, 2.0, -2.56, 0.0),  # cut at 1.28
        (0.5, 2.0, -1.0, -1.0),  # a good token that fell is always pulled back
        (0.7, -2.0, 1.6, 0.0),  # cut at 0.8
        (0.9, -2.0, 1.8, 1.8),
        (5.0, -2.0, 10.0, 10.0),  # a bad token that rose is not bounded without the dual clip
    ],
)
def test_clip_matches_hand_computed_values(ratio: float, advantage: float, loss: float, grad: float) -> None:
    assert one_token(ratio, advantage, clip_low=0.2, clip_high=0.28) == pytest.approx((loss, grad))


def test_dual_clip_matches_hand_computed_values() -> None:
    assert one_token(5.0, -2.0, clip_dual=3.0) == pytest.approx((6.0, 0.0))
    assert one_token(2.0, -2.0, clip_dual=3.0) == pytest.approx((4.0, 4.0))
    assert one_token(5.0, 2.0, clip_dual=3.0) == one_token(5.0, 2.0)


def test_clip_higher_is_asymmetric() -> None:
    symmetric = {"clip_low": 0.2, "clip_high": 0.2}
    higher = {"clip_low": 0.2, "clip_high": 0.28}
    assert one_token(1.25, 1.0, **symmetric)[1] == 0.0
    assert one_token(1.25, 1.0, **higher)[1] == pytest.approx(-1.25)
    assert one_token(0.75, -1.0, **symmetric) == one_token(0.75, -1.0, **higher)


@pytest.mark.parametrize("loss", ["ppo", "decoupled", "cispo", "sapo"])
def test_on_policy_gradient_is_reinforce_with_advantages(loss: str) -> None:
    inputs = batch()
    inputs = replace(inputs, old_logprob=inputs.logprob.detach(), behaviour_logprob=inputs.logprob.detach())
    expected = -inputs.advantage * inputs.mask
    torch.testing.assert_close(gradient(inputs, rl_config(loss=loss)), expected)  # type: ignore[arg-type]


def test_on_policy_gspo_gradient_is_reinforce_with_sequence_means() -> None:
    inputs = batch()
    inputs = replace(inputs, old_logprob=inputs.logprob.detach())
    length = torch.zeros(3, dtype=torch.float64).index_add_(0, inputs.seq_ids, inputs.mask)[inputs.seq_ids]
    expected = -inputs.advantage * inputs.mask / length
    torch.testing.assert_close(gradient(inputs, rl_config(loss="gspo", aggregate="sequence")), expected)


def test_gspo_is_the_loss_of_its_paper_in_value_and_gradient() -> None:
    """Equation 5 and 7 of arXiv 2507.18071, written per response, gradient through the ratio itself."""
    inputs = batch()
    config = rl_config(loss="gspo", aggregate="sequence", clip_low=0.03, clip_high=0.04)
    total = torch.zeros((), dtype=torch.float64)
    for s in range(3):
        keep = (inputs.seq_ids == s) & inputs.mask.bool()
        ratio = (inputs.logprob - inputs.old_logprob)[keep].mean().exp()
        advantage = inputs.advantage[keep][0]
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.97, 1.04) * advantage)
    out = policy_loss(inputs, config)
    torch.testing.assert_close(out.loss_sum, total)
    (expected,) = torch.autograd.grad(total, inputs.logprob)
    assert 0 < expected.count_nonzero() < int(inputs.mask.sum()), "the case must hold clipped and unclipped responses"
    torch.testing.assert_close(gradient(inputs, config), expected)


def test_cispo_matches_hand_computed_values() -> None:
    """The weight is bounded, and every token keeps a gradient: those that PPO would have cut as well."""
    cispo = {"loss": "cispo", "clip_low": 0.5, "clip_high": 1.0}
    log2 = math.log(2.0)
    assert one_token(2.0, 3.0, **cispo) == pytest.approx((-2.0 * 3.0 * (log2 - 2.0), -6.0))
    assert one_token(4.0, 3.0, **cispo) == pytest.approx((-2.0 * 3.0 * (2 * log2 - 2.0), -6.0))
    assert one_token(0.25, -3.0, **cispo) == pytest.approx((0.5 * 3.0 * (-2 * log2 - 2.0), 1.5))
    assert one_token(0.25, -3.0, loss="cispo", clip_low=1.0, clip_high=1.0)[1] == pytest.approx(0.75)
    assert one_token(4.0, 3.0, clip_high=1.0)[1] == 0.0


def test_cispo_is_the_gradient_of_its_papers_equation() -> None:
    """Equations 4 and 5 of arXiv 2506.13585, by autograd in float64."""
    inputs = batch(spread=0.8)
    config = rl_config(loss="cispo", clip_low=0.3, clip_high=0.4)
    ratio = (inputs.logprob - inputs.old_logprob).exp()
    weight = ratio.clamp(1 - 0.3, 1 + 0.4).detach()
    objective = (weight * inputs.advantage * inputs.logprob * inputs.mask).sum()
    out = policy_loss(inputs, config)
    torch.testing.assert_close(out.loss_sum, -objective)
    (expected,) = torch.autograd.grad(-objective, inputs.logprob)
    torch.testing.assert_close(gradient(inputs, config), expected)
    outside = ((ratio < 0.7) | (ratio > 1.4)) & inputs.mask.bool()
    assert 0 < outside.sum() < inputs.mask.sum(), "the case must hold bounded and free weights"
    assert (expected[outside] != 0).all()
    assert out.sums["clip_low"] + out.sums["clip_high"] == outside.sum()


def test_sapo_is_the_loss_of_its_paper_in_value_and_gradient() -> None:
    """f(r) = sigmoid(τ (r - 1)) · 4/τ of arXiv 2511.20347, mean by response, by autograd in float64."""
    inputs = batch(spread=0.8)
    config = rl_config(loss="sapo", aggregate="sequence", tau_pos=1.5, tau_neg=3.0)
    total = torch.zeros((), dtype=torch.float64)
    for s in range(3):
        keep = (inputs.seq_ids == s) & inputs.mask.bool()
        ratio = (inputs.logprob - inputs.old_logprob)[keep].exp()
        advantage = inputs.advantage[keep]
        tau = 1.5 if advantage[0] > 0 else 3.0
        total = total - (4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage).mean()
    out = policy_loss(inputs, config)
    torch.testing.assert_close(out.loss_sum, total)
    torch.testing.assert_close(gradient(inputs, config), torch.autograd.grad(total, inputs.logprob)[0])


def test_sapo_gate_decreases_on_both_sides_and_faster_for_negative_advantages() -> None:
    sapo = {"loss": "sapo", "tau_pos": 1.0, "tau_neg": 2.0}
    for ratio in (0.3, 1.0, 1.7, 3.0):
        for advantage, tau in ((2.0, 1.0), (-2.0, 2.0)):
            p = 1 / (1 + math.exp(-tau * (ratio - 1)))
            assert one_token(ratio, advantage, **sapo)[1] == pytest.approx(-advantage * ratio * 4 * p * (1 - p))
    assert abs(one_token(3.0, -2.0, **sapo)[1]) < abs(one_token(3.0, 2.0, **sapo)[1])
    assert one_token(1.0, 0.0, **sapo) == (0.0, 0.0)


def test_sapo_metric_is_the_remaining_share_of_the_gradient() -> None:
    inputs = batch()
    on_policy = replace(inputs, old_logprob=inputs.logprob.detach())
    assert loss_metrics(policy_loss(on_policy, rl_config(loss="sapo")).sums)["actor/gate"] == pytest.approx(1.0)
    far = replace(inputs, old_logprob=inputs.logprob.detach() - 3.0)
    assert loss_metrics(policy_loss(far, rl_config(loss="sapo")).sums)["actor/gate"] < 1e-3


def test_correction_weights_every_loss() -> None:
    inputs = batch()
    rho = (inputs.old_logprob - inputs.behaviour_logprob).exp().clamp(max=1.1)
    for loss in ("ppo", "cispo", "sapo"):
        plain, corrected = (gradient(inputs, rl_config(loss=loss, correction=c)) for c in ({}, {"mode": "truncate", "high": 1.1}))  # type: ignore[arg-type]
        torch.testing.assert_close(corrected, plain * rho)


def test_dr_grpo_is_the_sum_over_tokens_divided_by_responses_and_the_longest_response() -> None:
    """arXiv 2503.20783 as in its code: no mean over a response's own length, and so no favour to long wrong responses."""
    config = rl_config(preset="dr_grpo")
    inputs = batch()
    inputs = replace(inputs, old_logprob=inputs.logprob.detach())
    loss = policy_loss(inputs, config).loss_sum / loss_denominator(config, tokens=12, trajectories=3, max_tokens=16)
    expected = torch.stack([-(inputs.advantage * inputs.mask)[inputs.seq_ids == s].sum() / 16 for s in range(3)]).mean()
    torch.testing.assert_close(loss, expected)


def test_decoupled_is_ppo_against_the_proximal_policy_weighted_by_proximal_over_behaviour() -> None:
    inputs = batch()
    rho = (inputs.old_logprob - inputs.behaviour_logprob).exp()
    expected = gradient(inputs, rl_config(loss="ppo")) * rho
    torch.testing.assert_close(gradient(inputs, rl_config(loss="decoupled")), expected)
    on_time = replace(inputs, behaviour_logprob=inputs.old_logprob)
    torch.testing.assert_close(gradient(on_time, rl_config(loss="decoupled")), gradient(on_time, rl_config(loss="ppo")))


def test_ppo_with_a_correction_is_decoupled_with_the_same() -> None:
    inputs = batch()
    for mode in ("truncate", "clip", "mask"):
        correction = {"mode": mode, "low": 0.8, "high": 1.2}
        ppo, decoupled = (gradient(inputs, rl_config(loss=loss, correction=correction)) for loss in ("ppo", "decoupled"))  # type: ignore[arg-type]
        torch.testing.assert_close(ppo, decoupled)
        assert not torch.allclose(ppo, gradient(inputs, rl_config(loss="ppo")))


@pytest.mark.parametrize("loss", ["ppo", "decoupled"])
def test_unresolved_correction_is_an_error(loss: Literal["ppo", "decoupled"]) -> None:
    with pytest.raises(ValueError, match=r"correction.mode: auto is not resolved"):
        policy_loss(batch(), RlConfig(loss=loss))


def test_ppo_without_correction_ignores_the_behaviour_policy() -> None:
    inputs = batch()
    other = replace(inputs, behaviour_logprob=torch.full_like(inputs.behaviour_logprob, float("nan")))
    torch.testing.assert_close(gradient(other, rl_config()), gradient(inputs, rl_config()))


def test_entropy_bonus_and_kl_penalty_by_definition() -> None:
    inputs = batch()
    plain = policy_loss(inputs, rl_config()).loss_sum
    with_entropy = policy_loss(inputs, rl_config(entropy_coef=0.3)).loss_sum
    torch.testing.assert_close(with_entropy, plain - 0.3 * (inputs.entropy * inputs.mask).sum())  # type: ignore[operator]
    assert inputs.ref_logprob is not None
    for kind in ("k2", "k3"):
        with_kl = policy_loss(inputs, rl_config(kl_coef=0.2, kl_estimator=kind)).loss_sum  # type: ignore[arg-type]
        penalty = (kl_estimate(inputs.logprob, inputs.ref_logprob, kind) * inputs.mask).sum()  # type: ignore[arg-type]
        torch.testing.assert_close(with_kl, plain + 0.2 * penalty)


def test_missing_entropy_or_reference_is_an_error() -> None:
    inputs = replace(batch(), entropy=None, ref_logprob=None)
    with pytest.raises(ValueError, match="entropy_coef"):
        policy_loss(inputs, rl_config(entropy_coef=0.1))
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(inputs, rl_config(kl_coef=0.1))


EVERY_LOSS = [
    rl_config(),
    rl_config(clip_dual=1.05, entropy_coef=0.1, kl_coef=0.1),
    rl_config(aggregate="sequence", kl_coef=0.1, kl_estimator="k2"),
    rl_config(loss="gspo", aggregate="sequence", clip_low=0.03, clip_high=0.04),
    rl_config(loss="decoupled", correction={"mode": "truncate", "high": 1.1}),
    rl_config(loss="sapo", aggregate="sequence", tau_neg=2.0, entropy_coef=0.1, kl_coef=0.1),
    rl_config(loss="cispo", clip_low=1.0, clip_high=0.3, entropy_coef=0.1, kl_coef=0.1, aggregate="constant"),
    rl_config(correction={"mode": "mask", "level": "sequence", "low": 0.5, "high": 1.5}, aggregate="sequence"),
]


@pytest.mark.parametrize("config", [config for config in EVERY_LOSS if config.loss != "cispo"])
def test_gradients_by_finite_differences(config: RlConfig) -> None:
    """With the terms held, the gradient is that of the value, gspo's token form included. That of cispo is not, by definition."""
    inputs = batch()
    terms = token_terms(inputs, config)
    assert inputs.entropy is not None
    assert torch.autograd.gradcheck(lambda p, e: token_policy_loss(p, e, terms, config).loss_sum, (inputs.logprob, inputs.entropy))


@pytest.mark.parametrize("config", EVERY_LOSS)
def test_losses_of_microbatches_add_up(config: RlConfig) -> None:
    inputs = batch()
    whole = policy_loss(inputs, config)
    expected = torch.autograd.grad(whole.loss_sum, inputs.logprob)[0]
    parts = [select(inputs, slice(0, LENGTHS[0]), 0, 1), select(inputs, slice(LENGTHS[0], None), 1, 2)]
    outs = [policy_loss(part, config) for part in parts]
    torch.testing.assert_close(outs[0].loss_sum + outs[1].loss_sum, whole.loss_sum)
    torch.testing.assert_close(torch.autograd.grad(outs[0].loss_sum + outs[1].loss_sum, inputs.logprob)[0], expected)
    assert loss_metrics({name: outs[0].sums[name] + outs[1].sums[name] for name in whole.sums}) == pytest.approx(loss_metrics(whole.sums))


@pytest.mark.parametrize("config", EVERY_LOSS)
def test_token_part_is_additive_over_slices(config: RlConfig) -> None:
    """What a fused kernel does: chunks that cut through responses, with the terms worked out before."""
    inputs = batch()
    terms = token_terms(inputs, config)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in (slice(0, 3), slice(3, 9), slice(9, None)):
        cut = terms.at(torch.arange(len(inputs.mask))[chunk])
        assert inputs.entropy is not None
        total = total + token_policy_loss(inputs.logprob[chunk], inputs.entropy[chunk], cut, config).loss_sum
    whole = policy_loss(inputs, config).loss_sum
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs.logprob)[0] for x in (total, whole)))


@pytest.mark.parametrize("config", EVERY_LOSS)
def test_values_at_untrained_tokens_do_not_matter(config: RlConfig) -> None:
    inputs = batch()
    expected = policy_loss(inputs, config)
    hole = inputs.mask == 0
    spoiled = {
        name: getattr(inputs, name).detach().masked_fill(hole, float("-inf")).requires_grad_(name in ("logprob", "entropy"))
        for name in ("logprob", "old_logprob", "behaviour_logprob", "entropy", "ref_logprob")
    }
    other = replace(inputs, advantage=inputs.advantage.masked_fill(hole, 1e9), **spoiled)
    out = policy_loss(other, config)
    torch.testing.assert_close(out.loss_sum, expected.loss_sum)
    grad = gradient(other, config)
    assert torch.all(grad[hole] == 0)
    torch.testing.assert_close(grad, gradient(inputs, config))


@pytest.mark.parametrize("config", EVERY_LOSS)
def test_response_without_trained_tokens_does_not_change_the_loss(config: RlConfig) -> None:
    inputs = batch()
    rest = slice(0, sum(LENGTHS[:2]))
    expected = policy_loss(select(inputs, rest, 0, 2), config)
    inputs = replace(inputs, mask=inputs.mask * (inputs.seq_ids < 2))
    out = policy_loss(inputs, config)
    torch.testing.assert_close(out.loss_sum, expected.loss_sum)
    assert {name: float(value) for name, value in out.sums.items()} == pytest.approx(
        {name: float(value) for name, value in expected.sums.items()}
    )
    assert gradient(inputs, config)[rest.stop :].abs().max() == 0


@pytest.mark.parametrize(("aggregate", "weight"), [("token", 4.0), ("sequence", 2.0)])
def test_penalties_and_metrics_are_aggregated_like_the_policy_loss(aggregate: str, weight: float) -> None:
    old = torch.full((4,), -1.0)
    inputs = LossInputs(
        logprob=old,
        old_logprob=old,
        behaviour_logprob=old,
        advantage=torch.full((4,), -1.0),
        mask=torch.ones(4),
        seq_ids=torch.tensor([0, 1, 1, 1]),
        num_sequences=2,
        entropy=torch.full((4,), 3.0),
        ref_logprob=old - 0.5,
    )
    config = rl_config(aggregate=aggregate, entropy_coef=0.1, kl_coef=0.2, kl_estimator="k2")  # type: ignore[arg-type]
    out = policy_loss(inputs, config)
    assert float(out.loss_sum) == pytest.approx(weight * (1.0 - 0.1 * 3.0 + 0.2 * 0.125))
    assert loss_metrics(out.sums)["actor/pg_loss"] == pytest.approx(1.0)
    assert loss_metrics(out.sums)["actor/ref_kl"] == pytest.approx(0.125)


def test_sequence_mean_weights_responses_equally_and_token_mean_tokens() -> None:
    inputs = batch()
    inputs = replace(inputs, old_logprob=inputs.logprob.detach(), advantage=torch.ones_like(inputs.advantage))
    token, sequence = (gradient(inputs, rl_config(aggregate=kind)) for kind in ("token", "sequence"))  # type: ignore[arg-type]
    per_response = torch.zeros(3, dtype=torch.float64).index_add_(0, inputs.seq_ids, sequence)
    torch.testing.assert_close(per_response, -torch.ones(3, dtype=torch.float64))
    assert set(token[inputs.mask.bool()].tolist()) == {-1.0}
    for kind, expected in (("token", 10), ("sequence", 3), ("constant", 3 * 8)):
        assert loss_denominator(rl_config(aggregate=kind), tokens=10, trajectories=3, max_tokens=8) == expected  # type: ignore[arg-type]
        assert loss_denominator(rl_config(aggregate=kind), tokens=0, trajectories=0, max_tokens=8) == 1  # type: ignore[arg-type]


def test_sequence_mean_uses_the_length_of_the_trajectory() -> None:
    """The first two responses are samples of one trajectory, of 5 trained tokens each, the third has another."""
    inputs = batch()
    inputs = replace(inputs, old_logprob=inputs.logprob.detach(), advantage=torch.ones_like(inputs.advantage))
    lengths = torch.zeros(3, dtype=torch.float64).index_add_(0, inputs.seq_ids, inputs.mask)
    of = torch.tensor([lengths[0] + lengths[1], lengths[0] + lengths[1], lengths[2]])
    grad = gradient(replace(inputs, trajectory_tokens=of[inputs.seq_ids]), rl_config(aggregate="sequence"))
    per_sample = torch.zeros(3, dtype=torch.float64).index_add_(0, inputs.seq_ids, grad)
    assert per_sample[0] + per_sample[1] == pytest.approx(-1.0) and per_sample[2] == pytest.approx(-1.0)


def test_metrics_match_hand_computed_values() -> None:
    old = torch.full((4,), -1.0)
    inputs = LossInputs(
        logprob=old + torch.tensor([1.5, 0.5, 5.0, 1.0]).log(),
        old_logprob=old,
        behaviour_logprob=old,
        advantage=torch.tensor([1.0, -1.0, -1.0, 1.0]),
        mask=torch.ones(4),
        seq_ids=torch.arange(4),
        num_sequences=4,
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        ref_logprob=old,
    )
    metrics = loss_metrics(policy_loss(inputs, rl_config(clip_dual=3.0)).sums)
    assert metrics["actor/clip_fraction_high"] == 0.25
    assert metrics["actor/clip_fraction_low"] == 0.25
    assert metrics["actor/clip_fraction_dual"] == 0.25
    assert metrics["actor/ratio_mean"] == pytest.approx(2.0)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.5 * 0.5 * 5.0) / 4)
    assert metrics["actor/pg_loss"] == pytest.approx((-1.28 + 0.8 + 3.0 - 1.0) / 4)
    assert metrics["actor/entropy"] == 2.5


@pytest.mark.parametrize(("loss", "gradient_at"), [("ppo", 0.0), ("decoupled", 0.0), ("sapo", 0.0), ("cispo", 1.28)])
def test_log_ratio_beyond_the_bound_has_a_gradient_only_with_cispo(loss: str, gradient_at: float) -> None:
    """The advantage is negative, so PPO clips no ratio above 1."""
    assert one_token(math.exp(20.5), -1.0, loss=loss)[1] == pytest.approx(gradient_at)
    if loss in ("ppo", "decoupled"):
        assert one_token(math.exp(19.5), -1.0, loss=loss)[1] == pytest.approx(math.exp(19.5))
    assert all(map(math.isfinite, one_token(math.exp(30.0), -1.0, loss=loss)))


@pytest.mark.parametrize(("level", "exact"), [("sequence", True), ("token", False)])
def test_gspo_with_a_token_correction_is_gspo_token_with_weighted_advantages(level: str, exact: bool) -> None:
    """The paper's GSPO-token (section 4.3) with an advantage w A for each token; with a weight a response, GSPO itself."""
    inputs = batch(spread=0.1)
    correction = {"mode": "truncate", "level": level, "high": 1.1}
    config = rl_config(loss="gspo", aggregate="sequence", clip_low=0.03, clip_high=0.04, correction=correction)  # type: ignore[arg-type]
    token_form, sequence_form = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for s in range(3):
        keep = (inputs.seq_ids == s) & inputs.mask.bool()
        log_ratio = (inputs.logprob - inputs.old_logprob)[keep]
        rho = (inputs.old_logprob - inputs.behaviour_logprob)[keep]
        weight = (rho.sum() if level == "sequence" else rho).exp().clamp(max=1.1)
        advantage = weight * inputs.advantage[keep][0]
        ratio = log_ratio.mean().detach().exp() * (log_ratio - log_ratio.detach()).exp()
        token_form = token_form - torch.minimum(ratio * advantage, ratio.clamp(0.97, 1.04) * advantage).mean()
        ratio = log_ratio.mean().exp()
        whole = advantage.mean()
        sequence_form = sequence_form - torch.minimum(ratio * whole, ratio.clamp(0.97, 1.04) * whole)
    (by_token,) = torch.autograd.grad(token_form, inputs.logprob, retain_graph=True)
    (by_sequence,) = torch.autograd.grad(sequence_form, inputs.logprob)
    grad = gradient(inputs, config)
    torch.testing.assert_close(grad, by_token)
    assert torch.allclose(grad, by_sequence) is exact


def test_kl_estimates_match_their_formulas() -> None:
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_estimate(p, q, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(p, q, "k3").item() == pytest.approx(0.5 + math.log(2) - 1)


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(10000) * 5, torch.randn(10000) * 5
    assert kl_estimate(p, q, "k3").min() > 0
    assert kl_estimate(p, p, "k3").abs().max() == 0


def kl_bias(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bias of the estimator and of its gradient in the logits of p: the exact expectation over the vocabulary minus the true KL."""
    torch.manual_seed(1)
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(9, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    mean = (logp.exp().detach() * kl_estimate(logp, reference, kind)).sum()  # type: ignore[arg-type]
    exact = (logp.exp() * (logp - reference)).sum()
    (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (exact_gradient,) = torch.autograd.grad(exact, logits)
    return mean - exact, gradient - exact_gradient


def test_k3_is_unbiased_and_k2_has_the_true_gradient() -> None:
    assert kl_bias("k3")[0].abs() < 1e-12
    assert kl_bias("k2")[0].abs() > 1e-3
    assert kl_bias("k2")[1].abs().max() < 1e-12
    assert kl_bias("k3")[1].abs().max() > 1e-3


def test_k3_of_policies_far_apart_is_finite() -> None:
    far = kl_estimate(torch.tensor([-500.0]), torch.tensor([0.0]), "k3")
    assert torch.isfinite(far).all()
