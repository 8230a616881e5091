"""The self-check for real: vLLM samples with speculation, Megatron scores, in two processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mtpctl.bench.doctor.part import run_part
from mtpctl.bench.doctor.self_check import Agreement, compare
from mtpctl.errors import ThresholdMissed
from mtpctl.samples import Sample, Speculation


def test_differences_are_taken_token_by_token() -> None:
    first, second = Sample("a", "g", [1]), Sample("b", "g", [1])
    first.append([3, 4], [-1.0, -2.0], 0)
    second.append([5], [-3.0], 0)
    second.speculation = Speculation(drafted=4, accepted=1)
    found = compare([first, second], [[-1.0, -2.0002], [-2.9995]], "fp32")
    assert (found.responses, found.tokens, found.drafted, found.accepted) == (2, 3, 4, 1)
    assert found.mean_abs == pytest.approx(7e-4 / 3) and found.max_abs == pytest.approx(5e-4)
    with pytest.raises(ThresholdMissed, match="self-check"):
        found.check()
    compare([second], [[-3.00009]], "fp32").check()


def test_a_response_of_another_length_is_no_comparison() -> None:
    sample = Sample("a", "g", [1])
    sample.append([3, 4], [-1.0, -2.0], 0)
    with pytest.raises(ValueError, match="shorter"):
        compare([sample], [[-1.0]], "fp32")


@pytest.mark.slow
def test_vllm_and_the_trainer_agree_here(tmp_path: Path) -> None:
    sampled = asyncio.run(run_part("sample", tmp_path, 200))
    stored = json.loads((tmp_path / "samples.json").read_text())["samples"]
    assert {each["finish_reason"] for each in stored} == {"length"} and len(stored) == 64
    found = Agreement(**asyncio.run(run_part("score", tmp_path, 200)))
    assert found.tokens == sampled["tokens"] > 1500
    assert found.drafted > 1000 and found.accepted > 30
    assert found.mean_abs < 1e-5 if found.precision == "fp32" else found.mean_abs < found.bound
    found.check()
