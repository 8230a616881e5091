"""Errors of the LM head's kernels against float64, at most 1.5 times those of plain torch on the same inputs.

    python benchmarks/kernel_errors.py                      # the reference shape on a GPU, a small one on a CPU
    python benchmarks/kernel_errors.py --shape 24x16x300

The cases are those of `mtpctl bench fused-kernels`, and the draft losses against the trunk's distribution. An error is
‖computed − exact‖ / ‖exact‖. Whole exact gradients would take too long, so gradients are compared at some rows and some vocabulary
entries, half of them labels, whose gradients are largest. Exit code 6 if a bound is missed.

Shape legend: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from harness import finish, parser, print_environment
from mtpctl.bench.fused_kernels import Case, Inputs, Output, Shape, can_run, clipped_loss, make_cases, make_inputs, make_peer_cases
from mtpctl.bench.report import format_number, markdown_table
from mtpctl.kernels.backend import SOFT_CE_WEIGHT, DraftLoss
from mtpctl.kernels.policy import linear_draft_loss
from mtpctl.plan.memory import GIB

MAX_OF_TORCH = 1.5
MAX_FORWARD = 5e-5
"""Bound on the error of log-probs by the Triton kernels, whose logits are fp32."""
ROWS_PER_CHUNK, MAX_COMPARED = 512, 128
Errors = dict[str, float | None]


def relative_error(computed: Tensor, exact: Tensor) -> float:
    """The relative error ‖computed − exact‖ / ‖exact‖; NaN if `computed` contains NaN."""
    return ((computed.double() - exact).norm() / exact.norm()).item()


@dataclass(frozen=True)
class Exact:
    """Exact results in float64, at temperature 1: lse (log-sum-exp), logprob and entropy, all [N].

    rows, entries: the rows and vocabulary entries at which gradients are compared.
    """

    x: Inputs
    lse: Tensor
    logprob: Tensor
    entropy: Tensor
    rows: Tensor
    entries: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, x: Inputs) -> Exact:
        weight, count, slices = x.weight.double(), len(x.hidden), []
        for start in range(0, count, ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            logits = x.hidden[part].double() @ weight.T
            lse = logits.logsumexp(1)
            logp = logits.sub_(lse.unsqueeze(1))
            slices.append((lse, logp.gather(1, x.labels[part].unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)))
        lse, logprob, entropy = (torch.cat(parts) for parts in zip(*slices, strict=True))
        rows = torch.arange(0, count, max(1, count // MAX_COMPARED), device=weight.device)[:MAX_COMPARED]
        evenly = torch.arange(0, len(weight), max(1, len(weight) // MAX_COMPARED), device=weight.device)[:MAX_COMPARED]
        return cls(x, lse, logprob, entropy, rows, torch.cat([evenly, x.labels[rows]]).unique())

    @torch.no_grad()
    def grads(self, by_logprob: Tensor, by_entropy: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gradients of hidden at `rows` and of weight at `entries`, given the gradients of log-probs and entropies [N]."""
        weight, hidden = self.x.weight.double(), self.x.hidden
        weight_grad = torch.zeros(len(self.entries), hidden.shape[1], dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            h = hidden[part].double()
            weight_grad += self._logit_grad(h @ weight[self.entries].T, part, by_logprob, by_entropy, self.entries).T @ h
        every = torch.arange(len(weight), device=weight.device)
        logits = hidden[self.rows].double() @ weight.T
        return self._logit_grad(logits, self.rows, by_logprob, by_entropy, every) @ weight, weight_grad

    def _logit_grad(self, logits: Tensor, rows: slice | Tensor, by_logprob: Tensor, by_entropy: Tensor | None, entries: Tensor) -> Tensor:
        logp = logits - self.lse[rows].unsqueeze(1)
        p = logp.exp()
        grad = by_logprob[rows].double().unsqueeze(1) * ((self.x.labels[rows].unsqueeze(1) == entries).double() - p)
        if by_entropy is not None:
            grad -= by_entropy[rows].double().unsqueeze(1) * p * (logp + self.entropy[rows].unsqueeze(1))
        return grad


def compute_errors(case: Case, output: Output, exact: Exact) -> Errors:
    """Errors of the outputs of a case; None for outputs that it does not compute."""
    x, by_entropy = exact.x, None
    by_logprob = x.upstream
    if case.work == "policy loss":
        logprob, entropy = exact.logprob.clone().requires_grad_(), exact.entropy.clone().requires_grad_()
        clipped_loss(logprob, entropy, x.old_logprob, x.advantage).sum().backward()
        assert logprob.grad is not None
        by_logprob, by_entropy = logprob.grad, entropy.grad
    hidden_grad, weight_grad = exact.grads(by_logprob, by_entropy)
    return {
        "log-prob": None if output.logprob is None else relative_error(output.logprob, exact.logprob),
        "entropy": None if output.entropy is None else relative_error(output.entropy, exact.entropy),
        "hidden grad": None if output.hidden_grad is None else relative_error(output.hidden_grad[exact.rows], hidden_grad),
        "weight grad": None if output.weight_grad is None else relative_error(output.weight_grad[exact.entries], weight_grad),
    }


def draft_loss(loss: DraftLoss, draft_logits: Tensor, trunk_logits: Tensor, row_weights: Tensor | None = None) -> Tensor:
    """The summed draft loss, from its definition, with a weight for each row (None: 1)."""
    logq, logp = draft_logits.log_softmax(1), trunk_logits.log_softmax(1).detach()
    p, q = logp.exp(), logq.exp()
    soft = -(p * logq).sum(1)
    if loss == "kl":
        value = (p * (logp - logq)).sum(1)
    elif loss == "e2e_greedy":
        value = 1 - (p * q).sum(1) + SOFT_CE_WEIGHT * soft
    else:
        tv = 1 - torch.minimum(p, q).sum(1)
        value = {"soft_ce": soft, "tv": tv, "e2e_tv": tv + SOFT_CE_WEIGHT * soft}[loss]
    return (value if row_weights is None else value * row_weights).sum()


def exact_draft_grads(x: Inputs, state: Tensor, loss: DraftLoss, rows: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the draft's states at `rows` and of the weight at `entries`, by autograd on float64 logits."""
    weight = x.weight.detach().double()
    weight_grad = torch.zeros(len(entries), weight.shape[1], dtype=torch.float64, device=weight.device)
    hidden_grads = []
    for start in range(0, len(state), ROWS_PER_CHUNK):
        h, trunk = (s.detach()[start : start + ROWS_PER_CHUNK].double() for s in (state, x.hidden))
        logits = (h @ weight.T).requires_grad_()
        (logit_grad,) = torch.autograd.grad(draft_loss(loss, logits, trunk @ weight.T), logits)
        weight_grad += logit_grad[:, entries].T @ h
        hidden_grads.append(logit_grad[rows[(rows >= start) & (rows < start + len(h))] - start] @ weight)
    return torch.cat(hidden_grads), weight_grad


def compute_draft_errors(x: Inputs, state: Tensor, loss: DraftLoss, exact: Exact) -> tuple[Errors, Errors]:
    """Errors of the kernel's gradients, and of plain torch's."""
    grads = exact_draft_grads(x, state, loss, exact.rows, exact.entries)

    def errors(compute: Callable[[], Tensor]) -> Errors:
        hidden_grad, weight_grad = torch.autograd.grad(compute(), (state, x.weight))
        return {
            "hidden grad": relative_error(hidden_grad[exact.rows], grads[0]),
            "weight grad": relative_error(weight_grad[exact.entries], grads[1]),
        }

    kernel = errors(lambda: linear_draft_loss(state, x.hidden, x.weight, x.labels, loss=loss, workspace_bytes=GIB // 2).loss_sum)
    plain = errors(lambda: draft_loss(loss, (state @ x.weight.T).float(), (x.hidden @ x.weight.T).detach().float()))
    return kernel, plain


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = parser(__doc__)
    arguments.add_argument("--shape", type=Shape.parse, default=Shape(8192, 4096, 151680) if device == "cuda" else Shape(64, 64, 1000))
    shape = arguments.parse_args().shape
    x = make_inputs(shape, torch.bfloat16, device, seed=0)
    exact = Exact.of(x)
    # Eager torch, or compiled torch if eager torch runs out of GPU memory.
    plain = next(
        (c for c in make_peer_cases(device) if c.work == "forward+backward" and c.name.startswith("torch") and can_run(c, x)), None
    )
    torch_errors = compute_errors(plain, plain.run(x), exact) if plain else {}
    measured: list[tuple[str, str, Errors, Errors]] = [
        (c.work, c.name, compute_errors(c, c.run(x), exact), torch_errors) for c in make_cases(shape, device)
    ]
    noise = torch.randn(x.hidden.shape, device=device, generator=torch.Generator(device=device).manual_seed(1))
    state = (0.6 * x.hidden.detach().float() + 0.8 * noise).to(x.hidden.dtype).requires_grad_()
    for loss in get_args(DraftLoss):
        if loss != "ce":
            measured.append(("draft loss", loss, *compute_draft_errors(x, state, loss, exact)))

    print_environment()
    rows, misses = [], []
    names = ("log-prob", "entropy", "hidden grad", "weight grad")
    for work, name, errors, of_torch in measured:
        rows.append((work, name, *(f"{format_number(errors.get(n), '.1e')} ({format_number(of_torch.get(n), '.1e')})" for n in names)))
        for what, error in errors.items():
            bound = of_torch.get(what)
            # `not <=`, so that NaN is a miss.
            if error is not None and bound is not None and not error <= MAX_OF_TORCH * bound:
                misses.append(f"{work}, {name}: {what} error {error:.1e}, torch's {bound:.1e}")
        forward = errors.get("log-prob")
        if forward is not None and "triton" in name and not forward <= MAX_FORWARD:
            misses.append(f"{work}, {name}: log-prob error {forward:.1e}, bound {MAX_FORWARD:.0e}")
    print(f"{shape}, errors (and those of plain torch):\n")
    print(markdown_table(("what", "case", *names), rows))
    finish(misses)


if __name__ == "__main__":
    main()
