"""The cost of the multi-step loss of several MTP depths, compared with `tv` at each depth, and the errors of its gradients.

    python benchmarks/multistep_loss.py                     # the reference shape on a GPU, a small one on a CPU
    python benchmarks/multistep_loss.py --shape 96x16x300 --depths 3

Each run is a policy loss and the losses of isolated depths, as a training step computes them. The rows are turns of 512 tokens. The time
of the depths is what they add to the policy loss alone. Memory is the peak of the run without inputs, states and gradients. Errors are
‖computed − exact‖ / ‖exact‖ of the gradients of the depths' states at sampled rows. Exact gradients are computed in float64; plain torch
computes logits in bf16 and softmax in fp32. Exit code 6 if `e2e_tv` or `e2e_greedy` misses a bound. Timer and rounds are those of `mtpctl
bench fused-kernels`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from harness import finish, parser, print_environment
from kernel_errors import draft_loss, relative_error
from mtpctl.bench.fused_kernels import TIMED_WORK, Inputs, Output, Shape, make_inputs, measure_peak_gib, time_in_turns
from mtpctl.bench.report import format_number, format_spread, markdown_table
from mtpctl.kernels.backend import DraftLoss
from mtpctl.kernels.drafts import Draft
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.plan.memory import GIB
from mtpctl.trainer.acceptance import Chains
from mtpctl.trainer.batch import DraftRows
from mtpctl.trainer.head import scale_gradient

MAX_RATIO, MAX_GIB, MAX_OF_TORCH = 1.15, 0.5, 1.5
"""Bounds of the depths' time relative to `tv`, of memory at the reference shape, and of errors relative to plain torch."""
TURN, ROWS_AT_ONCE, SAMPLED = 512, 512, 128
CHAINED: tuple[DraftLoss, ...] = ("e2e_tv", "e2e_greedy")
NONE = "none"


@dataclass(frozen=True)
class Depths:
    """The inputs of a step: the trunk's, and the rows and states of each depth."""

    x: Inputs
    rows: list[DraftRows]
    states: list[Tensor]

    @classmethod
    def of(cls, shape: Shape, depths: int, device: str) -> Depths:
        x = make_inputs(shape, torch.bfloat16, device, seed=0)
        in_turn = torch.arange(shape.rows, device=device) % TURN
        rows, states = [], []
        for depth in range(1, depths + 1):
            tokens = (in_turn >= depth).nonzero().squeeze(1)
            noise = torch.randn(len(tokens), shape.hidden, device=device, generator=torch.Generator(device=device).manual_seed(depth))
            rows.append(DraftRows(tokens - depth, x.labels[tokens], tokens))
            states.append((0.8 * x.hidden.detach()[tokens].float() + 0.6 * noise).to(x.hidden.dtype).requires_grad_())
        return cls(x, rows, states)

    def step(self, loss: str, workspace: int) -> list[Tensor]:
        """Gradients of the trunk's states, of the LM head, and of each depth's states unless `loss` is `NONE`."""
        x, chains = self.x, Chains(self.rows, len(self.x.hidden))
        drafts = []
        if loss != NONE:
            for rows, state, weights in zip(self.rows, self.states, chains.weights, strict=True):
                hidden = scale_gradient(state, weights if loss in CHAINED else None)
                drafts.append(Draft(hidden, rows.response_indices, loss, detach_weight=True))  # type: ignore[arg-type]

        def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return -(logprob * x.advantage[rows]).sum(), {}

        out = linear_policy_loss(x.hidden, x.weight, x.labels, token_loss, drafts=drafts, workspace_bytes=workspace)
        if loss in CHAINED:
            chains.compute_weights([draft.greedy if loss == "e2e_greedy" else draft.overlap for draft in out.drafts])
        return list(torch.autograd.grad(out.loss_sum, (x.hidden, x.weight, *(self.states if drafts else ()))))


