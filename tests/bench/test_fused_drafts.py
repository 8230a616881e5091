"""`mtpctl bench fused-kernels --drafts` on a CPU: its lines, its ratios and its errors."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from mtpctl.bench import fused_drafts as bench
from mtpctl.bench.fused_cases import make_inputs
from mtpctl.bench.fused_kernels import Shape
from mtpctl.cli.bench import app


@pytest.fixture(scope="module")
def results() -> list[bench.DraftResult]:
    return bench.measure_drafts(Shape(24, 16, 300), device="cpu")


def test_each_loss_is_measured_alone_and_in_a_step(results: list[bench.DraftResult]) -> None:
    found = {(r.mode, r.where, r.loss) for r in results}
    for mode in ("isolated", "joint"):
        for loss in ("ce", "soft_ce", "kl", "tv"):
            assert {(mode, "alone", loss), (mode, "with a policy loss", loss)} <= found


def test_in_a_step_a_depth_costs_what_it_adds(results: list[bench.DraftResult]) -> None:
    step = {r.loss: r for r in results if r.mode == "joint" and r.where == "with a policy loss"}
    assert step["tv"].cost_ms == pytest.approx(step["tv"].ms - step["none"].ms)
    assert step["tv"].ratio == pytest.approx((step["tv"].ms - step["none"].ms) / (step["ce"].ms - step["none"].ms))
    alone = {r.loss: r for r in results if r.mode == "joint" and r.where == "alone"}
    assert alone["tv"].ratio == pytest.approx(alone["tv"].ms / alone["ce"].ms)


def test_errors_are_measured_beside_those_of_plain_torch(results: list[bench.DraftResult]) -> None:
    tv = next(r for r in results if (r.mode, r.where, r.loss) == ("joint", "alone", "tv"))
    for mine, own in ((tv.hidden_error, tv.torch_hidden_error), (tv.weight_error, tv.torch_weight_error)):
        assert mine is not None and own is not None
        assert 1e-4 < mine <= 1.5 * own


@pytest.mark.parametrize("loss", bench.AGAINST_TRUNK)
def test_the_oracle_is_the_whole_gradient_of_the_equation(loss: str) -> None:
    x = make_inputs(20, 8, 50, torch.float64, "cpu", seed=3)
    state = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    rows, entries = torch.tensor([1, 5, 19]), torch.tensor([0, 7, 49])
    q, p = (state @ x.weight.T).softmax(1), (x.hidden @ x.weight.T).softmax(1).detach()
    value = {"soft_ce": -(p * q.log()).sum(), "kl": (p * (p / q).log()).sum(), "tv": 0.5 * (p - q).abs().sum()}[loss]
    right = torch.autograd.grad(value, (state, x.weight))
    got = bench._exact_grads(x, state, loss, rows, entries)
    assert torch.allclose(got[0], right[0][rows], atol=1e-12)
    assert torch.allclose(got[1], right[1][entries], atol=1e-12)


def test_the_command_prints_the_table() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100", "--drafts"])
    assert done.exit_code in (0, 6), done.output
    assert "| 16x8x100 | isolated | tv | with a policy loss |" in done.output
    told = json.loads(CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100", "--drafts", "--json"]).output)
    assert len(told["results"]) == 18
