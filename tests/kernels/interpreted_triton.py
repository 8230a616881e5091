"""The Triton kernels under Triton's interpreter, in fp16, because the interpreter does not support bf16 products.

`test_interpreted.py` runs this file in a separate process, because the interpreter is selected at import.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.kernels.rows import expert_order_torch
from tests.fakes.draft_agreement import DraftCase, assert_sweep_agrees
from tests.fakes.fp8_matrices import assert_marks_blocks_that_are_not_finite, assert_same_bits
from tests.fakes.head_cases import HEAD_CASES, HeadCase
from tests.fakes.kernel_agreement import Case, assert_agrees, relative, scored
from tests.fakes.kernel_routes import ROUTING_CASES, SCORES, RoutingCase, assert_same_order, drawn_routes, uneven_routes
from tests.fakes.message_cases import MESSAGE_CASES, MessageCase, assert_messages_match

HALF = torch.float16
# 203 columns and tiles of 64 leave a partial last tile. Workspaces: no, some or all logits saved.
RAGGED = {"rows": 37, "hidden": 40, "vocab": 203, "dtype": HALF}


@pytest.mark.parametrize(
    "case",
    [
        Case(**RAGGED, workspace=1),
        Case(**RAGGED, padding=3, temperature="each", workspace=1 << 20),
        Case(**RAGGED, padding=3, temperature="number", chosen=0.5, workspace=1),
        Case(**RAGGED, entropy=False, workspace=1 << 20),
        Case(rows=1, hidden=8, vocab=1, dtype=HALF, ignored=0.0),
        Case(rows=3, hidden=8, vocab=2, dtype=HALF, ignored=0.0, workspace=1),
    ],
    ids=str,
)
def test_kernels_agree_with_the_oracle(case: Case) -> None:
    assert_agrees(case, "triton")


def test_saved_and_recomputed_columns_give_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpctl.kernels import triton_backend

    monkeypatch.setattr(triton_backend, "CHUNK_COLUMNS", 64)
    spare = 4 * 37 * 40  # reserved for the hidden gradient
    case = Case(**RAGGED, ignored=0.0, workspace=spare + 140 * 37 * 2 + 140 * 4)
    saved = []
    inner = triton_backend.Triton._saved_columns
    monkeypatch.setattr(triton_backend.Triton, "_saved_columns", lambda self, problem: saved.append(inner(self, problem)) or saved[-1])
    assert_agrees(case, "triton")
    assert saved == [64]


def test_large_logits_keep_precision() -> None:
    for workspace in (1, 1 << 20):
        case = Case(**RAGGED, scale=1e4 / 3, workspace=workspace)
        got, *grads = scored(case, "triton")
        exact, *exact_grads = scored(case, "reference")
        assert exact.logprob.abs().max() > 1e4
        assert relative(got.logprob, exact.logprob) < 1e-6
        for tensor, expected in zip(grads, exact_grads, strict=True):
            assert relative(tensor, expected) < 1e-2


def test_all_results_are_initialized() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for workspace in (1, 1 << 20):
            out, *grads = scored(Case(**RAGGED, padding=3, workspace=workspace), "triton")
            for x in (out.logprob, out.entropy, *grads):
                assert x is not None and torch.isfinite(x).all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("workspace", [1, 1 << 20], ids=["slices", "one slice"])
def test_policy_loss_matches_the_oracle(workspace: int) -> None:
    hidden, weight, labels, options = Case(**RAGGED, chosen=0.7, temperature="each").tensors()
    options.pop("hit")
    hidden.requires_grad_()
    weight.requires_grad_()

    def token_loss(logprob, entropy, rows):
        return (logprob * (rows - 15) + entropy).sum(), {}

    out = linear_policy_loss(hidden, weight, labels, token_loss, workspace_bytes=workspace, implementation="triton", **options)
    got = torch.autograd.grad(out.loss_sum, (hidden, weight))
    exact = linear_logprob(hidden, weight, labels, implementation="reference", **options)
    expected = torch.autograd.grad(token_loss(exact.logprob, exact.entropy, torch.arange(37))[0], (hidden, weight))
    for tensor, exact_grad in zip(got, expected, strict=True):
        assert relative(tensor, exact_grad) < 2e-3


@pytest.mark.parametrize("workspace", [1 << 20, 15_000], ids=["one slice", "slices"])
@pytest.mark.parametrize(
    "drafts",
    [
        ({"loss": "tv", "mix": 0.9}, {"loss": "kl", "weight": 0.5, "detach_weight": True}),
        ({"loss": "soft_ce"}, {"loss": "tv", "detach_weight": True}),
        ({"loss": "e2e_tv", "mix": 0.9}, {"loss": "e2e_greedy", "detach_weight": True}),
    ],
    ids=str,
)
def test_draft_losses_of_one_sweep_match_the_oracle(
    drafts: tuple[dict[str, object], ...], workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtpctl.kernels import triton_backend

    monkeypatch.setattr(triton_backend, "SUM_TILES", 2)  # so that sums over 3 tiles take two programs
    monkeypatch.setattr(triton_backend, "SUM_STEPS", 1)
    case = DraftCase(37, 16, 131, HALF, drafts=drafts, clear=0.02)
    # Saved logits are relative to the largest, and so one digit coarser than fp16 logits.
    assert_sweep_agrees(case, values=2e-4, spare=2e-3, workspace_bytes=workspace, implementation="triton")


def test_greedy_tie_goes_to_the_first_entry() -> None:
    from mtpctl.kernels.policy import linear_draft_loss

    teacher, weight = torch.randn(3, 8).half(), torch.randn(300, 8).half()
    flat = torch.zeros(3, 8, dtype=HALF)
    out = linear_draft_loss(flat, teacher, weight, torch.tensor([1, 2, 3]), implementation="triton")
    first = (teacher.double() @ weight.double().T).softmax(1)[:, 0]
    assert torch.allclose(out.greedy.double(), first, rtol=1e-2)


def test_unsupported_tensors_are_rejected() -> None:
    labels = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"needs torch.bfloat16 or torch.float16, hidden is torch.float32"):
        linear_logprob(torch.randn(2, 8), torch.randn(9, 8), labels, implementation="triton")
    with pytest.raises(ValueError, match="multiple of 8, hidden has 12"):
        linear_logprob(torch.randn(2, 12).half(), torch.randn(9, 12).half(), labels, implementation="triton")
    with pytest.raises(ValueError, match="weight rows at multiples of 16 bytes"):
        linear_logprob(torch.randn(2, 8).half(), torch.randn(9, 12).half()[:, 2:10], labels, implementation="triton")
    with pytest.raises(ValueError, match="does not support topk"):
        linear_logprob(torch.randn(2, 8).half(), torch.randn(9, 8).half(), labels, topk=2, implementation="triton")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("counts", [[5, 0, 40, 17, 3, 0], [16], [0, 0, 1]])
def test_weight_gradients_are_accumulated_per_group(counts: list[int], overwrite: bool) -> None:
    """Partial tiles, groups without rows, and buffers at equal strides with gaps."""
    from mtpctl.kernels.grouped import add_weight_grads_triton, weight_grads_unsupported

    torch.manual_seed(0)
    rows, m, n = sum(counts), 56, 40
    grad, x = torch.randn(rows, m, dtype=HALF), torch.randn(rows, n, dtype=HALF)
    before = torch.randn(len(counts), m * n + 24)
    into = before.clone()
    places = into[:, : m * n].unflatten(1, (m, n))
    assert weight_grads_unsupported(grad, x, places) is None
    add_weight_grads_triton(places, grad, x, torch.tensor(counts).cumsum(0).to(torch.int32), overwrite=overwrite)
    expected = before.clone()
    if overwrite:
        expected[:, : m * n] = 0.0
    for e, (a, b) in enumerate(zip(grad.float().split(counts), x.float().split(counts), strict=True)):
        expected[e, : m * n] += (a.t() @ b).flatten()
    assert relative(into, expected) < 1e-6


def test_row_sums_accumulate_in_fp32() -> None:
    from mtpctl.kernels.rows import row_sums_triton

    torch.manual_seed(0)
    rows, row_of = torch.randn(20, 1030, dtype=HALF), torch.randint(0, 20, (7, 3), dtype=torch.int32)
    assert relative(row_sums_triton(rows, row_of).float(), rows.float()[row_of.long()].sum(1)) < 5e-4


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 2, 24), (40, 300), (0, 8)])
def test_norm_and_gradients_match_the_formula(shape: tuple[int, ...], offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpctl.kernels import norm
    from mtpctl.kernels.norm import rms_norm

    monkeypatch.setattr(norm, "BACKWARD_PROGRAMS", 7)
    torch.manual_seed(0)
    x, weight, grad = torch.randn(shape, dtype=HALF), torch.randn(shape[-1], dtype=HALF), torch.randn(shape, dtype=HALF)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = rms_norm(*leaves, 1e-5, offset)
    actual = norm.rms_norm_triton(x, weight, 1e-5, offset), *norm.rms_norm_backward_triton(grad, x, weight, 1e-5, offset)
    for tensor, exact in zip(actual, (expected, *torch.autograd.grad(expected, leaves, grad.double())), strict=True):
        assert (tensor.double() - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.parametrize("case", HEAD_CASES, ids=str)
def test_heads_and_gradients_match_the_formula(case: HeadCase, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpctl.kernels import qkv

    monkeypatch.setattr(qkv, "TILE_ELEMENTS", 64)  # several programs
    mixed, layout, norm, angles, grads = case.drawn(HALF)
    expected = case.by_formula()
    actual = qkv.split_heads_triton(mixed, layout, norm, angles)
    gradients = qkv.split_heads_backward_triton(grads, None if norm is None else mixed, layout, norm, angles)
    case.assert_close([*actual, *gradients], expected, 2e-3)


@pytest.mark.parametrize("case", ROUTING_CASES, ids=str)
def test_routes_and_probs_match_the_reference(case: RoutingCase, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpctl.kernels import routing

    monkeypatch.setattr(routing, "TILE_ELEMENTS", 256)
    logits, bias, grad = case.drawn()
    load = torch.ones(case.experts, dtype=torch.int64)
    replay = case.replay()
    probs, routes = routing.route_triton(logits, bias, case.rule, load, replay)
    gradient = routing.route_backward_triton(grad, logits, routes, case.rule)
    case.assert_right(probs, routes, gradient)
    case.assert_counted(replay)
    assert torch.equal(load - 1, routes.sum(0))


def test_nonfinite_logits_still_select_distinct_experts() -> None:
    from mtpctl.kernels import routing
    from mtpctl.kernels.routing import RoutingRule

    logits = torch.tensor([[float("nan")] * 5, [float("-inf")] * 5, [0.0] * 5, [float("nan"), 1.0, float("inf"), 2.0, float("-inf")]])
    for scores in SCORES:
        _probs, routes = routing.route_triton(logits, None, RoutingRule(3, scores), None, None)
        assert routes.sum(1).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(("tokens", "experts", "k", "ranks"), [(41, 6, 2, 3), (300, 96, 3, 2), (1, 8, 8, 1)])
def test_expert_order_matches_the_portable_version(monkeypatch: pytest.MonkeyPatch, tokens: int, experts: int, k: int, ranks: int) -> None:
    """With several blocks of tokens and several programs for the sums."""
    from mtpctl.kernels import rows

    monkeypatch.setattr(rows, "TILE_ELEMENTS", 1024)
    routes = drawn_routes(tokens, experts, k)
    assert_same_order(rows.expert_order_triton(routes, k, ranks, tokens * k), expert_order_torch(routes, k, ranks))
    uneven = uneven_routes(tokens, experts, k)
    count = int(uneven.sum())
    order = rows.expert_order_triton(uneven, k, ranks, count)
    assert_same_order(order, expert_order_torch(uneven, k, ranks))
    bounded = rows.expert_order_triton(uneven, k, ranks, tokens * k)
    assert_same_order(replace(bounded, token_of=bounded.token_of[:count], pair_of=bounded.pair_of[:count]), order)
    probs = torch.where(uneven, torch.rand(tokens, experts), -1.0)
    strided = torch.cat([probs, torch.zeros(tokens, 3)], 1)[:, :experts]
    assert_same_order(rows.expert_order_triton(strided, k, ranks, count, -1.0), order)
    if k > 1:
        values = torch.randn(len(order.token_of), 5)
        torch.testing.assert_close(rows.row_sums_triton(values, order.row_of), rows.row_sums(values, order.row_of))


@pytest.mark.parametrize(("tokens", "experts", "k", "ranks"), [(150, 6, 2, 3), (64, 40, 5, 2), (3, 4, 1, 4), (0, 8, 2, 2)])
def test_destinations_match_the_portable_version(tokens: int, experts: int, k: int, ranks: int) -> None:
    from mtpctl.kernels import rows

    routes = drawn_routes(tokens, experts, k)
    actual, expected = rows.count_destinations_triton(routes, ranks), rows.count_destinations(routes, ranks)
    assert actual.mask.equal(expected.mask) and actual.counts.equal(expected.counts)
    order, copies = actual.order(min(k, ranks)), int(expected.counts[0].sum())
    assert_same_order(replace(order, token_of=order.token_of[:copies], pair_of=order.pair_of[:copies]), expected.order(min(k, ranks)))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", MESSAGE_CASES, ids=str)
def test_messages_match_dense_operations(case: MessageCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpctl.kernels import messages

    monkeypatch.setattr(messages, "_gather", messages.gather_triton)
    monkeypatch.setattr(messages, "_sum", messages.sum_triton)
    assert_messages_match(case, dtype)


@pytest.mark.parametrize("name", ["swiglu", "squared_relu"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 24), (5, 3000), (0, 8)])
def test_activations_and_gradients_match_the_portable_version(shape: tuple[int, ...], scaled: bool, name: str) -> None:
    from mtpctl.kernels import activations

    torch.manual_seed(0)
    width = shape[-1] * (2 if name == "swiglu" else 1)
    x, grad = torch.randn(*shape[:-1], width, dtype=HALF), torch.randn(shape, dtype=HALF)
    scale = torch.rand(shape[:-1]) if scaled else None
    exact = x.double(), None if scale is None else scale.double()
    out = getattr(activations, f"{name}_triton")(x, scale)
    assert out.shape == shape and relative(out.double(), getattr(activations, f"{name}_torch")(*exact)) < 1e-3
    actual_grads = getattr(activations, f"{name}_backward_triton")(grad, x, scale)
    for actual, expected in zip(actual_grads, getattr(activations, f"{name}_backward_torch")(grad.double(), *exact), strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or relative(actual.double(), expected) < 1e-3


@pytest.mark.parametrize(("tokens", "heads", "width"), [(37, 3, 20), (8, 4, 64), (0, 2, 8)])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
def test_scaled_heads_and_gradients_match_the_portable_version(
    tokens: int, heads: int, width: int, per_token: bool, with_base: bool
) -> None:
    from mtpctl.kernels import scaling

    torch.manual_seed(0)
    mixed, grad = torch.randn(tokens, heads * width + 6, dtype=HALF), torch.randn(tokens, heads, width, dtype=HALF)
    x = mixed[:, 3:-3].unflatten(-1, (heads, width))  # a slice of channels, as in the layer
    scale = torch.rand(tokens, heads) if per_token else torch.rand(heads).to(HALF)
    base = torch.randn_like(grad) if with_base else None
    out = scaling.scale_heads_triton(x, scale, base)
    assert relative(out.double(), scaling.scale_heads_torch(x.double(), scale.double(), None if base is None else base.double())) < 1e-3
    for actual, expected in zip(
        scaling.scale_heads_backward_triton(grad, x, scale),
        scaling.scale_heads_backward_torch(grad.double(), x.double(), scale.double()),
        strict=True,
    ):
        assert relative(actual.double(), expected) < 1e-3


def test_blocks_of_fp8_have_the_bits_of_torch() -> None:
    assert_same_bits("cpu")


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in multiply")
def test_scales_of_blocks_that_are_not_finite_are_not_finite() -> None:
    assert_marks_blocks_that_are_not_finite("cpu")
