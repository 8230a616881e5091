"""Metrics have labels and units; numbers are short and never lie about their size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.telemetry.names import METRICS, compact, describe, format_duration, format_value

FIELD_NAMES = [
    "reward/mean",
    "response/length_mean",
    "actor/entropy",
    "actor/pg_loss",
    "actor/grad_norm",
    "mtp/grad_norm",
    "rollout/spec_accept_rate",
    "rollout/spec_accept_length",
    "rollout/tokens_per_s",
    "rollout_corr/kl",
    "rollout_corr/is_mean",
    "rollout_corr/ess",
    "async/staleness_mean",
    "async/staleness_max",
    "async/trainer_idle",
    "async/rollout_idle",
    "async/partial_ratio",
    "sync/seconds",
    "sync/stall_seconds",
    "sync/gb_per_s",
    "logprob/wait_seconds",
    "logprob/tokens_per_s",
    "logprob/stall_seconds",
    "perf/tokens_per_s",
    "perf/mfu",
]


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_the_names_that_people_script_against_are_in_the_catalogue(name: str) -> None:
    assert METRICS[name].meaning


def test_logged_metrics_are_in_catalog() -> None:
    import torch

    from mtpctl.recipe.schema import Recipe
    from mtpctl.rl.corrections import mismatch_metrics, mismatch_sums
    from mtpctl.rl.losses import LossInputs, loss_metrics, policy_loss

    rl = Recipe().rl
    one, ids = torch.ones(2), torch.zeros(2, dtype=torch.long)
    out = policy_loss(LossInputs(one, one, one, one, one, ids, 1, entropy=one, ref_logprob=one), rl)
    names = [*loss_metrics(out.sums), *mismatch_metrics(mismatch_sums(one, one, one, ids, 1, rl.correction))]
    assert [name for name in names if name not in METRICS] == []


def test_metrics_that_match_a_pattern_are_described() -> None:
    assert describe("mtp/loss_2").label == "depth 2"
    assert describe("timing_s/wait_samples") == describe("timing_s/wait_samples")
    assert (describe("timing_s/wait_samples").label, describe("timing_s/wait_samples").unit) == ("wait samples", "seconds")
    assert describe("my/own").label == "my/own"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4119, "share", "41.2%"),
        (5123.0, "tokens/s", "5.12k tok/s"),
        (999.96, "number", "1k"),
        (0.0, "nats", "0"),
        (2.3e-6, "nats", "2.3e-6"),
        (1e-4, "nats", "1e-4"),
        (0.5, "number", "0.5"),
        (100.0, "number", "100"),
        (-3.14159, "number", "-3.14"),
        (15.7e9, "number", "15.7G"),
        (1.25, "seconds", "1.25 s"),
        (0.003648, "nats", "0.0036"),
        (math.nan, "share", "–"),
    ],
)
def test_numbers_are_formatted_with_their_unit(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text  # type: ignore[arg-type]


@given(st.floats(min_value=-1e11, max_value=1e11))
def test_compact_number_is_within_six_percent(value: float) -> None:
    text = compact(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    assert float(text.rstrip("kMG")) * scale == pytest.approx(value, rel=0.06)
    assert len(text) <= 9


@pytest.mark.parametrize(("seconds", "text"), [(8.2, "8 s"), (125, "2 min 05 s"), (3600 * 3 + 420, "3 h 07 min"), (-1, "0 s")])
def test_durations_are_formatted_in_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