@torch.no_grad()
def chain_weights(depths: Depths, loss: str, softmax_dtype: torch.dtype) -> list[Tensor]:
    """The weights of the chains, from the logits of all rows: in float64 if `softmax_dtype` is float64, else in bf16."""
    x, head = depths.x, depths.x.weight.detach().double() if softmax_dtype == torch.float64 else depths.x.weight.detach()
    accepted = []
    for rows, state in zip(depths.rows, depths.states, strict=True):
        parts = []
        for start in range(0, len(state), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            p, q = (
                (states.to(head.dtype) @ head.T).to(softmax_dtype).softmax(1)
                for states in (x.hidden.detach()[rows.response_indices[part]], state.detach()[part])
            )
            parts.append(torch.minimum(p, q).sum(1) if loss == "e2e_tv" else p.gather(1, q.argmax(1, keepdim=True)).squeeze(1))
        accepted.append(torch.cat(parts))
    chains = Chains(depths.rows, len(x.hidden))
    chains.compute_weights(accepted)
    return chains.weights


def state_grads(depths: Depths, loss: str, softmax_dtype: torch.dtype) -> list[Tensor]:
    """Gradients of each depth's states at the rows `sample`, by autograd, with the softmax in `softmax_dtype`."""
    x, grads = depths.x, []
    weight = x.weight.detach().double() if softmax_dtype == torch.float64 else x.weight.detach()
    for rows, state, row_weights in zip(depths.rows, depths.states, chain_weights(depths, loss, softmax_dtype), strict=True):
        indices = sample(state)
        h = state.detach()[indices].to(weight.dtype).requires_grad_()
        trunk = x.hidden.detach()[rows.response_indices[indices]].to(weight.dtype)
        draft_logits, trunk_logits = ((states @ weight.T).to(softmax_dtype) for states in (h, trunk))
        value = draft_loss(loss, draft_logits, trunk_logits, row_weights[indices].to(softmax_dtype))  # type: ignore[arg-type]
        grads.append(torch.autograd.grad(value, h)[0])
    return grads


def sample(state: Tensor) -> Tensor:
    """Indices of at most `SAMPLED` rows."""
    return torch.arange(0, len(state), max(1, len(state) // SAMPLED), device=state.device)[:SAMPLED]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = parser(__doc__)
    arguments.add_argument("--shape", type=Shape.parse, default=Shape(8192, 4096, 151680) if device == "cuda" else Shape(96, 64, 1000))
    arguments.add_argument("--depths", type=int, default=3, help="MTP depths, which is the number of draft tokens.")
    options = arguments.parse_args()
    shape = options.shape
    depths = Depths.of(shape, options.depths, device)
    workspace = int(shape.scale * MAX_GIB * GIB)
    losses = (NONE, "soft_ce", "tv", *CHAINED)
    assert set(losses) - {NONE} <= set(get_args(DraftLoss))
    runs: dict[str, Callable[[], list[Tensor]]] = {loss: lambda loss=loss: depths.step(loss, workspace) for loss in losses}  # type: ignore[misc]
    for run in runs.values():
        run()

    def output(run: Callable[[], list[Tensor]]) -> Output:
        """The gradients of the trunk and the LM head as an output, so that their memory is not counted."""
        trunk, weight, *_ = run()
        return Output(trunk_grad=trunk, weight_grad=weight)

    of_states = sum(state.nbytes for state in depths.states) / GIB
    peaks = {loss: measure_peak_gib(lambda run=run: output(run), device) for loss, run in runs.items()}  # type: ignore[misc]
    times = time_in_turns(runs, device)
    medians = {loss: statistics.median(run_times) for loss, run_times in times.items()}
    rows, misses = [], []
    for loss, run_times in times.items():
        cost, peak = medians[loss] - medians[NONE], peaks[loss]
        if peak is not None and loss != NONE:
            peak -= of_states
        ratio = cost / (medians["tv"] - medians[NONE])
        rows.append((loss, format_spread(run_times, ".2f"), f"{cost:.2f}", f"{ratio:.2f}", format_number(peak, ".2f")))
        if device == "cuda" and loss in CHAINED:
            if ratio > MAX_RATIO:
                misses.append(f"{loss}: {ratio:.2f} × tv, bound {MAX_RATIO}")
            if peak is not None and peak > MAX_GIB * shape.scale:
                misses.append(f"{loss}: {peak:.2f} GiB, bound {MAX_GIB * shape.scale:.2f}")
    print_environment()
    print(f"{shape}, {options.depths} depths. The timer covers: {TIMED_WORK}\n")
    print(markdown_table(("depths' loss", "ms (fastest–slowest)", "the depths' ms", "× tv", "GiB"), rows))
    errors = []
    for loss in CHAINED:
        computed = runs[loss]()[2:]
        exact, plain = state_grads(depths, loss, torch.float64), state_grads(depths, loss, torch.float32)
        for depth, (got, right, of_torch) in enumerate(zip(computed, exact, plain, strict=True), start=1):
            error, bound = relative_error(got[sample(got)], right), relative_error(of_torch, right)
            errors.append((str(loss), str(depth), f"{error:.1e}", f"{bound:.1e}"))
            if not error <= MAX_OF_TORCH * bound:  # so that NaN is a miss
                misses.append(f"{loss}, depth {depth}: error {error:.1e}, torch's {bound:.1e}")
    print("\n" + markdown_table(("loss", "depth", "error", "plain torch"), errors))
    finish(misses)


if __name__ == "__main__":
    main()
