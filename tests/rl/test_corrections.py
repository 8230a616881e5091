"""Off-policy weights by hand: two responses of three tokens, one of whose tokens is not trained."""

from __future__ import annotations

import pytest
import torch

from mtpctl.recipe.rl import CorrectionConfig
from mtpctl.rl.corrections import correction_weights

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
def test_weights(config: dict[str, object], expected: list[float]) -> None:
    assert weights(**config) == pytest.approx(expected, rel=1e-5)


def test_same_policy_weighs_one_in_every_mode() -> None:
    logprob = torch.randn(6)
    for mode in ("off", "truncate", "clip", "mask"):
        for level in ("token", "sequence"):
            out = correction_weights(logprob, logprob, MASK, SEQ, 2, CorrectionConfig(mode=mode, level=level))  # type: ignore[arg-type]
            assert out.weight.tolist() == [1.0] * 6 and not out.masked.any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_response_of_policies_far_apart_weighs_what_can_be_squared(level: str) -> None:
    old = torch.full((6,), -1.0)
    config = CorrectionConfig(mode="off", level=level)  # type: ignore[arg-type]
    for behaviour in (old - 500.0, old + 500.0):
        ratio = correction_weights(old, behaviour, MASK, SEQ, 2, config).ratio[MASK.bool()]
        assert torch.isfinite(ratio**2).all() and (ratio > 0).all()


def test_tokens_that_are_not_trained_do_not_touch_their_response() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0, float("-inf")])
    old = torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0, 0.0])
    out = correction_weights(old, behaviour, MASK, SEQ, 2, CorrectionConfig(mode="mask", level="sequence"))
    assert out.weight.tolist() == [1.0] * 6 and not out.masked.any()
