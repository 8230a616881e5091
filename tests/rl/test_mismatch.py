"""`rollout_corr/*` against their definitions, whole and in parts."""

from __future__ import annotations

import math

import pytest
import torch

from mtpctl.recipe.rl import CorrectionConfig
from mtpctl.rl.mismatch import mismatch_metrics, mismatch_sums, token_mismatch, token_mismatch_metrics

OFF = CorrectionConfig()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    seq = torch.tensor([0] * 5 + [1] * 8 + [2] * 3)
    mask = torch.ones(16)
    mask[[0, 5, 6, 13]] = 0
    old = -torch.rand(16, dtype=torch.float64)
    return old, old + 0.3 * torch.randn(16, dtype=torch.float64), mask, seq


def test_definitions() -> None:
    old, behaviour, mask, seq = batch()
    got = mismatch_metrics(mismatch_sums(old, behaviour, mask, seq, 3, OFF))
    keep = mask.bool()
    d = (old - behaviour)[keep]
    rho = d.exp()
    ppl = [math.exp((behaviour - old)[keep & (seq == s)].mean().item()) for s in range(3)]
    assert got == pytest.approx(
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


def test_a_mask_shows_in_fraction_mean_and_ess() -> None:
    old = torch.zeros(4)
    behaviour = -torch.tensor([1.0, 1.0, 8.0, 8.0]).log()
    config = CorrectionConfig(mode="mask", low=0.5, high=2.0)
    got = mismatch_metrics(mismatch_sums(old, behaviour, torch.ones(4), torch.zeros(4, dtype=torch.long), 1, config))
    assert got["rollout_corr/masked_fraction"] == 0.5
    assert got["rollout_corr/is_mean"] == 0.5
    assert got["rollout_corr/ess"] == 0.5


def test_identical_policies() -> None:
    old, _, mask, seq = batch()
    got = mismatch_metrics(mismatch_sums(old, old, mask, seq, 3, OFF))
    ones = {"rollout_corr/ppl_ratio", "rollout_corr/ess", "rollout_corr/is_mean"}
    assert got == pytest.approx({name: 1.0 if name in ones else 0.0 for name in got}, abs=1e-12)


def test_batches_add_up() -> None:
    old, behaviour, mask, seq = batch()
    whole = mismatch_sums(old, behaviour, mask, seq, 3, OFF)
    first = mismatch_sums(old[:5], behaviour[:5], mask[:5], seq[:5], 1, OFF)
    second = mismatch_sums(old[5:], behaviour[5:], mask[5:], seq[5:] - 1, 2, OFF)
    for name, value in whole.items():
        assert (first[name] + second[name]).item() == pytest.approx(value.item(), rel=1e-12), name


def test_nothing_trained_is_an_error() -> None:
    old, behaviour, mask, seq = batch()
    with pytest.raises(ValueError, match="no tokens"):
        mismatch_metrics(mismatch_sums(old, behaviour, torch.zeros_like(mask), seq, 3, OFF))


def test_what_the_loss_compares_token_by_token_is_the_same() -> None:
    old, behaviour, mask, seq = batch()
    whole = mismatch_metrics(mismatch_sums(old, behaviour, mask, seq, 3, OFF))
    same = (seq == 1).double()
    sums: dict[str, float] = {}
    for part in (slice(0, 7), slice(7, 16)):
        for name, value in token_mismatch(old[part], behaviour[part], mask[part].bool(), same[part]).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    got = token_mismatch_metrics(sums)
    gap = (old - behaviour)[mask.bool() & (seq == 1)].abs().mean().item()
    assert got.pop("rollout_corr/abs_diff_same_version") == pytest.approx(gap)
    assert got == pytest.approx({name: whole[name] for name in got}) and len(got) == 4


def test_nothing_is_told_where_nothing_was_compared() -> None:
    assert token_mismatch_metrics({"tokens": 3.0}) == {}
    nowhere = token_mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.ones(2))
    assert token_mismatch_metrics({name: float(value) for name, value in nowhere.items()}) == {}
