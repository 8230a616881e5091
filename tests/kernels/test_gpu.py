"""The Triton backend on a GPU: against the oracle on ragged shapes, within its memory bound, bit-identical from run to run."""

from __future__ import annotations

import pytest
import torch

from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from tests.fakes.draft_agreement import DraftCase, assert_sweep_agrees, token_loss
from tests.fakes.kernel_agreement import Case, assert_agrees, relative, scored

pytestmark = pytest.mark.gpu

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@HALF
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 64, 1, torch.bfloat16, ignored=0.0),
        Case(1, 512, 50257, torch.bfloat16, ignored=0.0),
        Case(129, 64, 257, torch.bfloat16, padding=3),
        Case(777, 1032, 32003, torch.bfloat16, padding=11, temperature="each"),
        Case(777, 1032, 32003, torch.bfloat16, chosen=0.4, temperature="number"),
        Case(1000, 2048, 40000, torch.bfloat16, entropy=False),
        # The workspace decides: all logits saved, some columns saved, many slices of rows.
        Case(777, 1032, 32003, torch.bfloat16, workspace=1 << 30, temperature="each"),
        Case(2048, 512, 50257, torch.bfloat16, workspace=100 << 20),
        Case(2048, 512, 50257, torch.bfloat16, workspace=150 << 20),
    ],
    ids=str,
)
def test_kernels_agree_with_the_oracle(case: Case, dtype: torch.dtype) -> None:
    case = Case(**{**case.__dict__, "dtype": dtype})
    assert_agrees(case, "triton", "cuda")
    assert_agrees(case, "chunked", "cuda")


def test_extreme_logits_keep_the_log_prob() -> None:
    case = Case(300, 256, 9001, torch.bfloat16, scale=1e4 / 4)
    got, hidden_grad, weight_grad = scored(case, "triton", "cuda")
    exact, exact_hidden_grad, exact_weight_grad = scored(case, "reference", "cuda")
    assert relative(got.logprob, exact.logprob) < 1e-6
    # A softmax this sharp is one-hot except for near ties, so gradients are a few large entries.
    assert relative(hidden_grad, exact_hidden_grad) < 1e-2
    assert relative(weight_grad, exact_weight_grad) < 1e-2


def test_all_gradients_are_initialized() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        for workspace in (64 << 20, 100 << 20, 1 << 30):
            out, hidden_grad, weight_grad = scored(Case(1000, 512, 32003, torch.bfloat16, padding=5, workspace=workspace), "triton", "cuda")
            for x in (out.logprob, out.entropy, hidden_grad, weight_grad):
                assert x is not None and torch.isfinite(x).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_runs_are_bit_identical() -> None:
    case = Case(1000, 1024, 32003, torch.bfloat16)
    first, second = scored(case, "triton", "cuda"), scored(case, "triton", "cuda")
    assert torch.equal(first[0].logprob, second[0].logprob)
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


@pytest.mark.parametrize("workspace_mib", [128, 512, 2048])
def test_peak_memory_is_within_the_workspace(workspace_mib: int) -> None:
    rows, width, vocab = 4096, 1024, 100_000
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = linear_logprob(hidden, weight, labels, entropy=True, workspace_bytes=workspace_mib << 20, implementation="triton")
    grads = torch.autograd.grad(out.logprob.sum(), (hidden, weight))
    used = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
    # In addition to the workspace: the results, and per-row vectors of statistics.
    assert used <= (workspace_mib << 20) + (8 << 20)


@HALF
@pytest.mark.parametrize("workspace_mib", [64, 1024])
def test_policy_loss_matches_log_probs_and_autograd(dtype: torch.dtype, workspace_mib: int) -> None:
    case = Case(1500, 512, 32003, dtype, chosen=0.7, temperature="each")
    hidden, weight, labels, options = case.tensors("cuda")
    options.pop("hit")
    hidden.requires_grad_()
    weight.requires_grad_()
    advantage = torch.randn(case.rows, device="cuda")

    def token_loss(logprob, entropy, rows):
        return (-advantage[rows] * (logprob * 0.1).exp() - 0.01 * entropy).sum(), {"tokens": torch.tensor(float(len(rows)))}

    # Without a loss scale, small entries of fp16 gradients lose digits.
    scale = 0.01 if dtype == torch.bfloat16 else 64.0
    out = linear_policy_loss(
        hidden, weight, labels, token_loss, grad_scale=scale, workspace_bytes=workspace_mib << 20, implementation="triton", **options
    )
    got = torch.autograd.grad(out.loss_sum * scale, (hidden, weight))
    exact = linear_logprob(hidden, weight, labels, implementation="reference", **options)
    keep = ((labels != -100) & options["rows"]).nonzero().squeeze(1)
    loss = token_loss(exact.logprob[keep], exact.entropy[keep], keep)[0]
    expected = torch.autograd.grad(loss * scale, (hidden, weight))
    assert torch.isclose(out.loss_sum, loss, rtol=1e-5)
    assert out.sums["tokens"] == len(keep)
    for tensor, exact_grad in zip(got, expected, strict=True):
        assert relative(tensor, exact_grad) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


DEPTHS = (
    {"loss": "tv", "mix": 0.9},
    {"loss": "kl", "weight": 0.5, "detach_weight": True},
    {"loss": "soft_ce", "weight": 0.3},
    {"loss": "e2e_tv", "detach_weight": True},
    {"loss": "e2e_greedy", "mix": 0.9},
)


@pytest.mark.parametrize("implementation", ["triton", "chunked"])
@pytest.mark.parametrize("workspace_mib", [64, 1024])
def test_draft_losses_in_the_policy_sweep_match_the_oracle(implementation: str, workspace_mib: int) -> None:
    case = DraftCase(777, 1032, 32003, torch.bfloat16, padding=11, drafts=DEPTHS)
    assert_sweep_agrees(case, "cuda", values=2e-4, workspace_bytes=workspace_mib << 20, implementation=implementation)


def test_sweeps_with_drafts_are_bit_identical_and_within_the_workspace() -> None:
    case = DraftCase(4096, 1024, 100_000, torch.bfloat16, drafts=({"loss": "tv", "detach_weight": True},))
    trunk, weight, labels, drafts, options = case.tensors("cuda")
    states = (trunk, weight, drafts[0].hidden)
    grads = []
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = linear_policy_loss(trunk, weight, labels, token_loss, drafts=drafts, workspace_bytes=256 << 20, **options)
        grads.append(torch.autograd.grad(out.loss_sum, states))
        # In addition to the workspace: the selected rows of both states, their gradients before scattering, and statistics.
        used = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in grads[-1])
        assert used <= (256 << 20) + 4 * trunk.nbytes + (8 << 20)
    assert all(torch.equal(first, second) for first, second in zip(*grads, strict=True))


def test_auto_selects_the_fastest_measured_backend(caplog: pytest.LogCaptureFixture) -> None:
    from mtpctl.kernels import dispatch

    dispatch._log_choice.cache_clear()
    measured = torch.cuda.get_device_capability() in dispatch.MEASURED_BACKENDS
    for rows, expected in ((4, "chunked"), (64, "triton" if measured else "chunked")):
        with caplog.at_level("INFO", logger="mtpctl.kernels"):
            linear_logprob(
                torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16),
                torch.randn(99, 64, device="cuda", dtype=torch.bfloat16),
                torch.arange(rows, device="cuda"),
            )
        assert f"auto runs {expected}" in caplog.text
