"""Cases of `linear_logprob`, and the comparison of an implementation's results with the float64 oracle's.

Values are bounded absolutely (they are fp32), gradients by a multiple of what plain torch in the same dtype is off by, so that a bound
survives a change of shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpctl.kernels.logprob import LogProbOut, linear_logprob

ROUNDINGS = 4
"""Rounding errors of a term of a sum, in units in the last place: logit, exponential, product, and sum."""


@dataclass(frozen=True)
class Case:
    """Shapes and options; tensors are drawn from `seed`."""

    rows: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    padding: int = 0
    ignored: float = 0.2
    chosen: float | None = None
    temperature: str = "one"
    entropy: bool = True
    workspace: int = 1 << 20
    scale: float = 2.0
    seed: int = 0

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        g = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(self.rows, self.hidden, generator=g)
        weight = torch.randn(self.vocab, self.hidden, generator=g) * self.scale / self.hidden**0.5
        labels = torch.randint(0, self.vocab - self.padding, (self.rows,), generator=g)
        labels[torch.rand(self.rows, generator=g) < self.ignored] = -100
        options: dict[str, Any] = {"entropy": self.entropy, "hit": True, "valid_vocab": self.vocab - self.padding}
        if self.chosen is not None:
            options["rows"] = (torch.rand(self.rows, generator=g) < self.chosen).to(device)
        if self.temperature == "number":
            options["temperature"] = 0.7
        elif self.temperature == "each":
            options["temperature"] = (torch.rand(self.rows, generator=g) + 0.5).to(device)
        return hidden.to(device, self.dtype), weight.to(device, self.dtype), labels.to(device), options


def upstream(case: Case, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(case.seed + 1)
    return torch.randn(case.rows, generator=g).to(device), torch.randn(case.rows, generator=g).to(device)


def scored(case: Case, implementation: str, device: str = "cpu", **more: Any) -> tuple[LogProbOut, Tensor, Tensor]:
    """Results, and the gradients of hidden and weight for random upstream gradients of log-prob and entropy."""
    hidden, weight, labels, options = case.tensors(device)
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear_logprob(hidden, weight, labels, workspace_bytes=case.workspace, implementation=implementation, **options, **more)
    by_logprob, by_entropy = upstream(case, device)
    loss = (out.logprob * by_logprob).sum()
    if out.entropy is not None:
        loss = loss + (out.entropy * by_entropy).sum()
    return out, *torch.autograd.grad(loss, (hidden, weight))


def plain_torch(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Gradients by plain torch, every logit in the operands' dtype and softmax in fp32."""
    hidden, weight, labels, options = case.tensors(device)
    hidden.requires_grad_()
    weight.requires_grad_()
    temperature = options.get("temperature", 1.0)
    temperature = temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    logp = ((hidden @ weight[: options["valid_vocab"]].T).float() / temperature).log_softmax(1)
    keep = (labels != -100) & options.get("rows", torch.ones_like(labels, dtype=torch.bool))
    by_logprob, by_entropy = upstream(case, device)
    loss = (logp.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1) * by_logprob * keep).sum()
    if case.entropy:
        loss = loss - ((logp.exp() * logp).sum(1) * by_entropy * keep).sum()
    return torch.autograd.grad(loss, (hidden, weight))


def magnitudes(case: Case, device: str = "cpu") -> tuple[float, float]:
    """Norms of the gradients of hidden and weight with all terms made positive: rounding is proportional to these if terms cancel."""
    hidden, weight, labels, options = case.tensors(device)
    hidden, weight = hidden.double(), weight[: options["valid_vocab"]].double()
    temperature = options.get("temperature", 1.0)
    temperature = temperature.double().unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    logp = (hidden @ weight.T / temperature).log_softmax(1)
    keep = (labels != -100) & options.get("rows", torch.ones_like(labels, dtype=torch.bool))
    chosen = torch.zeros_like(logp).scatter_(1, labels.clamp(min=0).unsqueeze(1), 1.0)
    by_logprob, by_entropy = upstream(case, device)
    by_logit = by_logprob.abs().unsqueeze(1) * (chosen + logp.exp())
    if case.entropy:
        entropy = -(logp.exp() * logp).sum(1, keepdim=True)
        by_logit = by_logit + by_entropy.abs().unsqueeze(1) * logp.exp() * (logp.abs() + entropy)
    by_logit = by_logit * keep.unsqueeze(1) / temperature
    return (by_logit @ weight.abs()).norm().item(), (by_logit.T @ hidden.abs()).norm().item()


def relative(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖, or ‖got‖ if exact is 0."""
    got, exact = got.double(), exact.double()
    return ((got - exact).norm() / exact.norm().clamp(min=1e-30)).item() if exact.norm() > 0 else got.norm().item()


def assert_agrees(case: Case, implementation: str, device: str = "cpu", values: float = 1e-5) -> None:
    """Assert that `implementation` matches the oracle's log-prob, entropy, hits and gradients."""
    got, hidden_grad, weight_grad = scored(case, implementation, device)
    exact, exact_hidden_grad, exact_weight_grad = scored(case, "reference", device)
    # Relative to at least 1: the log-prob of an almost certain label has the rounding of a mass of 1.
    assert (got.logprob - exact.logprob).norm() <= values * exact.logprob.norm().clamp(min=1)
    assert (got.logprob <= 0).all()
    if case.entropy:
        assert got.entropy is not None and exact.entropy is not None
        assert (got.entropy - exact.entropy).abs().max() <= values * 10
    assert got.hit is not None and exact.hit is not None
    assert torch.equal(got.hit, exact.hit)
    actual = zip(
        ("hidden", "weight"),
        (hidden_grad, weight_grad),
        (exact_hidden_grad, exact_weight_grad),
        plain_torch(case, device),
        magnitudes(case, device),
        strict=True,
    )
    for name, tensor, expected, plain, magnitude in actual:
        assert tensor.dtype == expected.dtype
        # Rounding the result costs half a unit in the last place, which exact (also rounded) does not show. For an almost certain label
        # 1 - p cancels in fp32, as the terms of a sum may.
        cancelled = ROUNDINGS * torch.finfo(torch.float32).eps * magnitude / expected.double().norm().clamp(min=1e-30).item()
        bound = 1.5 * relative(plain, expected) + max(torch.finfo(case.dtype).eps, 1e-5, cancelled)
        assert relative(tensor, expected) <= bound, f"gradient of {name}: {relative(tensor, expected):.2e}, bound {bound:.2e}"
