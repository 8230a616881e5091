"""Mamba-2 layers: the chunked scan against a recurrence in float64, packed samples, and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpctl.model.mamba import CHUNK, Scan, grouped_norm, selective_scan
from mtpctl.model.packing import Packing

HEADS, GROUPS, WIDTH, STATE, TAPS = 6, 3, 5, 7, 4


def recurrence(x: Tensor, steps: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One sample, token by token, in the dtype of the arguments: x [L, heads, width], steps and log_decay [L, heads], b and c [L, G, N]."""
    heads_of = torch.arange(x.shape[1]) // (x.shape[1] // b.shape[1])
    state = x.new_zeros(x.shape[1], b.shape[-1], x.shape[-1])
    outputs = []
    for t in range(len(x)):
        state = state * log_decay[t].exp()[:, None, None] + b[t][heads_of][:, :, None] * (steps[t][:, None] * x[t])[:, None, :]
        outputs.append((c[t][heads_of][:, None] @ state)[:, 0])
    return torch.stack(outputs)


def inputs(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    steps = F.softplus(drawn(length, HEADS))
    return drawn(length, HEADS, WIDTH), steps, -steps, drawn(length, GROUPS, STATE), drawn(length, GROUPS, STATE)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_chunks_equal_the_recurrence(length: int) -> None:
    parts = inputs(length, torch.float64)
    torch.testing.assert_close(selective_scan(*(part[None] for part in parts))[0], recurrence(*parts), atol=1e-12, rtol=1e-10)


def test_single_precision_is_close_to_double() -> None:
    wide = inputs(2 * CHUNK, torch.float64)
    narrow = selective_scan(*(part.float()[None] for part in wide))[0]
    exact = recurrence(*wide)
    torch.testing.assert_close(narrow.double(), exact, atol=3e-6 * float(exact.abs().max()), rtol=0)


def scan(tokens: int, dtype: torch.dtype = torch.float64) -> Scan:
    generator = torch.Generator().manual_seed(tokens)
    widths = [HEADS * WIDTH, GROUPS * STATE, GROUPS * STATE]

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    return Scan(
        drawn(tokens, sum(widths)),
        widths,
        drawn(sum(widths), TAPS),
        drawn(sum(widths)),
        drawn(tokens, HEADS),
        *(drawn(HEADS) for _ in range(3)),
        groups=GROUPS,
    )


def of_rows(whole: Scan, rows: slice) -> Scan:
    parts = {name: getattr(whole, name) for name in Scan.__dataclass_fields__}
    return Scan(**{**parts, "mixed": whole.mixed[rows], "steps": whole.steps[rows]})


def test_samples_do_not_share_convolution_or_state() -> None:
    lengths = [3, CHUNK + 2, 1, 2]
    whole = scan(sum(lengths))
    packed = whole.run_torch(Packing.of(lengths, "cpu"))
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = of_rows(whole, rows).run_torch(Packing.of([length], "cpu"))
        torch.testing.assert_close(packed[rows], alone, atol=1e-12, rtol=0)
        start += length


def test_output_is_convolution_scan_and_skip() -> None:
    """The definition of the layer, written out for one sample in float64."""
    whole = scan(9)
    out = whole.run_torch(Packing.of([9], "cpu"))
    padded = F.pad(whole.mixed.T, (TAPS - 1, 0))
    mixed = F.silu(F.conv1d(padded[None], whole.taps[:, None], whole.bias, groups=len(padded))[0].T)
    x, b, c = mixed.split(whole.widths, dim=-1)
    x, b, c = x.unflatten(-1, (HEADS, WIDTH)), b.unflatten(-1, (GROUPS, STATE)), c.unflatten(-1, (GROUPS, STATE))
    steps = F.softplus(whole.steps + whole.step_bias)
    expected = recurrence(x, steps, -whole.decay.exp() * steps, b, c) + whole.skip[:, None] * x
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


def test_gradients_equal_finite_differences() -> None:
    parts = [part[None].requires_grad_() for part in inputs(3, torch.float64)]
    assert torch.autograd.gradcheck(selective_scan, parts)


@pytest.mark.gpu
def test_kernels_match_plain_torch_on_a_gpu() -> None:
    """Output and gradients of packed samples at the published widths, against float64; bf16 rounds by 0.4%."""
    lengths, heads, groups, width, state = [300, 1, 77, 128, 5], 8, 2, 64, 128
    widths, tokens = [heads * width, groups * state, groups * state], sum(lengths)
    torch.manual_seed(0)
    shapes = ((tokens, sum(widths)), (sum(widths), TAPS), (sum(widths),), (tokens, heads), (heads,), (heads,), (heads,))
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    weights, row = torch.randn(tokens, heads, width, device="cuda", dtype=torch.bfloat16), Packing.of(lengths, "cuda")

    def run(kernels: bool, dtype: torch.dtype) -> list[Tensor]:
        mixed, taps, bias, steps, decay, skip, step_bias = own = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        inputs = Scan(mixed, widths, taps, bias, steps, decay, skip, step_bias, groups)
        out = inputs.run_fla(row) if kernels else inputs.run_torch(row)
        return [out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), own)]

    exact = run(False, torch.float64)
    for name, mine, right in zip(
        ("out", "x", "taps", "bias", "steps", "decay", "skip", "step bias"), run(True, torch.bfloat16), exact, strict=True
    ):
        assert (mine.double() - right).norm() <= 0.02 * right.norm(), name


@pytest.mark.gpu
def test_norm_on_a_gpu_matches_float64() -> None:
    """Output and gradients at the published width of a group; the gate is a part of a wider row."""
    torch.manual_seed(0)
    tokens, groups, width = 301, 2, 512
    x, row, weight, upstream = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16)
        for size in ((tokens, groups * width), (tokens, 2 * groups * width), (groups * width,), (tokens, groups * width))
    )

    def run(dtype: torch.dtype, device: str) -> list[Tensor]:
        own = [leaf.to(device, dtype).requires_grad_() for leaf in (x, row, weight)]
        out = grouped_norm(own[0], own[1][:, groups * width :], own[2], groups, 1e-5)
        return [out.detach(), *torch.autograd.grad(out, own, upstream.to(device, dtype))]

    for name, mine, right in zip(("out", "x", "gate", "weight"), run(torch.bfloat16, "cuda"), run(torch.float64, "cpu"), strict=True):
        assert (mine.cpu().double() - right).norm() <= 0.01 * right.norm(), name
