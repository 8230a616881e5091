"""Exact operations: each row has the same bits alone, in any batch and at any offset, and the sums are those of integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtpctl.kernels import exact, exact_grad
from mtpctl.kernels.activations import swiglu
from mtpctl.kernels.drafts import Draft
from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.kernels.qkv import HeadLayout, HeadNorm, split_heads_torch

COUNTS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64)
"""Numbers of rows around the tiles of matrix libraries and the vectors of elementwise kernels."""


def _drawn(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Values whose rows differ in magnitude by several orders."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * (spread * torch.randn(*shape[:-1], 1, generator=generator)).exp()


ROWWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: exact.linear(x, _drawn(48, x.shape[-1], seed=1)),
    "rms_norm": lambda x: exact.rms_norm(x, _drawn(x.shape[-1], seed=2, spread=0.1), 1e-6),
    "swiglu": exact.swiglu,
    "log_softmax": exact.log_softmax,
    "cos": lambda x: exact.cos_sin(x)[0],
    "sin": lambda x: exact.cos_sin(x)[1],
}


@pytest.mark.parametrize("width", [32, 190, 576])
@pytest.mark.parametrize("operation", ROWWISE)
def test_row_has_the_same_bits_in_any_batch(operation: str, width: int) -> None:
    x, run = _drawn(100, width, spread=1.0), ROWWISE[operation]
    whole = run(x)
    for count in COUNTS:
        for start in (0, 1, 3, 36):
            assert torch.equal(run(x[start : start + count]), whole[start : start + count]), (count, start)


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_are_those_of_integers(threads: int) -> None:
    """Python's integers have no rounding, so equal results mean that no partial sum was rounded, in whatever order it was added."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = _drawn(5, 1024), _drawn(7, 1024, seed=1)
        (rows, row_step), (columns, column_step) = (
            exact._fixed_point(x, exact._factor_bits(1024)),
            exact._fixed_point(weight, exact._factor_bits(1024)),
        )
        for i in range(5):
            for j in range(7):
                total = sum(int(a) * int(b) for a, b in zip(rows[i].tolist(), columns[j].tolist(), strict=True))
                expected = float(total) * float(row_step[i]) * float(column_step[j])
                assert float(exact.linear(x, weight)[i, j]) == float(torch.tensor(expected, dtype=torch.float64).float())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("terms", [1, 2, 32, 192, 576, 1024, 1025, 11008])
def test_sum_of_the_largest_products_is_below_the_mantissa(terms: int) -> None:
    assert terms * (2 ** exact._factor_bits(terms)) ** 2 <= 2**53
    assert terms * (2 ** (exact._factor_bits(terms) + 1)) ** 2 > 2**53, "no bit is wasted on both factors"


def _attention_case(keys: int = 70) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value = _drawn(1, 6, keys, 32), _drawn(1, 3, keys, 32, seed=1, spread=0.5), _drawn(1, 3, keys, 32, seed=2)
    return query, key, value, torch.ones(keys, keys, dtype=torch.bool).tril()


def test_query_has_the_same_bits_in_decoding_chunks_and_prefill() -> None:
    query, key, value, causal = _attention_case()
    whole = exact.attention(query, key, value, causal, 0.2)
    for count in (1, 2, 3, 4, 5, 8, 31, 32, 33):
        for end in range(count, 71, 1 if count < 5 else 7):
            part = slice(end - count, end)
            alone = exact.attention(query[:, :, part], key[:, :, :end], value[:, :, :end], causal[part, :end], 0.2)
            assert torch.equal(alone, whole[:, :, part]), (count, end)


def test_query_ignores_the_contents_of_hidden_keys_and_other_samples() -> None:
    query, key, value, causal = _attention_case()
    whole = exact.attention(query, key, value, causal, 0.2)
    keys, values = (torch.cat([x, 1e6 * torch.ones_like(x[:, :, :58])], dim=2) for x in (key, value))
    visible = torch.nn.functional.pad(causal, (0, 58))
    q, k, v = (torch.cat([1e3 * x.flip(2), x]) for x in (query, keys, values))
    batch = exact.attention(q, k, v, visible, 0.2)
    assert torch.equal(batch[1:], whole)


