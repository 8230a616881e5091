"""The recurrence of `numerics: bitwise`: its definition in float64, and the same bits however a sequence is divided into steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.kernels import exact_delta
from mtpctl.kernels.exact_delta import DeltaCache, DeltaWeights
from mtpctl.kernels.exact_grad import with_gradients_of
from tests.fakes.delta import Inputs, drawn_inputs, in_steps, packed


def by_definition(inputs: Inputs) -> Tensor:
    """The outputs [T, heads, value dim] of one sequence."""
    mixed, alpha, beta, weights = inputs.mixed.double(), inputs.alpha.double(), inputs.beta.double(), inputs.weights
    keys, values, width = weights.key_heads, len(weights.decay), weights.taps.shape[1]
    x = F.silu(F.conv1d(F.pad(mixed.T, (width - 1, 0)), weights.taps.double()[:, None], groups=len(weights.taps)).T)
    q, k, v = x.split([keys * weights.key_dim] * 2 + [values * weights.value_dim()], dim=-1)
    q, k = (x.unflatten(-1, (keys, -1)).repeat_interleave(values // keys, dim=1) for x in (q, k))
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = v.unflatten(-1, (values, -1))
    decay, rate = (-weights.decay.double().exp() * F.softplus(alpha + weights.bias)).exp(), beta.sigmoid()
    state = torch.zeros(values, weights.key_dim, weights.value_dim(), dtype=torch.float64)
    out = []
    for t in range(len(mixed)):
        state = state * decay[t, :, None, None]
        change = (v[t] - torch.einsum("hd,hdw->hw", k[t], state)) * rate[t, :, None]
        state = state + torch.einsum("hd,hw->hdw", k[t], change)
        out.append(torch.einsum("hd,hdw->hw", q[t], state) * weights.key_dim**-0.5)
    return torch.stack(out)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 21])
def test_outputs_are_those_of_the_definition(length: int) -> None:
    inputs = drawn_inputs(length)
    expected = by_definition(inputs)
    error = (packed([inputs])[0].double() - expected).norm()
    assert error <= 64 * torch.finfo(torch.float32).eps * expected.norm()  # of at most 64 roundings per token, which decay


def test_a_sequence_has_the_same_bits_in_any_row_and_any_steps() -> None:
    samples = [drawn_inputs(length, seed=length) for length in (37, 3, 50, 1, 20)]
    whole = packed(samples)
    for sample, out in zip(samples, whole, strict=True):
        assert torch.equal(packed([sample])[0], out)
    for steps in ([37, 0, 0], [1] * 37, [5, 1, 1, 30], [2, 35], [36, 1]):
        assert torch.equal(in_steps(samples[0], steps), whole[0])


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_steps_that_verify_drafts_compute_the_same_bits(drafts: int) -> None:
    """Every number of rejected drafts follows every other one; rejected drafts are other tokens."""
    sample = drawn_inputs(50)
    accepted = [1 + (step * step) % (drafts + 1) for step in range(40)]
    assert torch.equal(in_steps(sample, [9], drafts=drafts, accepted=accepted), packed([sample])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_steps_compute_the_same_bits_on_a_gpu(drafts: int) -> None:
    samples = [drawn_inputs(length, seed=length, dtype=torch.bfloat16, device="cuda") for length in (200, 3, 65)]
    whole = packed(samples)
    accepted = [1 + (step * step) % (drafts + 1) for step in range(200)]
    steps = [9] if drafts else [100, 1, 1, 98]
    assert torch.equal(in_steps(samples[0], steps, drafts=drafts, accepted=accepted if drafts else None), whole[0])
    expected = by_definition(Inputs(*(x.cpu() for x in samples[0][:3]), weights=DeltaWeights(*(_on_cpu(x) for x in samples[0].weights))))
    assert (whole[0].cpu().double() - expected).norm() <= 0.02 * expected.norm()  # q, k, v and outputs are rounded to 8 bits


def _on_cpu(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else x


def test_a_new_sequence_ignores_what_its_slot_contains() -> None:
    sample = drawn_inputs(6)
    cache = DeltaCache.empty(sample.weights, 1, sample.mixed)
    cache.windows.fill_(float("nan")), cache.states.fill_(float("nan"))
    out = exact_delta.run(sample.mixed, sample.alpha, sample.beta, sample.weights, torch.tensor([0, 6]), cache)
    assert torch.equal(out, packed([sample])[0])


def test_gated_norm_is_that_of_the_definition() -> None:
    x, gate, weight = (torch.randn(5, 3, 20, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    out = exact_delta.gated_rms_norm(x, gate, weight[0, 0], 1e-6)
    expected = F.rms_norm(x.double(), (20,), weight[0, 0].double(), 1e-6) * F.silu(gate.double())
    assert (out - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_gradients_are_those_of_the_usual_operation() -> None:
    x, y = (torch.randn(4, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(2))
    out = with_gradients_of(lambda x, y: x * y**2, lambda x, y: (x + y).round(), x, y)
    assert torch.equal(out, (x + y).round())
    grads = torch.autograd.grad(out.sum(), (x, y))
    assert torch.equal(grads[0], y.detach() ** 2)
    torch.testing.assert_close(grads[1], 2 * x.detach() * y.detach())


def test_weights_know_the_width_of_values() -> None:
    assert DeltaWeights(torch.zeros(2 * 2 * 12 + 4 * 20, 4), torch.zeros(4), torch.zeros(4), 2, 12).value_dim() == 20
