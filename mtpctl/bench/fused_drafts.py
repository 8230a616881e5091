"""`mtpctl bench fused-kernels --drafts`: what it costs an MTP depth to learn the trunk's whole distribution instead of the sampled tokens.

Twice: the depth's loss and gradients by themselves, and as a training step makes them, in one sweep with a policy loss. What the step's
depth costs is what it adds to the policy loss alone; with `ce` the depth is a call of its own, as in a training step. Ratios are to `ce`.

Error: ‖got − exact‖ / ‖exact‖ of the gradients against float64, at some rows and vocabulary entries, at most 1.5 times that of plain torch.
Timer, memory, rounds and shapes are those of `fused_kernels`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.bench.fused_cases import Inputs, Limit, Output, make_inputs
from mtpctl.bench.fused_kernels import REFERENCE_ROWS, ROUNDS, SAMPLES, TORCH_ERRORS, Shape, peak_gib, settle, time_runs
from mtpctl.bench.fused_oracle import ROWS_AT_ONCE, SAMPLED, distance
from mtpctl.kernels.backend import DraftLoss
from mtpctl.kernels.drafts import Draft
from mtpctl.kernels.policy import linear_draft_loss, linear_policy_loss
from mtpctl.plan.memory import GIB

BOUND = Limit(1.25, 0.5)
AGAINST_TRUNK: tuple[DraftLoss, ...] = ("soft_ce", "kl", "tv")
ALONE, STEP = "alone", "with a policy loss"


@dataclass(frozen=True)
class DraftResult:
    """One line. cost_ms: what the depth takes: `ms`, or in a step what it adds to the policy loss alone. ratio: of the cost, to that of ce.
    mode: of the head, isolated or joint. Errors are relative to plain torch's; None where they were not measured."""

    shape: str
    mode: str
    where: str
    loss: str
    ms: float
    fastest_ms: float
    slowest_ms: float
    cost_ms: float
    ratio: float
    peak_gib: float | None
    hidden_error: float | None
    weight_error: float | None
    torch_hidden_error: float | None
    torch_weight_error: float | None
    misses: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """One thing to time: the loss of a depth, "none" for the policy loss alone."""

    mode: str
    where: str
    loss: str
    run: Callable[[Inputs], Output]