def test_operations_agree_with_float64() -> None:
    x, weight, gain = _drawn(9, 190, spread=1.0), _drawn(48, 190, seed=1, spread=1.0), _drawn(190, seed=2, spread=0.1)
    wide = x.double()
    exponents = torch.linspace(-700, 700, 4001, dtype=torch.float64)
    counts = 10 ** torch.linspace(0, 9, 1001, dtype=torch.float64)
    angles = torch.linspace(0, 9000, 10007)
    cos, sin = exact.cos_sin(angles)
    query, key, value, causal = _attention_case()
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), causal, scale=0.2, enable_gqa=True
    )
    # A factor keeps at least 21 bits relative to its row's largest element: 2⁻²² each, in units of the product of the largest ones.
    largest = x.abs().amax(1, keepdim=True) * weight.abs().amax(1)
    assert ((exact.linear(x, weight) - wide @ weight.double().T).abs() / (190 * largest)).max() < 2**-20
    assert torch.allclose(exact.exp(exponents), exponents.exp(), rtol=1e-11, atol=0)
    assert torch.allclose(exact.log(counts), counts.log(), rtol=0, atol=1e-11) and float(exact.log(torch.ones(1).double())) == 0
    assert torch.allclose(cos.double(), angles.double().cos(), rtol=0, atol=2**-24)
    assert torch.allclose(sin.double(), angles.double().sin(), rtol=0, atol=2**-24)
    assert torch.allclose(exact.rms_norm(x, gain, 1e-6, 1.0), torch.nn.functional.rms_norm(x, (190,), gain + 1, 1e-6), rtol=1e-5)
    assert torch.allclose(exact.swiglu(x), torch.nn.functional.silu(x[:, :95]) * x[:, 95:], rtol=1e-5, atol=1e-30)
    assert torch.allclose(exact.log_softmax(x).double(), wide.log_softmax(1), rtol=1e-6, atol=1e-6)
    assert (exact.attention(query, key, value, causal, 0.2) - attended).abs().max() < 1e-5 * attended.abs().max()


def test_rows_of_zeros_and_masked_logits_are_exact() -> None:
    zeros, weight = torch.zeros(2, 32), _drawn(8, 32)
    assert torch.equal(exact.linear(zeros, weight), torch.zeros(2, 8))
    assert torch.equal(exact.rms_norm(zeros, torch.ones(32), 1e-6), zeros)
    masked = torch.tensor([[0.0, float("-inf"), 0.0]])
    assert torch.allclose(exact.log_softmax(masked), torch.tensor([[-math.log(2), float("-inf"), -math.log(2)]]))


def test_gradients_are_those_of_the_usual_operations() -> None:
    x, weight, gain = _drawn(6, 40, spread=0.3), _drawn(9, 40, seed=1, spread=0.3), _drawn(40, seed=2, spread=0.1)
    query, key, value, causal = _attention_case(12)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    cases = (
        (exact_grad.linear, torch.nn.functional.linear, (x, weight)),
        (lambda x, w: exact_grad.rms_norm(x, w, 1e-6, 1.0), lambda x, w: torch.nn.functional.rms_norm(x, (40,), w + 1, 1e-6), (x, gain)),
        (exact_grad.swiglu, swiglu, (x,)),
        (
            lambda q, k, v: exact_grad.attention(q, k, v, causal, 0.2),
            lambda q, k, v: sdpa(q, k, v, causal, scale=0.2, enable_gqa=True),
            (query, key, value),
        ),
    )
    layout, angles, mixed = HeadLayout(2, 3, 16), (_drawn(6, 8).cos(), _drawn(6, 8).sin()), _drawn(6, 160, seed=3, spread=0.3)

    def heads(run: Callable[..., Any], x: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) for part in run(x, layout, HeadNorm(q_weight, k_weight, 1e-6), angles)], 1)

    normed = tuple(partial(heads, run) for run in (exact_grad.split_normed_heads, split_heads_torch))
    inputs: tuple[Tensor, ...]
    for ours, usual, inputs in (*cases, (*normed, (mixed, gain[:16], gain[16:32]))):
        results = []
        for run in (ours, usual):
            leaves = [each.clone().requires_grad_() for each in inputs]
            out = run(*leaves)
            results.append(torch.autograd.grad((out * out.detach().sign()).sum(), leaves))
        for found, expected in zip(*results, strict=True):
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


