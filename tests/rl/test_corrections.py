"""Off-policy weights of two responses of three tokens, one of them not trained; and `rollout_corr/*` against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from mtpctl.recipe.rl import CorrectionConfig
from mtpctl.rl.corrections import correction_weights, mismatch_metrics, mismatch_sums, token_mismatch, token_mismatch_metrics

RATIO = torch.tensor([0.25, 1.0, 3.0, 0.5, 4.0, 7.0])
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
SEQ = torch.tensor([0, 0, 0, 1, 1, 1])


def weights(**config: object) -> list[float]:
    old = torch.full((6,), -9.0)
    out = correction_weights(old, old - RATIO.log(), MASK, SEQ, 2, CorrectionConfig(**config))
    return out.weight[MASK.bool()].tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mode": "off"}, [0.25, 1, 3, 0.5, 4]),
        ({"mode": "truncate", "high": 2.0}, [0.25, 1, 2, 0.5, 2]),
        ({"mode": "truncate", "low": 0.5, "high": 2.0}, [0.25, 1, 2, 0.5, 2]),
        ({"mode": "clip", "low": 0.5, "high": 2.0}, [0.5, 1, 2, 0.5, 2]),
        ({"mode": "mask", "low": 0.4, "high": 3.5}, [0, 1, 3, 0.5, 0]),
        ({"mode": "truncate", "level": "sequence", "high": 1.5}, [0.75, 0.75, 0.75, 1.5, 1.5]),
        ({"mode": "mask", "level": "sequence", "high": 1.5}, [0.75, 0.75, 0.75, 0, 0]),
    ],
)
def test_correction_weights_match_the_formula(config: dict[str, object], expected: list[float]) -> None:
    assert weights(**config) == pytest.approx(expected, rel=1e-5)


def test_equal_policies_have_weight_one_in_every_mode() -> None:
    logprob = torch.randn(6)
    for mode in ("off", "truncate", "clip", "mask"):
        for level in ("token", "sequence"):
            out = correction_weights(logprob, logprob, MASK, SEQ, 2, CorrectionConfig(mode=mode, level=level))  # type: ignore[arg-type]
            assert out.weight.tolist() == [1.0] * 6 and not out.masked.any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_policies_far_apart_have_a_finite_square(level: str) -> None:
    old = torch.full((6,), -1.0)
    config = CorrectionConfig(mode="off", level=level)  # type: ignore[arg-type]
    for behaviour in (old - 500.0, old + 500.0):
        weight = correction_weights(old, behaviour, MASK, SEQ, 2, config).weight[MASK.bool()]
        assert torch.isfinite(weight**2).all() and (weight > 0).all()


def test_untrained_tokens_do_not_affect_the_weight_of_their_response() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0, float("-inf")])
    old = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0, 0.0])
    out = correction_weights(old, behaviour, MASK, SEQ, 2, CorrectionConfig(mode="mask", level="sequence"))
    assert out.weight.tolist() == [1.0] * 6 and not out.masked.any()


def test_unresolved_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"auto is not resolved; use Recipe\.rl instead of train\.rl"):
        weights(mode="auto")


OFF = CorrectionConfig(mode="off")


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    seq = torch.tensor([0] * 5 + [1] * 8 + [2] * 3)
    mask = torch.ones(16)
    mask[[0, 5, 6, 13]] = 0
    old = -torch.rand(16, dtype=torch.float64)
    return old, old + 0.3 * torch.randn(16, dtype=torch.float64), mask, seq


def test_mismatch_metrics_match_their_definitions() -> None:
    old, behaviour, mask, seq = batch()
    metrics = mismatch_metrics(mismatch_sums(old, behaviour, mask, seq, 3, OFF))
    keep = mask.bool()
    d = (old - behaviour)[keep]
    rho = d.exp()
    ppl = [math.exp((behaviour - old)[keep & (seq == s)].mean().item()) for s in range(3)]
    assert metrics == pytest.approx(
        {
            "rollout_corr/kl": -d.mean().item(),
            "rollout_corr/k3": (rho - 1 - d).mean().item(),
            "rollout_corr/abs_diff": d.abs().mean().item(),
            "rollout_corr/chi2": (rho**2).mean().item() - 1,
            "rollout_corr/ppl_ratio": sum(ppl) / 3,
            "rollout_corr/ess": (rho.sum() ** 2 / (rho**2).sum() / 12).item(),
            "rollout_corr/is_mean": rho.mean().item(),
            "rollout_corr/masked_fraction": 0.0,
        },
        rel=1e-9,
        abs=1e-12,
    )


def test_masked_tokens_lower_fraction_mean_and_ess() -> None:
    old = torch.zeros(4)
    behaviour = -torch.tensor([1.0, 1.0, 8.0, 8.0]).log()
    config = CorrectionConfig(mode="mask", low=0.5, high=2.0)
    metrics = mismatch_metrics(mismatch_sums(old, behaviour, torch.ones(4), torch.zeros(4, dtype=torch.long), 1, config))
    assert metrics["rollout_corr/masked_fraction"] == 0.5
    assert metrics["rollout_corr/is_mean"] == 0.5
    assert metrics["rollout_corr/ess"] == 0.5


def test_mismatch_of_identical_policies_is_zero() -> None:
    old, _, mask, seq = batch()
    metrics = mismatch_metrics(mismatch_sums(old, old, mask, seq, 3, OFF))
    ones = {"rollout_corr/ppl_ratio", "rollout_corr/ess", "rollout_corr/is_mean"}
    assert metrics == pytest.approx({name: 1.0 if name in ones else 0.0 for name in metrics}, abs=1e-12)


def test_mismatch_sums_of_parts_add_up() -> None:
    old, behaviour, mask, seq = batch()
    whole = mismatch_sums(old, behaviour, mask, seq, 3, OFF)
    first = mismatch_sums(old[:5], behaviour[:5], mask[:5], seq[:5], 1, OFF)
    second = mismatch_sums(old[5:], behaviour[5:], mask[5:], seq[5:] - 1, 2, OFF)
    for name, value in whole.items():
        assert (first[name] + second[name]).item() == pytest.approx(value.item(), rel=1e-12), name


def test_mismatch_of_no_trained_token_is_an_error() -> None:
    old, behaviour, mask, seq = batch()
    with pytest.raises(ValueError, match="at least one token"):
        mismatch_metrics(mismatch_sums(old, behaviour, torch.zeros_like(mask), seq, 3, OFF))


def test_token_mismatch_of_slices_equals_the_mismatch_of_the_batch() -> None:
    old, behaviour, mask, seq = batch()
    whole = mismatch_metrics(mismatch_sums(old, behaviour, mask, seq, 3, OFF))
    same = (seq == 1).double()
    sums: dict[str, float] = {}
    for part in (slice(0, 7), slice(7, 16)):
        for name, value in token_mismatch(old[part], behaviour[part], mask[part].bool(), same[part]).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    metrics = token_mismatch_metrics(sums)
    gap = (old - behaviour)[mask.bool() & (seq == 1)].abs().mean().item()
    assert metrics.pop("rollout_corr/abs_diff_same_version") == pytest.approx(gap)
    assert metrics == pytest.approx({name: whole[name] for name in metrics}) and len(metrics) == 4


def test_tokens_with_a_stale_cache_are_a_separate_cause() -> None:
    old, behaviour, mask, seq = batch()
    trained, same, stale = mask.bool(), (seq != 2).double(), torch.arange(len(seq)) % 3 == 0
    metrics = token_mismatch_metrics(
        {name: float(value) for name, value in token_mismatch(old, behaviour, trained, same, stale.double()).items()}
    )
    gap, known = (old - behaviour).abs(), trained & same.bool()
    assert metrics["rollout_corr/abs_diff_same_version"] == pytest.approx(gap[known & ~stale].mean().item())
    assert metrics["rollout_corr/abs_diff_stale_kv"] == pytest.approx(gap[known & stale].mean().item())
    assert metrics["rollout_corr/stale_kv_fraction"] == pytest.approx((trained & stale).sum().item() / trained.sum().item())
    assert metrics["rollout_corr/abs_diff"] == pytest.approx(gap[trained].mean().item())


def test_token_mismatch_without_tokens_has_no_metrics() -> None:
    assert token_mismatch_metrics({"tokens": 3.0}) == {}
    nowhere = token_mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.ones(2))
    assert token_mismatch_metrics({name: float(value) for name, value in nowhere.items()}) == {}
