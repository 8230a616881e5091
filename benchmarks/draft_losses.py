"""The cost of training an MTP depth on the trunk's whole distribution instead of the sampled tokens.

    python benchmarks/draft_losses.py                     # the reference shape on a GPU, a small one on a CPU
    python benchmarks/draft_losses.py --shape 24x16x300

Each loss is measured alone, and in the slices of the policy loss, as in a training step. The cost of a depth in a step is the time that it
adds to the policy loss. With `ce` the depth is a separate call, as in a training step. Ratios are to `ce`. Exit code 6 if `tv` in a
step misses a bound. Timer, memory and rounds are those of `mtpctl bench fused-kernels`; `kernel_errors.py` measures the errors.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from harness import finish, parser, print_environment
from mtpctl.bench.fused_kernels import TIMED_WORK, Inputs, Output, Shape, make_inputs, measure_peak_gib, time_in_turns
from mtpctl.bench.report import format_number, format_spread, markdown_table
from mtpctl.kernels.backend import DraftLoss
from mtpctl.kernels.drafts import Draft
from mtpctl.kernels.policy import linear_draft_loss, linear_policy_loss
from mtpctl.plan.memory import GIB

MAX_RATIO, MAX_GIB = 1.25, 0.5
ALONE, STEP = "alone", "with a policy loss"
LOSSES: tuple[DraftLoss, ...] = get_args(DraftLoss)


def cross_entropy(x: Inputs, state: Tensor, workspace: int, detach: bool) -> Output:
    """The loss `ce` of a depth, as a policy loss whose terms are the negative log-probs."""

    def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprob.sum(), {}

    out = linear_policy_loss(state, x.weight, x.labels, token_loss, hit=True, detach_weight=detach, workspace_bytes=workspace)
    return compute_gradients(out.loss_sum, state, None if detach else x.weight)


def trunk_loss(x: Inputs, state: Tensor, loss: DraftLoss, workspace: int, detach: bool) -> Output:
    out = linear_draft_loss(state, x.hidden, x.weight, x.labels, loss=loss, detach_weight=detach, workspace_bytes=workspace)
    return compute_gradients(out.loss_sum, state, None if detach else x.weight)


def compute_gradients(loss: Tensor, state: Tensor, weight: Tensor | None) -> Output:
    if weight is None:
        return Output(hidden_grad=torch.autograd.grad(loss, state)[0])
    return Output(None, None, *torch.autograd.grad(loss, (state, weight)))


def policy_step(x: Inputs, drafts: list[Draft], workspace: int) -> Output:
    """The policy loss, which computes the losses of `drafts` in its own slices."""

    def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -(logprob * x.advantage[rows]).sum(), {}

    out = linear_policy_loss(x.hidden, x.weight, x.labels, token_loss, drafts=drafts, workspace_bytes=workspace)
    grads = torch.autograd.grad(out.loss_sum, (x.hidden, x.weight, *(draft.hidden for draft in drafts)))
    return Output(hidden_grad=grads[2] if drafts else None, weight_grad=grads[1], trunk_grad=grads[0])


def policy_step_with_ce(x: Inputs, state: Tensor, workspace: int, detach: bool) -> Output:
    depth, trunk = cross_entropy(x, state, workspace, detach), policy_step(x, [], workspace)
    return Output(hidden_grad=depth.hidden_grad, weight_grad=trunk.weight_grad, trunk_grad=trunk.trunk_grad)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = parser(__doc__)
    arguments.add_argument("--shape", type=Shape.parse, default=Shape(8192, 4096, 151680) if device == "cuda" else Shape(64, 64, 1000))
    shape = arguments.parse_args().shape
    x = make_inputs(shape, torch.bfloat16, device, seed=0)
    noise = torch.randn(x.hidden.shape, device=device, generator=torch.Generator(device=device).manual_seed(1))
    state = (0.6 * x.hidden.detach().float() + 0.8 * noise).to(x.hidden.dtype).requires_grad_()
    workspace = int(shape.scale * MAX_GIB * GIB)

    runs: dict[tuple[str, str, str], Callable[[], Output]] = {}
    for mode, detach in (("isolated", True), ("joint", False)):
        runs[mode, STEP, "none"] = lambda: policy_step(x, [], workspace)
        runs[mode, ALONE, "ce"] = lambda detach=detach: cross_entropy(x, state, workspace, detach)  # type: ignore[misc]
        runs[mode, STEP, "ce"] = lambda detach=detach: policy_step_with_ce(x, state, workspace, detach)  # type: ignore[misc]
        for loss in LOSSES:
            if loss != "ce":
                draft = Draft(state, loss=loss, detach_weight=detach)
                runs[mode, ALONE, loss] = lambda loss=loss, detach=detach: trunk_loss(x, state, loss, workspace, detach)  # type: ignore[misc]
                runs[mode, STEP, loss] = lambda draft=draft: policy_step(x, [draft], workspace)  # type: ignore[misc]
    for run in runs.values():
        run()
    peaks = {key: measure_peak_gib(run, device) for key, run in runs.items()}
    times = time_in_turns(runs, device)
    medians = {key: statistics.median(run_times) for key, run_times in times.items()}

    def cost(mode: str, setting: str, loss: str) -> float:
        return medians[mode, setting, loss] - (medians[mode, setting, "none"] if setting == STEP else 0.0)

    rows, misses = [], []
    for (mode, setting, name), run_times in times.items():
        ratio, peak = cost(mode, setting, name) / cost(mode, setting, "ce"), peaks[mode, setting, name]
        depth_cells = ("–", "–") if name == "none" else (f"{cost(mode, setting, name):.2f}", f"{ratio:.2f}")
        rows.append((mode, name, setting, format_spread(run_times, ".2f"), *depth_cells, format_number(peak, ".2f")))
        if (setting, name, device) == (STEP, "tv", "cuda"):
            if ratio > MAX_RATIO:
                misses.append(f"{mode} tv: {ratio:.2f} × ce, bound {MAX_RATIO}")
            if peak is not None and peak > MAX_GIB * shape.scale:
                misses.append(f"{mode} tv: {peak:.2f} GiB, bound {MAX_GIB * shape.scale:.2f}")
    print_environment()
    print(f"{shape}. The timer covers: {TIMED_WORK}\n")
    print(markdown_table(("head", "depth's loss", "where", "ms (fastest–slowest)", "the depth's ms", "× ce", "GiB"), rows))
    finish(misses)


if __name__ == "__main__":
    main()