class _Largest(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that an operation in the block returns, apart from views."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        sizes = [x.numel() * x.itemsize for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs]
        self.largest = max([self.largest, *sizes])
        return out


def test_results_do_not_depend_on_blocks_which_limit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, causal = _attention_case(256)
    x, weight = _drawn(256, 64), _drawn(256, 64, seed=1)
    runs = {
        "attention": lambda: exact.attention(query, key, value, causal, 0.2),
        "linear": lambda: exact.linear(x, weight),
        "swiglu": lambda: exact.swiglu(weight),
        "log_softmax": lambda: exact.log_softmax(x @ weight.T),
    }
    whole = {name: run() for name, run in runs.items()}
    inputs = max(8 * each.numel() for each in (query, key, value, x, weight))
    for block_bytes in (1, 1 << 15, 1 << 17):
        monkeypatch.setattr(exact, "BLOCK_BYTES", block_bytes)
        for name, run in runs.items():
            with _Largest() as memory:
                assert torch.equal(run(), whole[name]), (name, block_bytes)
            assert memory.largest <= max(block_bytes, inputs, whole[name].nbytes), (name, block_bytes)


@pytest.mark.parametrize("gradients", [False, True])
def test_head_kernels_split_rows_by_the_workspace(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = _drawn(600, 16, spread=0.3).requires_grad_(gradients), _drawn(512, 16, seed=1, spread=0.3).requires_grad_(gradients)
    labels = torch.randint(512, (600,), generator=torch.Generator().manual_seed(0))
    results, workspace = [], 1 << 18
    monkeypatch.setattr(exact, "BLOCK_BYTES", 1 << 16)
    for limit in (1 << 30, workspace):
        with _Largest() as memory:
            out = linear_logprob(hidden, weight, labels, implementation="exact", workspace_bytes=limit, entropy=True, topk=2)
            grads = torch.autograd.grad((out.logprob + out.entropy).sum(), (hidden, weight)) if gradients else ()
        assert out.entropy is not None and out.topk is not None
        results.append(((out.logprob, *out.topk), (out.entropy, *grads)))
    assert memory.largest <= workspace
    for whole, split in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(whole, split)
    for whole, split in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(whole, split, rtol=1e-4, atol=1e-5 * float(whole.detach().abs().max()))


def test_head_kernels_give_the_engines_log_probs() -> None:
    """Scoring, the loss's pass with gradients and the engine's log-softmax agree to the last bit, also in slices."""
    hidden, weight = _drawn(70, 48, spread=0.3), _drawn(64, 48, seed=1, spread=0.3)
    labels = torch.randint(61, (70,), generator=torch.Generator().manual_seed(0))
    engine = exact.log_softmax(exact.linear(hidden, weight[:61])).gather(1, labels[:, None]).squeeze(1)
    options = {"implementation": "exact", "valid_vocab": 61}
    scored = linear_logprob(hidden, weight, labels, entropy=True, topk=3, **options)  # type: ignore[arg-type]
    assert torch.equal(scored.logprob, engine)
    assert scored.topk is not None and torch.equal(scored.topk.ids[:, 0], (hidden @ weight[:61].T).argmax(1))
    for workspace in (1 << 30, 1 << 12):
        leaf = hidden.clone().requires_grad_()
        head = weight.clone().requires_grad_()
        out = linear_policy_loss(
            leaf,
            head,
            labels,
            lambda logprob, _, rows: ((-logprob).sum(), {}),
            drafts=[Draft(hidden.flip(0).requires_grad_(), loss="kl")],
            workspace_bytes=workspace,
            **options,  # type: ignore[arg-type]
        )
        assert torch.equal(out.logprob, engine)
        out.loss_sum.backward()
        usual = hidden.clone().requires_grad_()
        torch.nn.functional.cross_entropy(usual @ weight[:61].T, labels, reduction="sum").backward()
        assert leaf.grad is not None and usual.grad is not None
        assert torch.allclose(leaf.grad, usual.grad, rtol=1e-4, atol=1e-5)


def test_value_of_zero_does_not_affect_other_values() -> None:
    """Its step is a factor of its key's weight."""
    query, key, value, causal = _attention_case()
    value = 1e-6 * value
    with_zero = value.clone()
    with_zero[:, :, 0] = 0
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), with_zero.double(), causal, scale=0.2, enable_gqa=True
    )
    error, usual = (exact.attention(query, key, v, causal, 0.2) for v in (with_zero, value))
    assert (error - expected).abs().max() < 1e-5 * usual.abs().max()
