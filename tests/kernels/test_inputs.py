"""Invalid input raises a ValueError that names the argument and both values, before any kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss

HIDDEN, WEIGHT, LABELS = torch.randn(3, 8), torch.randn(20, 8), torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.randn(2, 3, 8)}, r"hidden: shape \(2, 3, 8\) has 3 dimensions, expected 2"),
        ({"weight": torch.randn(20, 9)}, r"weight: shape \(20, 9\) does not fit hidden \(3, 8\)"),
        ({"weight": torch.randn(0, 8)}, r"weight: shape \(0, 8\) has no vocabulary entry"),
        ({"weight": WEIGHT.half()}, "weight: dtype torch.float16 differs from hidden's torch.float32"),
        ({"hidden": torch.ones(3, 8, dtype=torch.int64)}, "hidden: dtype torch.int64, expected one of"),
        ({"weight": WEIGHT.to("meta")}, "weight: on meta, hidden on cpu"),
        ({"labels": LABELS.to("meta")}, "labels: on meta, hidden on cpu"),
        ({"labels": LABELS.float()}, "labels: dtype torch.float32, expected torch.int64"),
        ({"labels": torch.tensor([1, 2])}, r"labels: shape \(2,\), expected \(3,\)"),
        ({"labels": torch.tensor([1, 20, 3])}, "labels: 20 is outside the vocabulary of 20 entries"),
        ({"labels": torch.tensor([1, -1, 3])}, "labels: -1 is outside the vocabulary of 20 entries"),
        ({"labels": torch.tensor([1, 18, 3]), "valid_vocab": 18}, "labels: 18 is outside the vocabulary of 18 entries"),
        ({"valid_vocab": 21}, "valid_vocab: 21, expected 1 to 20"),
        ({"valid_vocab": 0}, "valid_vocab: 0, expected 1 to 20"),
        ({"temperature": 0.0}, "temperature: 0.0, expected a finite number above 0"),
        ({"temperature": float("nan")}, "temperature: nan, expected a finite number above 0"),
        ({"temperature": torch.ones(2)}, r"temperature: shape \(2,\), expected \(3,\)"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, "temperature: smallest value 0.0, expected above 0"),
        ({"temperature": torch.tensor([1.0, float("inf"), 1.0])}, "temperature: largest value inf, expected finite values"),
        ({"temperature": torch.tensor([1.0, float("nan"), 1.0])}, "temperature: smallest value nan, expected above 0"),
        ({"rows": torch.tensor([True, False])}, r"rows: mask of shape \(2,\), expected \(3,\)"),
        ({"rows": torch.tensor([0, 3])}, "rows: dtype torch.int64, expected a bool mask"),
        ({"workspace_bytes": 0}, "workspace_bytes: 0, expected above 0"),
        ({"implementation": "cuda"}, "implementation: 'cuda', expected one of auto, reference, chunked, triton"),
        ({"implementation": "triton"}, "implementation: 'triton' needs CUDA"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_invalid_argument_and_both_values_are_named(changed: dict[str, Any], message: str) -> None:
    inputs = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **changed}
    with pytest.raises(ValueError, match=message):
        linear_logprob(inputs.pop("hidden"), inputs.pop("weight"), inputs.pop("labels"), **inputs)


def test_topk_larger_than_the_vocabulary_is_rejected() -> None:
    with pytest.raises(ValueError, match="topk: 21, expected 0 to 20"):
        linear_logprob(HIDDEN, WEIGHT, LABELS, topk=21)


def test_ignored_row_may_have_any_label() -> None:
    linear_logprob(HIDDEN, WEIGHT, torch.tensor([1, -100, 3]))
    linear_logprob(HIDDEN, WEIGHT, torch.tensor([1, 99, 3]), rows=torch.tensor([True, False, True]))


def test_ignored_row_may_have_temperature_zero() -> None:
    linear_logprob(HIDDEN, WEIGHT, torch.tensor([1, -100, 3]), temperature=torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("training", [False, True])
def test_nonfinite_hidden_states_are_rejected_in_the_forward_pass(value: float, training: bool) -> None:
    hidden = HIDDEN.clone()
    hidden[1, 4] = value
    with pytest.raises(ValueError, match=rf"hidden: {value} at \[1, 4\], expected finite values in all of \(3, 8\)"):
        linear_logprob(hidden.requires_grad_(training), WEIGHT, LABELS)


def test_nonfinite_weight_is_rejected() -> None:
    weight = WEIGHT.clone()
    weight[7, 0] = float("nan")
    with pytest.raises(ValueError, match=r"weight: nan at \[7, 0\]"):
        linear_logprob(HIDDEN, weight, LABELS)


def test_nonfinite_weight_is_rejected_before_gradients_are_returned() -> None:
    weight = WEIGHT.clone()
    weight[7, 0] = float("nan")
    hidden = HIDDEN.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"weight: nan at \[7, 0\]"):
        linear_logprob(hidden, weight, LABELS).logprob.sum().backward()


@pytest.mark.parametrize("policy", [False, True])
def test_infinite_weight_is_rejected_if_entropy_is_requested(policy: bool) -> None:
    """Minus infinity in every row of logits: the log-sum-exp is finite, but 0 x infinity is not."""
    weight = WEIGHT.clone()
    weight[7] = -float("inf")

    def token_loss(logprob, entropy, rows):
        return entropy.sum(), {}

    with pytest.raises(ValueError, match=r"weight: -inf at \[7, 0\]"):
        if policy:
            linear_policy_loss(HIDDEN.abs(), weight, LABELS, token_loss, entropy=True)
        else:
            linear_logprob(HIDDEN.abs(), weight, LABELS, entropy=True)


def test_overflowing_logits_are_reported() -> None:
    with pytest.raises(ValueError, match="hidden: logits overflow"):
        linear_logprob(HIDDEN * 1e30, WEIGHT * 1e30, LABELS)


def test_policy_loss_rejects_its_own_invalid_arguments() -> None:
    def token_loss(logprob, entropy, rows):
        return logprob.sum(), {}

    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"grad_scale: .*, expected a finite number, 0 or above"):
            linear_policy_loss(HIDDEN, WEIGHT, LABELS, token_loss, grad_scale=wrong)
    with pytest.raises(ValueError, match="implementation: 'reference'"):
        linear_policy_loss(HIDDEN, WEIGHT, LABELS, token_loss, implementation="reference")