def measure_drafts(shape: Shape, *, device: str | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[DraftResult]:
    """Measure every loss, alone and in a step, isolated and joint."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    x = make_inputs(shape.rows, shape.hidden, shape.vocab, dtype, device, seed)
    g = torch.Generator(device=device).manual_seed(seed + 1)
    noise = torch.randn(x.hidden.shape, device=device, generator=g)
    state = (0.6 * x.hidden.detach().float() + 0.8 * noise).to(dtype).requires_grad_()
    workspace = int(max(1.0, shape.rows / REFERENCE_ROWS) * GIB / 2)
    works = [work for mode in ("isolated", "joint") for work in _works(state, workspace, mode)]
    errors = _errors(x, state, workspace)
    peaks, samples = {}, {work: list[float]() for work in works}
    for work in works:
        work.run(x)
        peaks[work] = peak_gib(lambda work=work: work.run(x), device)  # type: ignore[misc]
    for _ in range(ROUNDS):
        for work in works:
            settle(lambda work=work: work.run(x), device)  # type: ignore[misc]
            samples[work] += time_runs(lambda work=work: work.run(x), device, SAMPLES)  # type: ignore[misc]
    medians = {(work.mode, work.where, work.loss): statistics.median(times) for work, times in samples.items()}

    def cost(mode: str, where: str, loss: str) -> float:
        return medians[mode, where, loss] - (medians[mode, where, "none"] if where == STEP else 0.0)

    results = []
    for work, times in samples.items():
        mine = cost(work.mode, work.where, work.loss)
        ratio, peak = mine / cost(work.mode, work.where, "ce"), peaks[work]
        found = errors.get(work.loss, (None,) * 4) if work.where == ALONE else (None,) * 4
        hidden_error, weight_error, torch_hidden, torch_weight = found if work.mode == "joint" else (found[0], None, found[2], None)
        misses = []
        if work.loss == "tv" and work.where == STEP and device == "cuda":
            if ratio > BOUND.ratio:
                misses.append(f"{ratio:.2f}x of ce, bound {BOUND.ratio}x")
            most = workspace / GIB
            if peak is not None and peak > most:
                misses.append(f"{peak:.2f} GiB, bound {most:.2f}")
        for name, value, own in (("hidden", hidden_error, torch_hidden), ("weight", weight_error, torch_weight)):
            if value is not None and own is not None and not value <= TORCH_ERRORS * own:
                misses.append(f"{name} grad error {value:.1e}, torch's own {own:.1e}")
        results.append(
            DraftResult(
                f"{shape.rows}x{shape.hidden}x{shape.vocab}",
                work.mode,
                work.where,
                work.loss,
                statistics.median(times),
                min(times),
                max(times),
                mine,
                ratio,
                peak,
                hidden_error,
                weight_error,
                torch_hidden,
                torch_weight,
                tuple(misses),
            )
        )
    return results


def drafts_table(results: list[DraftResult]) -> str:
    """Markdown, one line a case."""

    def number(x: float | None, form: str) -> str:
        return "–" if x is None else format(x, form)

    lines = [
        "| shape | head | depth's loss | where | ms (fastest – slowest) | the depth's ms | × ce | GiB | hidden grad err (torch's) "
        "| weight grad err (torch's) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cost = ("–", "–") if r.loss == "none" else (f"{r.cost_ms:.2f}", f"{r.ratio:.2f}")
        errors = " | ".join(
            "–" if mine is None else f"{mine:.1e} ({number(own, '.1e')})"
            for mine, own in ((r.hidden_error, r.torch_hidden_error), (r.weight_error, r.torch_weight_error))
        )
        lines.append(
            f"| {r.shape} | {r.mode} | {r.loss} | {r.where} | {r.ms:.2f} ({r.fastest_ms:.2f} – {r.slowest_ms:.2f}) "
            f"| {cost[0]} | {cost[1]} | {number(r.peak_gib, '.2f')} | {errors} |"
        )
    return "\n".join(lines)


def _works(state: Tensor, workspace: int, mode: str) -> list[Work]:
    detach = mode == "isolated"
    losses: tuple[DraftLoss, ...] = ("ce", *AGAINST_TRUNK)
    alone = [Work(mode, ALONE, "ce", lambda x: _ce(x, state, workspace, detach))]
    alone += [Work(mode, ALONE, loss, lambda x, loss=loss: _against_trunk(x, state, loss, workspace, detach)) for loss in AGAINST_TRUNK]  # type: ignore[misc]
    step = [Work(mode, STEP, "none", lambda x: _step(x, [], workspace))]
    for loss in losses:
        if loss == "ce":
            step.append(Work(mode, STEP, loss, lambda x: _step_with_ce(x, state, workspace, detach)))
        else:
            draft = Draft(state, loss=loss, detach_weight=detach)
            step.append(Work(mode, STEP, loss, lambda x, draft=draft: _step(x, [draft], workspace)))  # type: ignore[misc]
    return alone + step


def _likelihood(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprob.sum(), {}


def _ce(x: Inputs, state: Tensor, workspace: int, detach: bool) -> Output:
    out = linear_policy_loss(state, x.weight, x.labels, _likelihood, hit=True, detach_weight=detach, workspace_bytes=workspace)
    return _gradients(out.loss_sum, state, None if detach else x.weight)


def _against_trunk(x: Inputs, state: Tensor, loss: DraftLoss, workspace: int, detach: bool) -> Output:
    out = linear_draft_loss(state, x.hidden, x.weight, x.labels, loss=loss, detach_weight=detach, workspace_bytes=workspace)
    return _gradients(out.loss_sum, state, None if detach else x.weight)


def _step(x: Inputs, drafts: list[Draft], workspace: int) -> Output:
    def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -(logprob * x.advantage[rows]).sum(), {}

    out = linear_policy_loss(x.hidden, x.weight, x.labels, token_loss, drafts=drafts, workspace_bytes=workspace)
    grads = torch.autograd.grad(out.loss_sum, (x.hidden, x.weight, *(draft.hidden for draft in drafts)))
    return Output(hidden_grad=grads[2] if drafts else None, weight_grad=grads[1], trunk_grad=grads[0])


def _step_with_ce(x: Inputs, state: Tensor, workspace: int, detach: bool) -> Output:
    depth = _ce(x, state, workspace, detach)
    trunk = _step(x, [], workspace)
    return Output(hidden_grad=depth.hidden_grad, weight_grad=trunk.weight_grad, trunk_grad=trunk.trunk_grad)


def _gradients(loss: Tensor, state: Tensor, weight: Tensor | None) -> Output:
    if weight is None:
        return Output(hidden_grad=torch.autograd.grad(loss, state)[0])
    return Output(None, None, *torch.autograd.grad(loss, (state, weight)))


def _loss_of(loss: DraftLoss, zq: Tensor, zp: Tensor) -> Tensor:
    """The summed loss from logits, by its equation."""
    logq, logp = zq.log_softmax(1), zp.log_softmax(1).detach()
    if loss == "tv":
        return (1 - torch.minimum(logp.exp(), logq.exp()).sum(1)).sum()
    return (logp.exp() * (logp - logq if loss == "kl" else -logq)).sum()


def _errors(x: Inputs, state: Tensor, workspace: int) -> dict[str, tuple[float, float, float, float]]:
    """Of each loss: errors of the gradients of hidden and weight, then plain torch's, at some rows and vocabulary entries."""
    rows = torch.arange(0, len(state), max(1, len(state) // SAMPLED), device=state.device)[:SAMPLED]
    entries = torch.arange(0, len(x.weight), max(1, len(x.weight) // SAMPLED), device=state.device)[:SAMPLED]
    entries = torch.cat([entries, x.labels[rows]]).unique()
    found: dict[str, tuple[float, float, float, float]] = {}
    for loss in AGAINST_TRUNK:
        exact = _exact_grads(x, state, loss, rows, entries)
        made = _against_trunk(x, state, loss, workspace, detach=False)
        ours = _distances(made, exact, rows, entries)
        del made
        plain = _gradients(_loss_of(loss, (state @ x.weight.T).float(), (x.hidden @ x.weight.T).detach().float()), state, x.weight)
        found[loss] = (*ours, *_distances(plain, exact, rows, entries))
    return found


def _distances(made: Output, exact: tuple[Tensor, Tensor], rows: Tensor, entries: Tensor) -> tuple[float, float]:
    assert made.hidden_grad is not None and made.weight_grad is not None
    return distance(made.hidden_grad[rows], exact[0]), distance(made.weight_grad[entries], exact[1])


def _exact_grads(x: Inputs, state: Tensor, loss: DraftLoss, rows: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the draft's states at `rows` and of the weight at `entries`, by autograd from float64 logits."""
    wide = x.weight.detach().double()
    by_weight = torch.zeros(len(entries), wide.shape[1], dtype=torch.float64, device=wide.device)
    by_hidden = []
    for start in range(0, len(state), ROWS_AT_ONCE):
        h, trunk = (s.detach()[start : start + ROWS_AT_ONCE].double() for s in (state, x.hidden))
        z = (h @ wide.T).requires_grad_()
        (by_logits,) = torch.autograd.grad(_loss_of(loss, z, trunk @ wide.T), z)
        by_weight += by_logits[:, entries].T @ h
        by_hidden.append(by_logits[rows[(rows >= start) & (rows < start + len(h))] - start] @ wide)
    return torch.cat(by_hidden), by_weight
