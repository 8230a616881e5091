"""A policy loss with drafts against the separate losses, for any slicing of rows and sharding of the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mtpctl.cluster.rendezvous import join_store
from mtpctl.kernels import chunked
from mtpctl.kernels.drafts import Draft
from mtpctl.kernels.policy import linear_policy_loss
from tests.fakes.draft_agreement import SCALE, DraftCase, assert_sweep_agrees, in_one_sweep, token_loss
from tests.fakes.forked import run_ranks
from tests.fakes.kernel_agreement import relative

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
    with pytest.raises(ValueError, match="rows of a draft: expected ascending ones of 0 to 149"):
        draft = Draft(trunk.detach()[:3], torch.tensor(rows))
        linear_policy_loss(trunk, weight, labels, token_loss, drafts=[draft], **options)


def test_sharded_vocabulary_gives_the_same() -> None:
    """Over three ranks, the last of which has only padding."""
    case = replace(CASE, drafts=DEPTHS["three depths"])
    out, expected = in_one_sweep(case)
    split = 66

    def rank(place: Any) -> dict[str, Any]:
        store = join_store(place.master, place.deadline_s)
        torch.distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
        trunk, weight, labels, drafts, options = case.tensors()
        tensor = torch.zeros(split, case.hidden, dtype=torch.float64)
        held = weight.detach()[place.rank * split : (place.rank + 1) * split]
        tensor[: len(held)] = held
        tensor.requires_grad_()
        actual = linear_policy_loss(
            trunk,
            tensor,
            labels,
            token_loss,
            drafts=drafts,
            grad_scale=SCALE,
            group=torch.distributed.group.WORLD,
            workspace_bytes=40 * 5 * 8 * 192,
            **options,
        )
        grads = torch.autograd.grad(actual.loss_sum * SCALE, (trunk, tensor, *(draft.hidden for draft in drafts)))
        torch.distributed.destroy_process_group()
        return {"drafts": [[x.tolist() for x in reported] for reported in actual.drafts], "grads": [grad.tolist() for grad in grads]}

    answers, error = run_ranks(3, rank, 60)
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
