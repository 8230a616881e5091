"""An update over several ranks matches the update of one: loss, gradients, scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes.tiny import assert_close
from tests.fakes.trainer_cases import CASES, DEFAULT, Case, with_origins
from tests.fakes.trainer_ranks import run

pytestmark = pytest.mark.timeout(1600)  # the first test waits for all cases


COMPARED = [case for case in CASES if case.name != case.like]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all requested cases. The first test waits for all of them."""
    names = {item.callspec.params["case"].name for item in request.session.items if item.path == request.path}  # type: ignore[attr-defined]
    return run(with_origins(frozenset(names)), tmp_path_factory.mktemp("ranks"))


def tensors(result: dict[str, Any], part: str) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in result[part].items()}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.name in DEFAULT else pytest.mark.slow) for case in COMPARED]
)
def test_update_matches_one_process(results: dict[str, Any], case: Case) -> None:
    """Including RL updates, and updates after a restore from another layout."""
    result, expected = results[case.name], results[case.like]
    assert not isinstance(result, str), result
    assert result["before"] == expected["before"], "equal to the last bit"
    for name, value in expected["metrics"].items():
        if not name.startswith("timing_s/"):
            assert result["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for (logprobs, entropy), (right, right_entropy) in zip(result["scores"], expected["scores"], strict=True):
        assert logprobs == pytest.approx(right, abs=1e-5)
        assert entropy == pytest.approx(right_entropy, abs=1e-5)
    assert_close(tensors(result, "weights"), tensors(expected, "weights"), case.bound)
    if not case.fields.get("distributed_optimizer"):  # which leaves each rank a part of the gradients
        assert_close(tensors(result, "gradients"), tensors(expected, "gradients"), case.bound)
