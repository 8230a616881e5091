"""The KL to a teacher over its candidates, and its gradients, match autograd through all logits in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.cluster.rendezvous import join_store
from mtpctl.kernels.candidates import CandidateTerm, candidate_loss
from mtpctl.rl.losses import Kl, candidate_kl
from tests.fakes.forked import run_ranks
from tests.fakes.kernel_agreement import relative

TOKENS, HIDDEN, VOCAB, TOPK, TEMPERATURE, SCALE = 23, 12, 50, 4, 0.7, 0.31


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States, head, candidates with the teacher's log-probs, and weights, some of which are 0."""
    torch.manual_seed(3)
    hidden, weight = torch.randn(TOKENS, HIDDEN, dtype=torch.float64), torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    likely, ids = torch.log_softmax(torch.randn(TOKENS, VOCAB, dtype=torch.float64), 1).topk(TOPK, 1)
    counts = torch.rand(TOKENS, dtype=torch.float64)
    counts[4::5] = 0
    return hidden, weight, ids, likely, counts


def kl_of_every_logit(kl: Kl, logits: Tensor, ids: Tensor, likely: Tensor) -> Tensor:
    """The KL [T] over candidates and rest: the policy's rest from the other logits, the teacher's as 1 minus the candidates."""
    logprobs = torch.log_softmax(logits, 1)
    named = logprobs.gather(1, ids)
    rest = torch.logsumexp(logprobs.scatter(1, ids, float("-inf")), 1)
    p, q = torch.cat([named, rest.unsqueeze(1)], 1), torch.cat([likely, (1 - likely.exp().sum(1, keepdim=True)).log()], 1)
    return (p.exp() * (p - q)).sum(1) if kl == "reverse" else (q.exp() * (q - p)).sum(1)


def right(kl: Kl) -> tuple[float, Tensor, Tensor]:
    hidden, weight, ids, likely, counts = drawn()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = (counts * kl_of_every_logit(kl, hidden @ weight.T / TEMPERATURE, ids, likely)).sum()
    (loss * SCALE).backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.item(), hidden.grad, weight.grad


def term_of(kl: Kl, ids: Tensor, likely: Tensor, counts: Tensor) -> CandidateTerm:
    return CandidateTerm(ids, counts, lambda named, rest, rows: candidate_kl(kl, named, rest, likely[rows]))


def result(kl: Kl, weight: Tensor, **options: Any) -> tuple[float, Tensor, Tensor]:
    hidden, _, ids, likely, counts = drawn()
    hidden.requires_grad_()
    out = candidate_loss(hidden, weight, term_of(kl, ids, likely, counts), grad_scale=SCALE, temperature=TEMPERATURE, **options)
    assert torch.equal(out.divergence == 0, counts == 0)
    by_hidden, by_weight = torch.autograd.grad(out.loss_sum * SCALE, (hidden, weight))
    return out.loss_sum.item(), by_hidden, by_weight


@pytest.mark.parametrize("workspace", [1 << 20, 3 * 8 * 64 * 5])
@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_loss_and_gradients_match_the_dense_formula(kl: Kl, workspace: int) -> None:
    loss, by_hidden, by_weight = right(kl)
    value, *grads = result(kl, drawn()[1].requires_grad_(), workspace_bytes=workspace)
    assert value == pytest.approx(loss, rel=1e-10)
    assert relative(grads[0], by_hidden) < 1e-10 and relative(grads[1], by_weight) < 1e-10


def test_head_gradients_are_added_to_main_grad() -> None:
    _, _, by_weight = right("reverse")
    weight = drawn()[1].requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight).detach(), False  # type: ignore[attr-defined]
    result("reverse", weight, main_grad=True)
    assert relative(weight.main_grad - 1, by_weight) < 1e-9  # type: ignore[attr-defined]


@pytest.mark.parametrize("split", [32, 64])
def test_vocabulary_split_over_ranks_gives_equal_results(split: int) -> None:
    """Over two ranks; the second one ends in padding, or is all padding."""
    loss, by_hidden, by_weight = right("reverse")

    def rank(place: Any) -> dict[str, Any]:
        torch.set_num_threads(1)  # threads of the process that was forked are not there
        torch.distributed.init_process_group(
            "gloo", store=join_store(place.master, place.deadline_s), rank=place.rank, world_size=place.world_size
        )
        mine = torch.zeros(split, HIDDEN, dtype=torch.float64)
        stored = drawn()[1][place.rank * split : (place.rank + 1) * split]
        mine[: len(stored)] = stored
        value, *grads = result("reverse", mine.requires_grad_(), group=torch.distributed.group.WORLD, valid_vocab=VOCAB)
        torch.distributed.destroy_process_group()
        return {"value": value, "grads": [grad.tolist() for grad in grads]}

    answers, error = run_ranks(2, rank, 60)
    assert not error, error
    for answer in answers:
        assert answer["value"] == pytest.approx(loss, rel=1e-10)
        assert relative(torch.tensor(answer["grads"][0], dtype=torch.float64), by_hidden) < 1e-10
    joined = torch.cat([torch.tensor(answer["grads"][1], dtype=torch.float64) for answer in answers])[:VOCAB]
    assert relative(joined, by_weight) < 1e-10


