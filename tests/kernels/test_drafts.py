"""`linear_draft_loss` against its equations in float64, for any slicing of rows and sharding of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.kernels.chunked import TEMPORARIES
from mtpctl.kernels.drafts import LOSSES, DraftLossOut
from mtpctl.kernels.policy import linear_draft_loss
from mtpctl.model.parallel import Rank
from tests.fakes.forked import in_gloo_group, run_ranks
from tests.fakes.kernel_agreement import relative

ROWS, WIDTH, VOCAB, PADDING = 150, 16, 131, 3
MIXES = [("ce", 1.0), ("soft_ce", 1.0), ("kl", 1.0), ("tv", 1.0), ("tv", 0.9), ("soft_ce", 0.5), ("e2e_tv", 0.9), ("e2e_greedy", 0.9)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one slice": {"workspace_bytes": 1 << 24},
    "slices of rows": {"workspace_bytes": 40 * (TEMPORARIES + 2) * 8 * 192},
    "row by row": {"workspace_bytes": 1},
}


def problem(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    teacher = torch.randn(ROWS, WIDTH, generator=g)
    hidden = teacher + 0.7 * torch.randn(ROWS, WIDTH, generator=g)
    weight = torch.randn(VOCAB + PADDING, WIDTH, generator=g) * 0.5
    labels = torch.multinomial((teacher @ weight[:VOCAB].T).softmax(1), 1, generator=g).squeeze(1)
    labels[::7] = -100
    temperature = torch.rand(ROWS, generator=g) + 0.5
    return {
        "hidden": hidden.to(dtype).requires_grad_(),
        "teacher": teacher.to(dtype),
        "weight": weight.to(dtype).requires_grad_(),
        "labels": labels,
        "temperature": temperature,
    }


def run(p: dict[str, Any], **options: Any) -> tuple[DraftLossOut, Tensor, Tensor]:
    settings = {"grad_scale": 0.25, "valid_vocab": VOCAB} | {"temperature": p["temperature"]} | options
    out = linear_draft_loss(p["hidden"], p["teacher"], p["weight"], p["labels"], **settings)
    return out, *torch.autograd.grad(out.loss_sum * settings["grad_scale"], (p["hidden"], p["weight"]))


def by_hand(p: dict[str, Any], loss: str, mix: float) -> tuple[Tensor, Tensor, Tensor]:
    """The equations, written independently of the oracle."""
    keep = p["labels"] != -100
    t = p["temperature"].double()[keep, None]
    q = ((p["hidden"][keep] @ p["weight"][:VOCAB].T) / t).softmax(1)
    with torch.no_grad():
        target = ((p["teacher"][keep] @ p["weight"][:VOCAB].T) / t).softmax(1)
    ce = -torch.log(q[torch.arange(len(q)), p["labels"][keep]])
    value = {
        "ce": ce,
        "soft_ce": -(target * torch.log(q)).sum(1),
        "kl": (target * torch.log(target / q)).sum(1),
        "tv": 0.5 * (target - q).abs().sum(1),
        "e2e_tv": 0.5 * (target - q).abs().sum(1) - 0.1 * (target * torch.log(q)).sum(1),
        "e2e_greedy": 1 - (target * q).sum(1) - 0.1 * (target * torch.log(q)).sum(1),
    }[loss]
    total = (mix * value + (1 - mix) * ce).sum()
    return total.detach(), *torch.autograd.grad(total * 0.25, (p["hidden"], p["weight"]))


@pytest.mark.parametrize("implementation", ["reference", "auto"])
@pytest.mark.parametrize(("loss", "mix"), MIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_value_and_gradients_match_the_equations(layout: str, loss: str, mix: float, implementation: str) -> None:
    p = problem()
    value, *expected = by_hand(p, loss, mix)
    out, *got = run(p, loss=loss, mix=mix, implementation=implementation, **LAYOUTS[layout])
    assert relative(out.loss_sum.detach(), value) < 1e-12
    for tensor, exact in zip(got, expected, strict=True):
        assert relative(tensor, exact) < 1e-11


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_report_acceptance_of_sampled_and_greedy_drafts(layout: str) -> None:
    p = problem()
    out = run(p, **LAYOUTS[layout])[0]
    exact = run(p, implementation="reference")[0]
    for name in ("logprob", "teacher_logprob", "overlap", "greedy"):
        assert torch.allclose(getattr(out, name), getattr(exact, name), atol=1e-12), name
    assert torch.equal(out.hit, exact.hit) and out.hit.any()
    ignored = p["labels"] == -100
    assert not out.overlap[ignored].any() and not out.logprob[ignored].any()
    # The acceptance probability of rejection sampling, estimated by sampling drafts.
    saved = (~ignored).nonzero().squeeze(1)
    q, target = (
        ((p[name][saved] @ p["weight"][:VOCAB].T) / p["temperature"].double()[saved, None]).softmax(1).detach()
        for name in ("hidden", "teacher")
    )
    drawn = torch.multinomial(q, 4000, replacement=True, generator=torch.Generator().manual_seed(2))
    accepted = (target.gather(1, drawn) / q.gather(1, drawn)).clamp(max=1).mean()
    assert abs(float(accepted) - float(out.overlap[saved].mean())) < 0.005
    assert torch.allclose(out.greedy[saved], target.gather(1, q.argmax(1, keepdim=True)).squeeze(1))


@pytest.mark.parametrize("loss", LOSSES)
def test_ignored_rows_add_no_loss_and_no_gradient(loss: str) -> None:
    p = problem()
    p["labels"] = torch.full_like(p["labels"], -100)
    out, *grads = run(p, loss=loss)
    assert out.loss_sum == 0 and not out.overlap.any() and not any(grad.any() for grad in grads)
    none = {name: value if name == "weight" else value[:0].detach().requires_grad_(name == "hidden") for name, value in p.items()}
    assert run(none, loss=loss)[0].loss_sum == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_error_is_within_that_of_plain_torch(loss: str) -> None:
    p, exact = problem(torch.bfloat16), problem(torch.bfloat16)
    _, *expected = run(exact, loss=loss, implementation="reference")
    _, *got = run(p, loss=loss)
    keep = p["labels"] != -100
    t = p["temperature"][keep, None]
    logq = ((p["hidden"][keep] @ p["weight"][:VOCAB].T).float() / t).log_softmax(1)
    logp = ((p["teacher"][keep] @ p["weight"][:VOCAB].T).float() / t).log_softmax(1).detach()
    values = {
        "ce": -logq.gather(1, p["labels"][keep, None]).squeeze(1),
        "soft_ce": -(logp.exp() * logq).sum(1),
        "kl": (logp.exp() * (logp - logq)).sum(1),
        "tv": 1 - torch.minimum(logp.exp(), logq.exp()).sum(1),
        "e2e_tv": 1 - torch.minimum(logp.exp(), logq.exp()).sum(1) - 0.1 * (logp.exp() * logq).sum(1),
        "e2e_greedy": 1 - (logp.exp() * (logq.exp() + 0.1 * logq)).sum(1),
    }
    plain = torch.autograd.grad(values[loss].sum() * 0.25, (p["hidden"], p["weight"]))
    for tensor, reference, oracle in zip(got, plain, expected, strict=True):
        assert relative(tensor, oracle) <= 1.5 * relative(reference, oracle) + torch.finfo(torch.bfloat16).eps


def test_detached_weight_gets_no_gradient_and_main_grad_accumulates() -> None:
    p = problem()
    out = linear_draft_loss(p["hidden"], p["teacher"], p["weight"], p["labels"], valid_vocab=VOCAB, detach_weight=True)
    assert torch.autograd.grad(out.loss_sum, p["weight"], allow_unused=True) == (None,)
    expected = run(p, temperature=1.0, grad_scale=0.5)[2]
    weight = torch.nn.Parameter(p["weight"].detach())
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    out = linear_draft_loss(
        p["hidden"], p["teacher"], weight, p["labels"], valid_vocab=VOCAB, grad_scale=0.5, main_grad=True, workspace_bytes=1
    )
    (out.loss_sum * 0.5).backward(retain_graph=True)
    assert relative(weight.main_grad - 1, expected) < 1e-12  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="one backward pass"):
        out.loss_sum.backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_sharded_vocabulary_gives_the_same(loss: str) -> None:
    """Over three ranks, the last of which has only padding."""
    p = problem()
    out, by_hidden, by_weight = run(p, loss=loss, mix=0.7)
    split = 66

    def rank_work(rank: Rank) -> dict[str, Any]:
        shard = torch.zeros(split, WIDTH, dtype=torch.float64)
        rows = p["weight"].detach()[rank.rank * split : (rank.rank + 1) * split]
        shard[: len(rows)] = rows
        local = p | {"weight": shard.requires_grad_(), "hidden": p["hidden"].detach().requires_grad_()}
        actual, hidden_grad, weight_grad = run(local, loss=loss, mix=0.7, group=torch.distributed.group.WORLD, **LAYOUTS["slices of rows"])
        return {"out": [x.tolist() for x in actual], "hidden": hidden_grad.tolist(), "weight": weight_grad.tolist()}

    answers, error = run_ranks(3, in_gloo_group(rank_work), 60)
    assert not error, error
    for answer in answers:
        for tensor, exact in zip(answer["out"], out, strict=True):
            assert torch.allclose(torch.tensor(tensor, dtype=torch.float64), exact.detach().double(), atol=1e-12)
        assert relative(torch.tensor(answer["hidden"], dtype=torch.float64), by_hidden) < 1e-11
    joined = torch.cat([torch.tensor(answer["weight"], dtype=torch.float64) for answer in answers])[: VOCAB + PADDING]
    assert relative(joined, by_weight) < 1e-11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, "loss: 'mse', expected one of ce, soft_ce, kl, tv, e2e_tv, e2e_greedy"),
        ({"mix": 1.5}, "mix: 1.5, expected 0 to 1"),
        ({"implementation": "cuda"}, "implementation: 'cuda', expected one of auto, chunked, triton, exact, reference"),
        ({"teacher": torch.zeros(2, WIDTH)}, "teacher: "),
    ],
)
def test_invalid_argument_is_named(options: dict[str, Any], message: str) -> None:
    p = problem()
    with pytest.raises(ValueError, match=message):
        linear_draft_loss(p["hidden"], options.pop("teacher", p["teacher"]), p["weight"], p["labels"], **options)
