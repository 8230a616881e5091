"""`linear_policy_loss` against the unfused loss of `mtpctl.rl`: value, sums and gradients, for any slicing of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.losses import LossInputs, policy_loss, token_terms
from mtpctl.rl.user_objective import loss_of
from mtpctl.user_code import is_reference
from tests.fakes import user_losses
from tests.fakes.kernel_agreement import relative

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
    config, p, scale = RlConfig(**settings), problem(), 1 / 200
    out = linear_logprob(p["hidden"], p["weight"], p["labels"], entropy=True, rows=p["mask"], implementation="reference")
    inputs = loss_inputs(p, out.logprob, out.entropy)
    loss = loss_of(config)
    unfused = (
        policy_loss(inputs, config)
        if not is_reference(config.loss)
        else loss(out.logprob, out.entropy, token_terms(inputs, config), config)
    )
    expected = torch.autograd.grad(unfused.loss_sum * scale, (p["hidden"], p["weight"]))

    with torch.no_grad():  # GSPO's first pass: its terms depend on whole sequences; those of other losses do not depend on log-probs
        first = linear_logprob(p["hidden"], p["weight"], p["labels"], rows=p["mask"]).logprob
    terms = token_terms(loss_inputs(p, first, None), config)
    calls = []

    def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(len(rows))
        made = loss(logprob, entropy, terms.at(rows), config)
        return made.loss_sum, made.sums

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
    weight.main_grad = torch.ones_like(weight)
    out = linear_policy_loss(p["hidden"], weight, p["labels"], summed, grad_scale=0.5, main_grad=True, workspace_bytes=1)
    (out.loss_sum * 0.5).backward()
    assert relative(weight.main_grad - 1, expected) < 1e-12
    out = linear_policy_loss(p["hidden"], weight, p["labels"], summed, grad_scale=0.5, main_grad=True)
    with pytest.raises(ValueError, match=r"grad_scale: 0.5, but the loss received a gradient of 1.0"):
        out.loss_sum.backward()


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
