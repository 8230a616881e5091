"""`mtpctl bench fused-kernels` on a CPU: the table, the verdict against bounds, and the command line's exit codes."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from mtpctl.bench import fused_kernels as bench
from mtpctl.bench.fused_cases import Case, Limit, make_inputs
from mtpctl.bench.fused_oracle import distance, exact
from mtpctl.cli.bench import app
from mtpctl.errors import ThresholdMissed, UserError


@pytest.fixture(scope="module")
def results() -> list[bench.Result]:
    return bench.measure(bench.Shape(24, 16, 300), with_peers=True, device="cpu")


def test_each_kind_of_work_has_its_floor_ours_and_a_peer(results: list[bench.Result]) -> None:
    for what in ("forward", "forward+backward"):
        names = {r.name for r in results if r.what == what}
        assert {"floor", "chunked, 1 GiB", "torch eager"} <= names
        floor = next(r for r in results if r.what == what and r.name == "floor")
        for r in results:
            if r.what == what:
                assert r.ratio == pytest.approx(r.ms / floor.ms)
                assert r.fastest_ms <= r.ms <= r.slowest_ms


def test_errors_are_measured_not_claimed(results: list[bench.Result]) -> None:
    ours = next(r for r in results if r.name.startswith("chunked") and r.what == "forward+backward")
    torch_own = next(r for r in results if r.name == "torch eager" and r.what == "forward+backward")
    assert ours.logprob_error is not None and torch_own.logprob_error is not None
    assert 0 < ours.logprob_error < torch_own.logprob_error  # bf16 logits lose what fp32 ones keep
    assert ours.weight_grad_error is not None and 1e-4 < ours.weight_grad_error < 1e-2
    assert not ours.misses


def test_the_oracle_is_autograd_in_float64() -> None:
    x = make_inputs(20, 8, 50, torch.float32, "cpu", seed=3)
    truth = exact(x.hidden.detach(), x.weight.detach(), x.labels)
    hidden, weight = x.hidden.detach().double().requires_grad_(), x.weight.detach().double().requires_grad_()
    logp = (hidden @ weight.T).log_softmax(1)
    mine, entropy = logp.gather(1, x.labels.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)
    right = torch.autograd.grad((mine * x.upstream).sum() + (entropy * x.advantage).sum(), (hidden, weight))
    got = truth.grads(x.upstream, x.advantage)
    assert distance(truth.logprob, mine) < 1e-12
    assert distance(truth.entropy, entropy) < 1e-12
    assert distance(got[0], right[0][truth.rows]) < 1e-12
    assert distance(got[1], right[1][truth.entries]) < 1e-12


def test_a_bound_that_is_missed_is_told() -> None:
    case = Case("forward", "ours", lambda x: None, Limit(1.12, 0.5, 5e-5))  # type: ignore[arg-type,return-value]
    reference = bench.Shape(8192, 4096, 151680)
    fine = {"logprob_error": 1e-6, "hidden_grad_error": None}
    assert bench._misses(case, reference, 1.10, 0.4, fine, {"logprob_error": 2e-4}) == ()
    assert bench._misses(case, reference, 1.20, 0.6, {"logprob_error": 1e-3}, {"logprob_error": 2e-4}) == (
        "1.20x, bound 1.12x",
        "0.60 GiB, bound 0.50",
        "error 1.0e-03, bound 5e-05",
        "logprob error 1.0e-03, torch's own 2.0e-04",
    )
    nan = bench._misses(case, reference, 1.0, 0.1, {"logprob_error": None, "hidden_grad_error": float("nan")}, {"hidden_grad_error": 2e-3})
    assert nan == ("hidden grad error nan, torch's own 2.0e-03",)
    # Where torch's own did not fit the card, the bound is what is left.
    assert bench._misses(case, reference, 1.0, 0.1, {"logprob_error": float("nan")}, {}) == ("error nan, bound 5e-05",)


def test_json_carries_the_environment_and_every_result() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["environment"].startswith("CPU; torch")
    assert {r["name"] for r in told["results"]} == {"floor", "chunked, 1 GiB"}


def test_the_table_says_what_its_timer_covers() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100"])
    assert "The timer covers: one whole call" in done.output
    assert "| 16x8x100 | forward | floor |" in done.output


def test_a_shape_that_is_none_is_the_users_mistake() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8"])
    assert isinstance(done.exception, UserError)
    assert "--shape: '16x8', expected ROWSxHIDDENxVOCAB" in str(done.exception)


def test_a_missed_bound_is_exit_code_6(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = bench.Result("s", "forward", "ours", 2.0, 2.0, 2.0, 2.0, None, None, None, None, None, False, ("2.00x, bound 1.12x",))
    monkeypatch.setattr(bench, "measure", lambda *a, **k: [slow])
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x100"])
    assert isinstance(done.exception, ThresholdMissed) and done.exception.exit_code == 6
    assert "MISSED s forward ours: 2.00x, bound 1.12x" in done.output


def test_ranks_must_divide_the_vocabulary() -> None:
    done = CliRunner().invoke(app, ["fused-kernels", "--shape", "16x8x101", "--tp", "2"])
    assert isinstance(done.exception, UserError)
    assert "2 ranks do not divide the vocabulary of 101" in str(done.exception)


def test_two_ranks_on_a_cpu() -> None:
    from mtpctl.bench.fused_parallel import measure_parallel, parallel_table

    results = measure_parallel(bench.Shape(16, 8, 64), 2, device="cpu")
    assert [r.what for r in results] == ["forward", "forward+backward, 0.5 GiB", "forward+backward, 3 GiB", "policy loss, 1.5 GiB"]
    assert all(r.ms > 0 and r.ratio == r.ms / (r.single_ms / 2) for r in results)
    assert "| 16x8x64 | 2 | forward |" in parallel_table(results)