@pytest.mark.parametrize("tail", [0.3, 1e-2, 1e-4, 1e-7, 1e-10])
@pytest.mark.parametrize("apart", [0.1, 1.0])
@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_bf16_gradients_are_within_rounding_for_small_tails(kl: Kl, apart: float, tail: float) -> None:
    """Against float64 from the same bf16 tensors. The policy leaves about `tail` to the tokens that are no candidates, and the teacher is
    close to it or not; the teacher's tail is its own, or a thousandth of all if that is more."""
    torch.manual_seed(5)
    hidden = torch.randn(64, 32, dtype=torch.float64)
    weight = torch.randn(200, 32, dtype=torch.float64) / 8
    # The candidates' logits are raised along a further dimension of the states, which is 1.
    ids = torch.arange(TOPK).expand(64, TOPK)
    hidden[:, 0], weight[:, 0] = 1.0, 0.0
    weight[:TOPK, 0] = math.log(50 / tail)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = (hidden.double() @ weight.double().T).requires_grad_()
    teacher = torch.log_softmax(logits.detach() + apart * torch.randn(64, 200, dtype=torch.float64), 1).gather(1, ids)
    least = max(0.0, 1e-3 - float(1 - teacher.exp().sum(1).min())) if tail < 1e-3 else 0.0
    teacher = teacher + math.log(1 - least)
    counts = torch.rand(64, dtype=torch.float64)
    by_logit = torch.autograd.grad((counts * kl_of_every_logit(kl, logits, ids, teacher)).sum(), logits)[0]
    expected = by_logit @ weight.double(), by_logit.T @ hidden.double()

    hidden.requires_grad_()
    weight.requires_grad_()
    out = candidate_loss(hidden, weight, term_of(kl, ids, teacher, counts))
    grads = torch.autograd.grad(out.loss_sum, (hidden, weight))
    # A result is rounded to 8 bits: at most 2^-8 of it, plus what single precision does to logits of this size.
    for grad, reference in zip(grads, expected, strict=True):
        assert relative(grad.double(), reference) < 2**-8 + 1e-4


def test_tail_below_fp32_precision_is_clamped() -> None:
    """A policy that gives 1e-9 to all other tokens, and a teacher that gives them a half: their logits are to rise by a half in all."""
    weight = torch.eye(8)
    hidden = torch.zeros(1, 8)
    hidden[0, 0] = math.log(7 / 1e-9)
    hidden.requires_grad_()
    term = term_of("forward", torch.tensor([[0]]), torch.tensor([[math.log(0.5)]]), torch.ones(1))
    out = candidate_loss(hidden, weight, term)
    (grad,) = torch.autograd.grad(out.loss_sum, hidden)
    assert grad[0, 0].item() == pytest.approx(0.5, rel=1e-5)
    assert grad[0, 1:].tolist() == pytest.approx([-0.5 / 7] * 7, rel=1e-5)
    assert out.loss_sum.item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-9), rel=1e-5)


def test_rest_is_empty_if_all_tokens_are_candidates() -> None:
    hidden, weight, *_ = drawn()
    logprobs = torch.log_softmax(hidden @ weight[:TOPK].T, 1)
    ids = torch.arange(TOPK).expand(TOKENS, TOPK)
    states = hidden.clone().requires_grad_()
    out = candidate_loss(states, weight[:TOPK], term_of("forward", ids, logprobs, torch.ones(TOKENS, dtype=torch.float64)))
    (grad,) = torch.autograd.grad(out.loss_sum, states)
    assert out.divergence.abs().max() < 1e-10 and grad.abs().max() < 1e-10


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("entry", "message"),
    [(math.nan, r"^weight: nan at \[7, 2\], expected finite"), (1e300, r"^hidden: logits overflow torch\.float32: .*\|weight\| 1e\+300")],
)
def test_logits_that_are_not_finite_are_reported(entry: float, message: str, learns: bool) -> None:
    hidden, weight, ids, likely, counts = drawn()
    hidden = hidden.mul(1e10).requires_grad_(learns)
    weight[7, 2] = entry
    with pytest.raises(ValueError, match=message):
        candidate_loss(hidden, weight, term_of("reverse", ids, likely, counts)).loss_sum.backward()


def test_candidates_of_wrong_length_are_rejected() -> None:
    hidden, weight, *_ = drawn()
    with pytest.raises(ValueError, match=r"ids: shape \(3, 2\) does not fit hidden \(23, 12\): expected \[23, k\]"):
        candidate_loss(hidden, weight, term_of("reverse", torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2), torch.ones(3)))
