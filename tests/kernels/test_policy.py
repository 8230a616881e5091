"""`linear_policy_loss` against the unfused loss of `mtpctl.rl`: value, sums and gradients, for any slicing of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.kernels import chunked
from mtpctl.kernels.drafts import Draft
from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.model.parallel import Rank
from mtpctl.rl.losses import LossInputs, policy_loss, token_terms
from mtpctl.rl.user_objective import load_loss
from mtpctl.user_code import is_code_reference
from tests.fakes import user_losses
from tests.fakes.draft_agreement import SCALE, DraftCase, assert_sweep_agrees, in_one_sweep, token_loss
from tests.fakes.forked import in_gloo_group, run_ranks
from tests.fakes.kernel_agreement import relative
from tests.fakes.policy_batch import rl_config

ROWS, WIDTH, VOCAB, SEQUENCES = 300, 16, 131, 7


def problem(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=g, dtype=torch.float64) * 0.3
    labels = torch.randint(0, VOCAB, (ROWS,), generator=g)
    mask = torch.rand(ROWS, generator=g) < 0.7
    with torch.no_grad():
        now = linear_logprob(hidden, weight, labels).logprob
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "labels": labels,
        "mask": mask,
        "old": now + torch.randn(ROWS, generator=g) * 0.3,
        "behaviour": now + torch.randn(ROWS, generator=g) * 0.3,
        "reference": now + torch.randn(ROWS, generator=g) * 0.3,
        "advantage": torch.randn(ROWS, generator=g, dtype=torch.float64),
        "seq_ids": torch.arange(ROWS) * SEQUENCES // ROWS,
    }


def loss_inputs(p: dict[str, Any], logprob: Tensor, entropy: Tensor | None) -> LossInputs:
    return LossInputs(
        logprob, p["old"], p["behaviour"], p["advantage"], p["mask"], p["seq_ids"], SEQUENCES, entropy=entropy, ref_logprob=p["reference"]
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "ppo"},
        {"loss": "ppo", "clip_high": 0.28, "clip_dual": 3.0, "entropy_coef": 0.01},
        {"loss": "ppo", "aggregate": "sequence", "kl_coef": 0.1},
        {"loss": "decoupled", "entropy_coef": 0.01},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2, "entropy_coef": 0.01},
        {"loss": "sapo", "aggregate": "sequence", "tau_neg": 2.0, "kl_coef": 0.1},
        {"loss": f"{user_losses.__file__}:squared", "entropy_coef": 0.01},
        {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    ],
    ids=lambda settings: str({**settings, "loss": settings["loss"].rpartition("/")[2]}),
)
@pytest.mark.parametrize("workspace", [1 << 22, 130 * 3 * 8 * VOCAB, 1], ids=["one slice", "slices of 128", "row by row"])
def test_fused_loss_matches_the_unfused_one(settings: dict[str, Any], workspace: int) -> None:
    config, p, scale = rl_config(**settings), problem(), 1 / 200
    out = linear_logprob(p["hidden"], p["weight"], p["labels"], entropy=True, rows=p["mask"], implementation="reference")
    inputs = loss_inputs(p, out.logprob, out.entropy)
    loss = load_loss(config)
    unfused = (
        policy_loss(inputs, config)
        if not is_code_reference(config.loss)
        else loss(out.logprob, out.entropy, token_terms(inputs, config), config)
    )
    expected = torch.autograd.grad(unfused.loss_sum * scale, (p["hidden"], p["weight"]))

    with torch.no_grad():  # GSPO's first pass: its terms depend on whole sequences; those of other losses do not depend on log-probs
        first = linear_logprob(p["hidden"], p["weight"], p["labels"], rows=p["mask"]).logprob
    terms = token_terms(loss_inputs(p, first, None), config)
    calls = []

    def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(len(rows))
        created = loss(logprob, entropy, terms.at(rows), config)
        return created.loss_sum, created.sums

    fused = linear_policy_loss(
        p["hidden"], p["weight"], p["labels"], token_loss, entropy=True, rows=p["mask"], grad_scale=scale, workspace_bytes=workspace
    )
    got = torch.autograd.grad(fused.loss_sum * scale, (p["hidden"], p["weight"]))
    assert sum(calls) == p["mask"].sum()
    assert (len(calls) == 1) == (workspace == 1 << 22)
    assert relative(fused.loss_sum, unfused.loss_sum.detach()) < 1e-9
    for name, value in unfused.sums.items():
        assert torch.isclose(fused.sums[name].double(), value.double(), rtol=1e-9, atol=1e-9), name
    for tensor, exact in zip(got, expected, strict=True):
        assert relative(tensor, exact) < 1e-9
    assert torch.allclose(fused.logprob, out.logprob)
    assert fused.entropy is not None and out.entropy is not None
    assert torch.allclose(fused.entropy, out.entropy)


def summed(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprob.sum(), {}


def test_other_upstream_gradient_rescales_the_gradients() -> None:
    p = problem()
    out = linear_policy_loss(p["hidden"], p["weight"], p["labels"], summed, grad_scale=0.5)
    got = torch.autograd.grad(out.loss_sum * 3, (p["hidden"], p["weight"]))
    expected = torch.autograd.grad(linear_logprob(p["hidden"], p["weight"], p["labels"]).logprob.sum() * 3, (p["hidden"], p["weight"]))
    for tensor, exact in zip(got, expected, strict=True):
        assert relative(tensor, exact) < 1e-12


def test_grad_scale_zero_gives_zero_gradients_that_cannot_be_rescaled() -> None:
    p = problem()
    out = linear_policy_loss(p["hidden"], p["weight"], p["labels"], summed, grad_scale=0.0)
    for grad in torch.autograd.grad(out.loss_sum * 0.0, (p["hidden"], p["weight"])):
        assert not grad.any()
    out = linear_policy_loss(p["hidden"], p["weight"], p["labels"], summed, grad_scale=0.0)
    with pytest.raises(ValueError, match=r"grad_scale: 0.0, but the loss received a gradient of 1.0"):
        out.loss_sum.backward()


@pytest.mark.parametrize("workspace", [1 << 22, 1], ids=["one slice", "row by row"])
def test_greedy_hits_match_linear_logprob(workspace: int) -> None:
    p = problem()
    p["labels"][::3] = (p["hidden"] @ p["weight"].T).argmax(1)[::3]
    out = linear_policy_loss(p["hidden"], p["weight"], p["labels"], summed, rows=p["mask"], hit=True, workspace_bytes=workspace)
    expected = linear_logprob(p["hidden"], p["weight"], p["labels"], rows=p["mask"], hit=True).hit
    assert out.hit is not None and expected is not None
    assert 60 < out.hit.sum() < 120
    assert torch.equal(out.hit, expected)


def test_main_grad_is_added_to_only_for_the_stated_gradient() -> None:
    p = problem()
    expected = torch.autograd.grad(linear_logprob(p["hidden"], p["weight"], p["labels"]).logprob.sum() * 0.5, p["weight"])[0]
    weight = torch.nn.Parameter(p["weight"].detach())
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    out = linear_policy_loss(p["hidden"], weight, p["labels"], summed, grad_scale=0.5, main_grad=True, workspace_bytes=1)
    (out.loss_sum * 0.5).backward()
    assert relative(weight.main_grad - 1, expected) < 1e-12  # type: ignore[attr-defined]
    p["hidden"].grad = None
    out = linear_policy_loss(p["hidden"], weight, p["labels"], summed, grad_scale=0.5, main_grad=True)
    with pytest.raises(ValueError, match=r"grad_scale: 0.5, but the loss received a gradient of 1.0"):
        out.loss_sum.backward()
    assert p["hidden"].grad is not None, "reading the gradient before the rest of the backward pass would leave a GPU idle"


def test_second_backward_pass_is_rejected() -> None:
    p = problem()
    out = linear_policy_loss(p["hidden"], p["weight"], p["labels"], summed)
    out.loss_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        out.loss_sum.backward()


def test_no_grad_call_only_scores() -> None:
    p = problem()
    with torch.no_grad():
        out = linear_policy_loss(p["hidden"], p["weight"], p["labels"], summed, rows=p["mask"], workspace_bytes=1)
    assert not out.loss_sum.requires_grad
    assert torch.isclose(out.loss_sum, out.logprob.sum())


def test_constant_loss_gives_zero_gradients() -> None:
    p = problem()
    out = linear_policy_loss(p["hidden"], p["weight"], p["labels"], lambda logprob, entropy, rows: (torch.zeros(()), {}))
    for grad in torch.autograd.grad(out.loss_sum, (p["hidden"], p["weight"])):
        assert not grad.any()


def test_all_rows_masked_gives_zero_loss_and_gradients() -> None:
    p = problem()
    out = linear_policy_loss(p["hidden"], p["weight"], torch.full((ROWS,), -100), summed, entropy=True)
    assert out.loss_sum == 0
    for grad in torch.autograd.grad(out.loss_sum, (p["hidden"], p["weight"])):
        assert not grad.any()


def test_nonfinite_weight_is_rejected() -> None:
    p = problem()
    weight = p["weight"].detach().clone()
    weight[5, 5] = float("inf")
    with pytest.raises(ValueError, match=r"weight: inf at \[5, 5\]"), torch.no_grad():
        linear_policy_loss(p["hidden"], weight, p["labels"], summed)
    out = linear_policy_loss(p["hidden"], weight, p["labels"], summed)
    with pytest.raises(ValueError, match=r"weight: inf at \[5, 5\]"):  # checked at the next synchronization
        out.loss_sum.backward()


CASE = DraftCase(150, 16, 134, torch.float64)
DEPTHS: dict[str, tuple[dict[str, Any], ...]] = {
    "isolated": ({"loss": "tv", "weight": 0.3, "detach_weight": True},),
    "joint": ({"loss": "kl", "weight": 2.0},),
    "three depths": (
        {"loss": "tv", "mix": 0.7},
        {"loss": "soft_ce", "weight": 0.5, "detach_weight": True},
        {"loss": "ce", "weight": 0.2},
    ),
}


@pytest.mark.parametrize("depths", DEPTHS)
@pytest.mark.parametrize("workspace", [1 << 24, 40 * 5 * 8 * 192, 1], ids=["one slice", "slices of rows", "row by row"])
def test_sweep_matches_separate_losses(depths: str, workspace: int) -> None:
    assert_sweep_agrees(replace(CASE, drafts=DEPTHS[depths]), values=1e-11, workspace_bytes=workspace)


def test_trunk_logits_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    inner = chunked.products.logits
    monkeypatch.setattr(chunked.products, "logits", lambda hidden, weight: products.append(len(hidden)) or inner(hidden, weight))
    out, _ = in_one_sweep(replace(CASE, drafts=DEPTHS["isolated"]), workspace_bytes=1 << 24)
    selected = int((CASE.tensors()[2] != -100).sum())
    assert products == [selected, int(out.drafts[0].logprob.count_nonzero())]


def test_half_precision_sweep_error_is_within_that_of_plain_torch() -> None:
    assert_sweep_agrees(replace(CASE, dtype=torch.bfloat16, drafts=DEPTHS["three depths"]), values=1e-4)


def test_isolated_drafts_give_the_trunk_no_gradient() -> None:
    alone, together = ({**in_one_sweep(replace(CASE, drafts=drafts))[1]} for drafts in ((), DEPTHS["isolated"]))
    assert torch.equal(alone["trunk"], together["trunk"]) and torch.equal(alone["weight"], together["weight"])


def test_no_grad_sweep_only_measures_drafts() -> None:
    trunk, weight, labels, drafts, options = CASE.tensors()
    with torch.no_grad():
        out = linear_policy_loss(trunk, weight, labels, token_loss, drafts=drafts, **options)
    assert not out.loss_sum.requires_grad
    assert torch.equal(out.drafts[0].overlap, in_one_sweep(CASE)[0].drafts[0].overlap)


def test_draft_without_rows_has_zero_loss_and_gradients() -> None:
    trunk, weight, labels, _, options = CASE.tensors()
    none = Draft(trunk.detach()[:0].requires_grad_(), torch.arange(0))
    out = linear_policy_loss(trunk, weight, torch.full_like(labels, -100), token_loss, drafts=[none], **options)
    for grad in torch.autograd.grad(out.loss_sum, (trunk, weight, none.hidden)):
        assert not grad.any()
    assert out.drafts[0].loss_sum == 0


def test_nonfinite_draft_states_are_named() -> None:
    trunk, weight, labels, drafts, options = CASE.tensors()
    bad = drafts[0].hidden.detach().clone()
    bad[4, 5] = float("nan")
    out = linear_policy_loss(trunk, weight, labels, token_loss, drafts=[replace(drafts[0], hidden=bad.requires_grad_())], **options)
    with pytest.raises(ValueError, match=r"hidden: nan at \["):
        out.loss_sum.backward()


@pytest.mark.parametrize("rows", [[3, 2, 5], [-1, 2, 5], [3, 4, 150]], ids=str)
def test_unsorted_or_missing_draft_rows_are_rejected(rows: list[int]) -> None:
    trunk, weight, labels, _, options = CASE.tensors()
    with pytest.raises(ValueError, match="rows of a draft: expected ascending indices from 0 to 149"):
        draft = Draft(trunk.detach()[:3], torch.tensor(rows))
        linear_policy_loss(trunk, weight, labels, token_loss, drafts=[draft], **options)


def test_sweep_over_a_sharded_vocabulary_gives_the_same() -> None:
    """Over three ranks, the last of which has only padding."""
    case = replace(CASE, drafts=DEPTHS["three depths"])
    out, expected = in_one_sweep(case)
    split = 66

    def rank_work(rank: Rank) -> dict[str, Any]:
        trunk, weight, labels, drafts, options = case.tensors()
        shard = torch.zeros(split, case.hidden, dtype=torch.float64)
        rows = weight.detach()[rank.rank * split : (rank.rank + 1) * split]
        shard[: len(rows)] = rows
        shard.requires_grad_()
        actual = linear_policy_loss(
            trunk,
            shard,
            labels,
            token_loss,
            drafts=drafts,
            grad_scale=SCALE,
            group=torch.distributed.group.WORLD,
            workspace_bytes=40 * 5 * 8 * 192,
            **options,
        )
        grads = torch.autograd.grad(actual.loss_sum * SCALE, (trunk, shard, *(draft.hidden for draft in drafts)))
        return {"drafts": [[x.tolist() for x in reported] for reported in actual.drafts], "grads": [grad.tolist() for grad in grads]}

    answers, error = run_ranks(3, in_gloo_group(rank_work), 60)
    assert not error, error
    for answer in answers:
        for reported, exact in zip(answer["drafts"], out.drafts, strict=True):
            for tensor, value in zip(reported, exact, strict=True):
                assert torch.allclose(torch.tensor(tensor, dtype=torch.float64), value.detach().double(), atol=1e-11)
        for name, grad in zip(expected, answer["grads"], strict=True):
            if name != "weight":
                assert relative(torch.tensor(grad, dtype=torch.float64), expected[name]) < 1e-10
    joined = torch.cat([torch.tensor(answer["grads"][1], dtype=torch.float64) for answer in answers])[: case.vocab]
    assert relative(joined, expected["weight"]) < 1e-10
