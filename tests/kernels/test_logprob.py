"""`linear_logprob` on any device: the chunked backend against the float64 oracle, and properties of every implementation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtpctl.kernels.logprob import LogProbOut, linear_logprob
from tests.fakes.kernel_agreement import Case, assert_agrees, relative, scored, upstream

cases = st.builds(
    Case,
    rows=st.integers(1, 40),
    hidden=st.integers(1, 33),
    vocab=st.integers(4, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    padding=st.integers(0, 3),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    chosen=st.sampled_from([None, 0.5]),
    temperature=st.sampled_from(["one", "number", "each"]),
    entropy=st.booleans(),
    # One saved chunk; several recomputed chunks; chunks of minimal width.
    workspace=st.sampled_from([1 << 22, 100_000, 1]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=60)
@given(case=cases)
@example(Case(1, 5, 4, torch.bfloat16, padding=1, ignored=0.0, entropy=False, workspace=1 << 22, seed=607))  # log-prob of almost 0
def test_chunked_agrees_with_the_oracle(case: Case) -> None:
    assert_agrees(case, "chunked")


@pytest.mark.parametrize("workspace", [1 << 20, 3 << 20, 1 << 30])
def test_cpu_results_of_a_row_do_not_depend_on_other_rows(workspace: int) -> None:
    hidden, weight, labels = torch.randn(700, 64), torch.randn(2000, 64), torch.randint(0, 2000, (700,))

    def scores(first: int, last: int) -> LogProbOut:
        rows = slice(first, last)
        temperature = torch.linspace(0.5, 2.0, 700)[rows]
        return linear_logprob(
            hidden[rows],
            weight,
            labels[rows],
            temperature=temperature,
            entropy=True,
            topk=3,
            workspace_bytes=workspace,
            implementation="chunked",
        )

    whole = scores(0, 700)
    assert whole.entropy is not None and whole.topk is not None
    for first, last in [(0, 33), (100, 141), (300, 700), (5, 700), (668, 700)]:
        part, rows = scores(first, last), slice(first, last)
        assert part.entropy is not None and part.topk is not None
        assert part.logprob.equal(whole.logprob[rows]) and part.entropy.equal(whole.entropy[rows])
        assert part.topk.logprob.equal(whole.topk.logprob[rows]) and part.topk.ids.equal(whole.topk.ids[rows])


@pytest.mark.parametrize("workspace", [1, 1 << 22])
def test_gradients_match_finite_differences(workspace: int) -> None:
    hidden = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(70, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 69, -100, 63, 64])

    def scores(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = linear_logprob(h, w, labels, temperature=0.8, entropy=True, workspace_bytes=workspace, implementation="chunked")
        assert out.entropy is not None
        return out.logprob, out.entropy

    assert torch.autograd.gradcheck(scores, (hidden, weight))


def test_softmax_computed_by_hand() -> None:
    # Logits 0 and log 3: probabilities 1/4 and 3/4.
    out = linear_logprob(
        torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [math.log(3)]]), torch.tensor([0, 1]), entropy=True, hit=True, topk=2
    )
    assert torch.allclose(out.logprob, torch.tensor([math.log(1 / 4), math.log(3 / 4)]))
    assert out.entropy is not None and out.hit is not None and out.topk is not None
    assert torch.allclose(out.entropy, torch.full((2,), -(1 / 4) * math.log(1 / 4) - (3 / 4) * math.log(3 / 4)))
    assert out.hit.tolist() == [False, True]
    assert out.topk.ids.tolist() == [[1, 0], [1, 0]]
    assert torch.allclose(out.topk.logprob[0].exp(), torch.tensor([3 / 4, 1 / 4]))


def test_unrequested_outputs_are_none() -> None:
    out = linear_logprob(torch.randn(3, 4), torch.randn(9, 4), torch.tensor([1, 2, 3]))
    assert isinstance(out, LogProbOut)
    assert (out.entropy, out.hit, out.topk) == (None, None, None)


def test_unselected_rows_give_zero_and_get_no_gradient() -> None:
    hidden = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    labels = torch.tensor([3, -100, 7, 9, -100, 11])
    by_mask = linear_logprob(
        hidden, weight, labels, rows=torch.tensor([True, True, True, False, False, False]), entropy=True, hit=True, topk=2
    )
    assert (by_mask.logprob != 0).tolist() == [True, False, True, False, False, False]
    assert by_mask.entropy is not None and by_mask.entropy[[1, 3, 4, 5]].tolist() == [0.0] * 4
    (grad,) = torch.autograd.grad(by_mask.logprob.sum(), hidden)
    assert grad.abs().sum(1).bool().tolist() == [True, False, True, False, False, False]


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_all_rows_masked_gives_zeros_and_a_backward_pass(implementation: str) -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    out = linear_logprob(hidden, weight, torch.full((4,), -100), entropy=True, hit=True, topk=3, implementation=implementation)
    assert out.logprob.tolist() == [0.0] * 4
    assert out.topk is not None and out.topk.ids.shape == (4, 3)
    for grad in torch.autograd.grad(out.logprob.sum(), (hidden, weight)):
        assert not grad.any()


def test_zero_rows_give_empty_results() -> None:
    out = linear_logprob(torch.randn(0, 8), torch.randn(50, 8), torch.zeros(0, dtype=torch.long), entropy=True)
    assert out.logprob.shape == (0,)


def test_vocabulary_of_one_entry_has_log_prob_zero() -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    out = linear_logprob(hidden, torch.randn(1, 8), torch.zeros(3, dtype=torch.long), entropy=True, hit=True)
    assert out.logprob.tolist() == [0.0] * 3
    assert out.entropy is not None and out.entropy.tolist() == [0.0] * 3
    assert out.hit is not None and out.hit.all()
    assert not torch.autograd.grad(out.logprob.sum(), hidden)[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_logits_keep_log_prob_and_entropy(dtype: torch.dtype) -> None:
    case = Case(16, 64, 500, dtype, scale=1e4 / 3, workspace=20_000)
    got, *grads = scored(case, "chunked")
    exact, *exact_grads = scored(case, "reference")
    assert exact.logprob.abs().max() > 1e4
    assert relative(got.logprob, exact.logprob) < 1e-6
    assert got.entropy is not None and exact.entropy is not None
    assert (got.entropy - exact.entropy).abs().max() < 1e-3
    for tensor, expected in zip(grads, exact_grads, strict=True):
        assert torch.isfinite(tensor).all()
        assert relative(tensor, expected) < 1e-2


def test_all_results_and_gradients_are_initialized() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for case in (Case(9, 8, 130, torch.bfloat16, padding=5, workspace=1), Case(9, 8, 130, torch.float32, chosen=0.5)):
            out, *grads = scored(case, "chunked")
            for x in (out.logprob, out.entropy, *grads):
                assert x is not None and torch.isfinite(x).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_detached_weight_gets_no_gradient_and_hidden_is_unchanged() -> None:
    case = Case(9, 8, 130, torch.float32)
    _, with_weight, _ = scored(case, "chunked")
    hidden, weight, labels, options = case.tensors()
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear_logprob(hidden, weight, labels, detach_weight=True, **options)
    assert out.entropy is not None
    by_logprob, by_entropy = upstream(case, "cpu")
    ((out.logprob * by_logprob).sum() + (out.entropy * by_entropy).sum()).backward()
    assert weight.grad is None
    assert torch.allclose(hidden.grad, with_weight)


def test_tied_head_adds_to_the_embedding_gradient() -> None:
    table = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    tokens, labels = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    grads = []
    for implementation in ("chunked", "reference"):
        out = linear_logprob(torch.nn.functional.embedding(tokens, table), table, labels, implementation=implementation)
        grads.append(torch.autograd.grad(out.logprob.sum(), table)[0])
    assert torch.allclose(*grads, atol=1e-12)


def test_second_backward_pass_over_one_graph_is_equal() -> None:
    hidden, weight, labels, options = Case(9, 8, 130, torch.float32).tensors()
    hidden.requires_grad_()
    out = linear_logprob(hidden, weight, labels, **options)
    first = torch.autograd.grad(out.logprob.sum(), hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.logprob.sum(), hidden)[0])


def test_second_derivative_is_rejected() -> None:
    """The backward pass is not differentiable: autograd would record it without the softmax."""
    hidden, weight, labels, options = Case(9, 8, 130, torch.float32).tensors()
    weight.requires_grad_()
    out = linear_logprob(hidden.requires_grad_(), weight, labels, **options)
    (grad,) = torch.autograd.grad(out.logprob.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(grad.square().sum(), weight)


def test_main_grad_is_added_to_and_flagged() -> None:
    case = Case(9, 8, 130, torch.bfloat16, entropy=False, ignored=0.0)
    hidden, weight, labels, _ = case.tensors()
    plain = weight.clone().requires_grad_()
    linear_logprob(hidden, plain, labels).logprob.sum().backward()
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.ones(130, 8)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    linear_logprob(hidden, weight, labels, main_grad=True).logprob.sum().backward()
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert plain.grad is not None
    assert relative(weight.main_grad - 1, plain.grad) < 1e-2  # type: ignore[attr-defined]


def test_tied_heads_main_grad_keeps_the_embedding_gradient() -> None:
    """Megatron marks such a weight and adds autograd's gradient to `main_grad`."""
    tokens, labels = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        grads = []
        for fused in (False, True):
            table = torch.nn.Parameter(torch.linspace(-1, 1, 240).view(30, 8))
            table.main_grad, table.grad_added_to_main_grad, table.zero_out_wgrad = torch.zeros(30, 8), False, True  # type: ignore[attr-defined]
            linear_logprob(torch.nn.functional.embedding(tokens, table), table, labels, main_grad=fused).logprob.sum().backward()
            assert table.grad is not None
            grads.append(table.main_grad + table.grad)  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.allclose(*grads, atol=1e-6)


def test_auto_logs_its_choice(caplog: pytest.LogCaptureFixture) -> None:
    from mtpctl.kernels import dispatch

    dispatch._log_choice.cache_clear()
    with caplog.at_level("INFO", logger="mtpctl.kernels"):
        linear_logprob(torch.randn(2, 4), torch.randn(9, 4), torch.tensor([1, 2]))
    assert "auto runs chunked on cpu" in caplog.text
