"""The KL to a teacher over its candidates, with its gradients: against autograd through every logit, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.cluster.meeting import join_store
from mtpctl.kernels.candidates import candidates
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.rl.distillation import Kl, candidate_kl
from mtpctl.trainer.candidate_loss import CandidateLoss
from tests.forked import run_ranks
from tests.kernels.agreement import relative

TOKENS, HIDDEN, VOCAB, TOPK, TEMPERATURE, SCALE = 23, 12, 50, 4, 0.7, 0.31


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States, head, sampled tokens, candidates (the sampled one among some of them) with the teacher's log-probs, weights, gains."""
    torch.manual_seed(3)
    hidden, weight = torch.randn(TOKENS, HIDDEN, dtype=torch.float64), torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    labels = torch.randint(VOCAB, (TOKENS,))
    likely, ids = torch.log_softmax(torch.randn(TOKENS, VOCAB, dtype=torch.float64), 1).topk(TOPK, 1)
    ids[::3, 0] = labels[::3]
    return hidden, weight, labels, ids, likely, torch.rand(TOKENS, dtype=torch.float64), torch.randn(TOKENS, dtype=torch.float64)


def right(kl: Kl) -> tuple[float, Tensor, Tensor]:
    hidden, weight, labels, ids, likely, counts, gains = drawn()
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs = torch.log_softmax(hidden @ weight.T / TEMPERATURE, 1)
    apart = candidate_kl(kl, logprobs.gather(1, ids), likely)
    loss = (counts * apart).sum() - (gains * logprobs.gather(1, labels.unsqueeze(1)).squeeze(1)).sum()
    (loss * SCALE).backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.item(), hidden.grad, weight.grad


def found(kl: Kl, weight: Tensor, **options: Any) -> tuple[float, Tensor, Tensor]:
    hidden, _, labels, ids, likely, counts, gains = drawn()
    hidden.requires_grad_()
    named = torch.cat([ids, labels.unsqueeze(1)], 1)
    made = candidates(hidden, weight, named, temperature=TEMPERATURE, **options)
    term = CandidateLoss(kl, made, likely, counts)

    def token_loss(logprob: Tensor, entropy: Tensor | None, places: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        further, apart = term(logprob, places)
        return further - (gains[places] * logprob).sum(), {"apart": apart.sum()}

    out = linear_policy_loss(hidden, weight, labels, token_loss, grad_scale=SCALE, temperature=TEMPERATURE, **options)
    by_hidden, by_weight = torch.autograd.grad(out.loss_sum * SCALE + made.loss() * SCALE, (hidden, weight))
    return out.loss_sum.item(), by_hidden, by_weight


@pytest.mark.parametrize("workspace", [1 << 20, 3 * 8 * 64 * 5])
@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_loss_and_gradients_are_those_of_every_logit(kl: Kl, workspace: int) -> None:
    loss, by_hidden, by_weight = right(kl)
    value, *grads = found(kl, drawn()[1].requires_grad_(), workspace_bytes=workspace)
    assert value == pytest.approx(loss, rel=1e-10)
    assert relative(grads[0], by_hidden) < 1e-10 and relative(grads[1], by_weight) < 1e-10


def test_gradients_of_the_head_are_added_to_megatrons_buffer() -> None:
    _, _, by_weight = right("reverse")
    weight = drawn()[1].requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight).detach(), False  # type: ignore[attr-defined]
    found("reverse", weight, main_grad=True)
    assert relative(weight.main_grad - 1, by_weight) < 1e-9  # type: ignore[attr-defined]


def test_a_vocabulary_split_over_ranks_gives_the_same() -> None:
    """Over two ranks, the second of which ends in padding."""
    loss, by_hidden, by_weight = right("reverse")
    split = 32

    def rank(place: Any) -> dict[str, Any]:
        torch.set_num_threads(1)  # threads of the process that was forked are not there
        torch.distributed.init_process_group(
            "gloo", store=join_store(place.master, place.deadline_s), rank=place.rank, world_size=place.world_size
        )
        mine = torch.zeros(split, HIDDEN, dtype=torch.float64)
        held = drawn()[1][place.rank * split : (place.rank + 1) * split]
        mine[: len(held)] = held
        value, *grads = found("reverse", mine.requires_grad_(), group=torch.distributed.group.WORLD, valid_vocab=VOCAB)
        torch.distributed.destroy_process_group()
        return {"value": value, "grads": [grad.tolist() for grad in grads]}

    answers, error = run_ranks(2, rank, 60)
    assert not error, error
    for answer in answers:
        assert answer["value"] == pytest.approx(loss, rel=1e-10)
        assert relative(torch.tensor(answer["grads"][0], dtype=torch.float64), by_hidden) < 1e-10
    joined = torch.cat([torch.tensor(answer["grads"][1], dtype=torch.float64) for answer in answers])[:VOCAB]
    assert relative(joined, by_weight) < 1e-10


def test_ids_of_another_number_of_tokens_are_refused() -> None:
    hidden, weight, *_ = drawn()
    with pytest.raises(ValueError, match=r"ids: shape \(3, 2\) does not fit hidden \(23, 12\): expected \[23, k\]"):
        candidates(hidden, weight, torch.zeros(3, 2, dtype=torch.long))
