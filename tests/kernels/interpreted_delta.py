"""`mtpctl.kernels.exact_delta`'s kernels under Triton's interpreter, in fp16 and fp32.

`test_interpreted.py` runs this file in a separate process, because the interpreter is selected at import.
"""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels import exact, exact_delta, invariant
from tests.fakes.delta import Inputs, drawn_inputs, in_steps, packed


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exact, "rms_norm", invariant.rms_norm)
    for name in ("convolve", "recur"):
        patch.setattr(exact_delta, f"{name}_torch", getattr(exact_delta, f"{name}_triton"))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_kernels_match_the_functions_of_a_cpu(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """bound: 100 roundings of fp32, or 8 of fp16, which has 10 bits."""
    samples = [drawn_inputs(length, seed=length, dtype=dtype) for length in (7, 1, 4)]
    wide = [Inputs(*(x.float() for x in each[:3]), weights=each.weights._replace(taps=each.weights.taps.float())) for each in samples]
    expected = packed(wide)
    use_kernels(monkeypatch)
    for actual, usual in zip(packed(samples), expected, strict=True):
        assert (actual.float() - usual).norm() <= bound * usual.norm()


def test_steps_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    samples = [drawn_inputs(length, seed=length, dtype=torch.float16) for length in (7, 3, 5)]
    whole = packed(samples)
    assert torch.equal(packed(samples[:1])[0], whole[0])
    for steps in ([1] * 7, [3, 1, 3]):
        assert torch.equal(in_steps(samples[0], steps), whole[0])


@pytest.mark.parametrize("drafts", [1, 3])
def test_steps_that_verify_drafts_compute_the_same_bits(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    sample = drawn_inputs(14, dtype=torch.float16)
    accepted = [1 + (step * step) % (drafts + 1) for step in range(14)]
    assert torch.equal(in_steps(sample, [5], drafts=drafts, accepted=accepted), packed([sample])[0])
