"""The float64 oracle of the kernel scripts, and the scripts at small sizes on a CPU."""

from __future__ import annotations

import sys

import pytest
import torch

import draft_losses
import kernel_errors
import multistep_loss
import multistep_training
import sharded_head
from kernel_errors import Exact, exact_draft_grads, relative_error
from mtpctl.bench.fused_kernels import Shape, make_inputs
from tests.fakes.forked import fork_ranks


def test_oracle_is_autograd_in_float64() -> None:
    x = make_inputs(Shape(20, 8, 50), torch.float32, "cpu", seed=3)
    exact = Exact.of(x)
    hidden, weight = x.hidden.detach().double().requires_grad_(), x.weight.detach().double().requires_grad_()
    logp = (hidden @ weight.T).log_softmax(1)
    logprob, entropy = logp.gather(1, x.labels.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)
    expected = torch.autograd.grad((logprob * x.upstream).sum() + (entropy * x.advantage).sum(), (hidden, weight))
    hidden_grad, weight_grad = exact.grads(x.upstream, x.advantage)
    assert relative_error(exact.logprob, logprob) < 1e-12
    assert relative_error(exact.entropy, entropy) < 1e-12
    assert relative_error(hidden_grad, expected[0][exact.rows]) < 1e-12
    assert relative_error(weight_grad, expected[1][exact.entries]) < 1e-12


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "tv", "e2e_tv", "e2e_greedy"])
def test_oracle_of_a_draft_loss_is_the_gradient_of_its_equation(loss: str) -> None:
    x = make_inputs(Shape(20, 8, 50), torch.float64, "cpu", seed=3)
    state = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    rows, entries = torch.tensor([1, 5, 19]), torch.tensor([0, 7, 49])
    q, p = (state @ x.weight.T).softmax(1), (x.hidden @ x.weight.T).softmax(1).detach()
    soft, tv = -(p * q.log()).sum(), 0.5 * (p - q).abs().sum()
    greedy = 20 - (p * q).sum()
    values = {"soft_ce": soft, "kl": (p * (p / q).log()).sum(), "tv": tv, "e2e_tv": tv + 0.1 * soft, "e2e_greedy": greedy + 0.1 * soft}
    value = values[loss]
    expected = torch.autograd.grad(value, (state, x.weight))
    hidden_grad, weight_grad = exact_draft_grads(x, state, loss, rows, entries)  # type: ignore[arg-type]
    assert torch.allclose(hidden_grad, expected[0][rows], atol=1e-12)
    assert torch.allclose(weight_grad, expected[1][entries], atol=1e-12)


def run(script: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    script.main()  # type: ignore[attr-defined]
    return capsys.readouterr().out


def test_kernels_on_a_cpu_are_within_the_error_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(kernel_errors, monkeypatch, capsys, "--shape", "24x16x300")
    for case in ("| forward | chunked", "| forward+backward | chunked", "| draft loss | tv |"):
        assert case in printed


def test_wrong_gradients_miss_the_error_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel_errors, "MAX_OF_TORCH", 1e-3)
    with pytest.raises(SystemExit, match="6"):
        run(kernel_errors, monkeypatch, capsys, "--shape", "24x16x300")
    assert "missed: forward+backward, chunked, 1 GiB: hidden grad error" in capsys.readouterr().err


def test_draft_losses_are_measured_alone_and_in_a_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(draft_losses, monkeypatch, capsys, "--shape", "16x8x100")
    for head in ("isolated", "joint"):
        for loss in ("ce", "soft_ce", "kl", "tv", "e2e_tv", "e2e_greedy"):
            assert f"| {head} | {loss} | alone |" in printed and f"| {head} | {loss} | with a policy loss |" in printed


def test_multistep_loss_is_measured_and_its_errors_are_bounded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(multistep_loss, monkeypatch, capsys, "--shape", "96x16x300", "--depths", "2")
    for loss in ("e2e_tv", "e2e_greedy"):
        assert f"\n| {loss} | " in printed and f"| {loss} | 2 | " in printed


def test_head_without_common_mass_learns_faster_with_the_multistep_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multistep_training, "CONTEXTS", 4_000)
    printed = run(multistep_training, monkeypatch, capsys, "--updates", "60", "--seeds", "1")
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    ends = {line[0]: float(line[2].split()[0]) for line in lines[1:]}
    assert ends["e2e_tv"] > ends["soft_ce"] > 1 and ends["e2e_tv"] > ends["tv"]


def test_two_ranks_share_the_vocabulary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sharded_head.mp, "spawn", fork_ranks)  # imports nothing again
    printed = run(sharded_head, monkeypatch, capsys, "--ranks", "2", "--shape", "16x8x64")
    assert "| 16x8x64 | 2 ranks, ms |" in printed
    for case in ("forward", "forward+backward, 0.5 GiB", "forward+backward, 3 GiB", "policy loss, 1.5 GiB"):
        assert f"| {case} |" in printed
    with pytest.raises(SystemExit, match="2"):
        run(sharded_head, monkeypatch, capsys, "--ranks", "2", "--shape", "16x8x101")
    assert "2 ranks do not divide the vocabulary of 101" in capsys.readouterr().err
